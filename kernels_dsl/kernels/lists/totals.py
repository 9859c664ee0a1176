"""Sums over the warps that share a list."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def total(warps: cutlass.Constexpr, mine: Int32, place: tuple, buffer: Int32) -> tuple[Int32, Int32]:
    """(sum over all threads of `warps` warps, over those of the warps before this one).

    `place`: (warp, int32 shared memory (warps, 2)). Buffers alternate from call to call.
    """
    warp, scratch = place
    everything, before = cute.arch.warp_redux_sync(mine, "add"), Int32(0)
    if const_expr(warps > 1):
        if cute.arch.lane_idx() == 0:
            scratch[warp, buffer] = everything
        cute.arch.sync_threads()
        everything = Int32(0)
        for other in cutlass.range(warps, unroll=4):
            count = scratch[other, buffer]
            everything += count
            before += count * Int32(other < warp)
    return everything, before
