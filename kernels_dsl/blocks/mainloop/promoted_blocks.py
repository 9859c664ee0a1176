"""Main loop of a warp-specialised fp8 GEMM in which every kept block has a scale: sums of two levels.

The counterpart of `operand_ring.main_loop`. The tensor cores sum one block, or one stage of a long one, into
partial accumulators, which are then scaled and added to the float32 set. While one warpgroup adds, another's
WGMMAs run. What a warpgroup does between its products is in their way: it looks up a block's scale while they
run, and asks before the additions whether the next stage is full.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from kernels_dsl.blocks.hw.pipeline import is_full, release
from kernels_dsl.blocks.hw.wgmma import issue_k_tile, issue_product
from kernels_dsl.blocks.mainloop.operand_ring import Fragments
from kernels_dsl.blocks.mainloop.promoted_ring import pinned


@cute.jit
def promoted_blocks(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    groups: Int32,
    pieces: cutlass.Constexpr,
    units: cutlass.Constexpr,
    factor: cutlass.Constexpr,
    pass_turn: cutlass.Constexpr = None,
) -> pipeline.PipelineState:
    """total = sum over blocks of A @ B of the block, times factor(first block of a group, number in it).

    A group is one block of `len(pieces)` stages, or `units` blocks in one stage, each with a partial set of
    accumulators of its own. `pass_turn`: None, or what to call once the last WGMMA is done.
    """
    total, tCrA, tCrB = fragments
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
            state = release(ring, state)
            ready = is_full(ring, state)
            for unit in cutlass.range_constexpr(units):
                for i in cutlass.range_constexpr(cute.size(total)):
                    total[i] = pinned(total[i] + partials[unit][i] * factors[unit])
    if cutlass.const_expr(pass_turn is not None):
        pass_turn()
    return state
