"""Main loop of a warp-specialised fp8 GEMM in which every kept block has a scale: sums of two levels.

The counterpart of `operand_ring.main_loop`. The tensor cores sum one block, or one stage of a long one, into
partial accumulators, which are then scaled and added to the float32 set. While one warpgroup adds, another's
WGMMAs run. What a warpgroup does between its products is in their way: a block's scale is looked up while
they run, and whether the stage that comes then is full is asked before the additions.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from kernels_dsl.blocks.hw.pipeline import is_full
from kernels_dsl.blocks.hw.wgmma import issue_k_tile, issue_product
from kernels_dsl.blocks.mainloop.promoted_ring import pinned


@cute.jit
def promoted_blocks(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiled_mma: cute.TiledMma,
    fragments: tuple,  # total (MMA, MMA_M, MMA_N), A and B descriptors (MMA, MMA_MN, MMA_K, slots)
    groups: Int32,
    shape: cutlass.Constexpr,  # (pieces, units)
    factor: cutlass.Constexpr,
    next_turn: cutlass.Constexpr,
) -> pipeline.PipelineState:
    """total = sum over blocks of A @ B of the block, times factor(first block of a group, number in it).

    A group is one block of `len(pieces)` stages, or `units` blocks in one stage, each with a partial set of
    accumulators of its own. `next_turn`: None, or what to call once the last WGMMA is done.
    """
    total, tCrA, tCrB = fragments
    pieces, units = shape
    partials = [cute.make_rmem_tensor(total.shape, cutlass.Float32) for _ in range(units)]
    total.fill(0.0)
    ready = is_full(ring, state)
    for group in cutlass.range(groups, unroll=1):
        factors = []
        for piece in cutlass.range_constexpr(len(pieces)):
            ring.consumer_wait(state, ready)
            if cutlass.const_expr(units == 1):
                issue_k_tile(tiled_mma, partials[0], tCrA, tCrB, state.index, False, steps=pieces[piece])
            else:
                for unit in cutlass.range_constexpr(units):
                    slot = state.index * units + unit
                    a, b = tCrA[None, None, None, slot], tCrB[None, None, None, slot]
                    issue_product(tiled_mma, partials[unit], a, b, False)
            if cutlass.const_expr(piece == 0):
                factors = [factor(group * units, unit) for unit in range(units)]
            warpgroup.wait_group(0)
            ring.consumer_release(state)
            state.advance()
            ready = is_full(ring, state)
            for unit in cutlass.range_constexpr(units):
                for i in cutlass.range_constexpr(cute.size(total)):
                    total[i] = pinned(total[i] + partials[unit][i] * factors[unit])
    if cutlass.const_expr(next_turn is not None):
        next_turn()
    return state
