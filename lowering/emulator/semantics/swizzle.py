"""Shared-memory swizzles of TMA and WGMMA.

A swizzle permutes the 16-byte chunks of each 128-byte line by XOR with the line's number. It acts on bits of
the absolute shared-memory address, so a tile that does not start on the repeat of its pattern is rotated, not
moved.
"""

from __future__ import annotations

import enum
from typing import TypeVar

import numpy as np

Address = TypeVar("Address", int, np.ndarray)


class Swizzle(enum.IntEnum):
    """Swizzle modes, numbered as the tensor map descriptor numbers them."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3

    @property
    def span(self) -> int:
        """Bytes within which chunks are permuted: 16 (none), 32, 64 or 128."""
        return 16 << self.value

    @property
    def repeat(self) -> int:
        """Bytes after which the pattern repeats: 16 (none), 256, 512 or 1024."""
        return 16 if self is Swizzle.NONE else 128 << self.value

    @property
    def mask(self) -> int:
        """Address bits that the swizzle changes; each is XORed with the bit three places above it."""
        return (self.span - 1) & ~0xF


def swizzle(address: Address, mode: Swizzle) -> Address:
    """Physical shared-memory address of a logical one.

    `address` is an int or an integer array of byte addresses relative to the start of the CTA's shared memory
    window. Swizzle is an involution, so the same call maps physical addresses back. 128B: bits [4, 7) ^= [7,
    10); 64B: [4, 6) ^= [7, 9); 32B: [4] ^= [7].
    """
    if mode == Swizzle.NONE:
        return address
    return address ^ ((address >> 3) & mode.mask)
