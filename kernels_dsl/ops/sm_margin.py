"""SMs that kernels leave to others, such as the kernels of collectives that run beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kernels_dsl.checks.options import integer
from kernels_dsl.config.problem import Device

LEAST = 8
"""SMs that a margin must leave: clusters have up to as many CTAs."""
BLOCKS: list[list[int]] = []
"""A cell for each `sm_margin` block that was entered and not left: the SMs that it keeps free."""


@contextmanager
def sm_margin(sms: int) -> Iterator[None]:
    """Calls in this block leave `sms` SMs of the GPU to other kernels, such as a collective's.

    It holds for kernels whose CTAs stay for many tiles: on Hopper products (dense, grouped, block-sparse and
    sampled ones), attention and decoding. They launch that many CTAs fewer, and configurations are chosen for
    what is left. Kernels with a CTA for each tile, those of sm_80 to sm_89 and some of attention's backward
    pass, take every SM all the same, and free them tile by tile.

    It holds for all threads, so for autograd's too; they follow the block that was entered last. Results may
    differ in the last bits between margins, as sums are cut for another number of SMs. TypeError or
    ValueError for a number that is not whole or below 0; a call raises ValueError where fewer than 8 SMs
    would be left.
    """
    cell = [integer("sms", sms, least=0)]
    BLOCKS.append(cell)
    try:
        yield
    finally:
        BLOCKS[:] = [other for other in BLOCKS if other is not cell]


def margin() -> int:
    """The SMs to leave now."""
    try:
        return BLOCKS[-1][0]
    except IndexError:
        return 0


def with_margin(key: Any) -> Any:
    """The key under which a cache has calls that are made now."""
    sms = margin()
    return (sms, key) if sms else key


def without_margin(device: Device) -> Device:
    """The device with the SMs that calls may use now. ValueError where too few are left."""
    sms = margin()
    if not sms:
        return device
    if device.sm_count - sms < LEAST:
        raise ValueError(
            f"sm_margin is {sms}, must leave at least {LEAST} of the {device.sm_count} SMs of {device.name}"
        )
    return replace(device, sm_count=device.sm_count - sms)
