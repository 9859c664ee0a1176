"""Sets of bytes of global memory: pieces of one length at addresses in any order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Spans(NamedTuple):
    """Bytes [start, start + size) of each of int64 ``starts``; ``low`` and ``high`` bound them all."""

    starts: Array
    size: int
    low: int
    high: int

    def alignment(self) -> int:
        """The largest power of two, up to 16, that divides every start and the size."""
        bits = (
            self.size | (self.low if len(self.starts) == 1 else int(np.bitwise_or.reduce(self.starts))) | 16
        )
        return bits & -bits

    def one_run(self) -> bool:
        """True if the pieces follow each other with no gap, in order."""
        starts = self.starts
        if len(starts) == 1:
            return True
        if self.high - self.low != len(starts) * self.size or int(starts[0]) != self.low:
            return False
        return bool((starts[1:] - starts[:-1] == self.size).all())

    def units(self, unit: int, origin: int) -> Array | slice:
        """Numbers, from that of address ``origin`` on, of the units of ``unit`` bytes that these bytes touch.

        ``unit`` is a power of two. A slice where they are one run.
        """
        base = origin // unit
        if self.one_run():
            return slice(self.low // unit - base, (self.high - 1) // unit - base + 1)
        first = self.starts // unit - base
        count = -(-self.size // unit)
        return first if count == 1 else (first[:, None] + np.arange(count)).reshape(-1)

    def meeting(self, other: Spans) -> int | None:
        """Address of the first byte of a piece of ``other`` that overlaps one of these; None for none."""
        if self.low >= other.high or other.low >= self.high:
            return None
        mine = np.sort(self.starts)
        at = np.searchsorted(mine, other.starts + other.size) - 1
        hit = (at >= 0) & (mine[np.maximum(at, 0)] + self.size > other.starts)
        if not hit.any():
            return None
        found = int(np.argmax(hit))
        return max(int(other.starts[found]), int(mine[at[found]]))


def of_lanes(addresses: Array, size: int) -> Spans:
    """``size`` bytes at each address."""
    low = int(addresses.min())
    return Spans(addresses, size, low, int(addresses.max()) + size)


def of_bytes(start: int, size: int) -> Spans:
    """``size`` bytes from ``start`` on."""
    return Spans(np.array([start], np.int64), size, start, start + size)


def of_elements(addresses: Array, size: int) -> Spans:
    """The elements of a box, ``size`` bytes each: as its rows, where these have one length."""
    breaks = np.flatnonzero(np.diff(addresses) != size) + 1
    if len(breaks) == 0:
        return of_bytes(int(addresses[0]), len(addresses) * size)
    length = int(breaks[0])
    if (
        len(addresses) % length
        or not (breaks % length == 0).all()
        or len(breaks) + 1 != len(addresses) // length
    ):
        return of_lanes(addresses, size)
    return of_lanes(addresses[::length], length * size)
