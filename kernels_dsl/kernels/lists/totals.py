"""Sums over the warps that share a list."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class Warps(NamedTuple):
    """The warps that share a list: this thread's number among them, and their scratch memory."""

    warp: Int32
    scratch: cute.Tensor | None  # int32 shared memory (warps, 2); None for one warp


class Total(NamedTuple):
    """A sum over all threads of the warps, and over those of the warps before this one."""

    all: Int32
    before: Int32


@cute.jit
def total(count: cutlass.Constexpr, mine: Int32, warps: Warps, buffer: Int32) -> Total:
    """The sum of `mine` over `count` warps. Buffers alternate from call to call."""
    warp, scratch = warps
    everything, before = cute.arch.warp_redux_sync(mine, "add"), Int32(0)
    if const_expr(count > 1):
        if cute.arch.lane_idx() == 0:
            scratch[warp, buffer] = everything
        cute.arch.sync_threads()
        everything = Int32(0)
        for other in cutlass.range(count, unroll=4):
            found = scratch[other, buffer]
            everything += found
            before += found * Int32(other < warp)
    return Total(everything, before)
