"""Shared memory of a warp-specialised GEMM, and the main loop that consumes it. Where its K tiles come from
is the producer's business: a counter along K (dense), or a list of kept blocks (block-sparse).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from .barriers import NamedBarrier, give_turn
from .wgmma import issue_k_tile


def allocate(stages: int, consumers: int, dtypes: tuple, layouts: tuple) -> tuple:
    """mbarriers of the ring, and the tensors A (M, K, slots), B (N, K, slots) and the staging of D.

    `layouts`: of A, B and one warpgroup's staging; each consumer warpgroup has its own: (64, epi_n, stages,
    consumers).
    """

    @cute.struct
    class SharedStorage:
        barriers: cute.struct.MemRange[cutlass.Int64, stages * 2]
        a: cute.struct.Align[cute.struct.MemRange[dtypes[0], cute.cosize(layouts[0])], 1024]
        b: cute.struct.Align[cute.struct.MemRange[dtypes[1], cute.cosize(layouts[1])], 1024]
        d: cute.struct.Align[cute.struct.MemRange[dtypes[2], cute.cosize(layouts[2]) * consumers], 1024]

    storage = cutlass.utils.SmemAllocator().allocate(SharedStorage)
    a_layout, b_layout, d_layout = layouts
    staging = cute.append(d_layout.outer, cute.make_layout(consumers, stride=cute.cosize(d_layout)))
    return storage.barriers.data_ptr(), (
        storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner),
        storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner),
        storage.d.get_tensor(staging, swizzle=d_layout.inner),
    )


@cute.jit
def main_loop(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiled_mma: cute.TiledMma,
    fragments: tuple,  # acc (MMA, MMA_M, MMA_N), A and B descriptors (MMA, MMA_MN, MMA_K, slots)
    groups: Int32,
    pieces: cutlass.Constexpr,
    units: cutlass.Constexpr,
    next_turn: cutlass.Constexpr,
) -> pipeline.PipelineState:
    """acc = sum of A @ B over `groups` >= 1 times `len(pieces)` stages.

    `pieces`: for each stage of a group the instructions along K in each of its `units` slots. One group of
    WGMMAs stays in flight behind the newest. The first stage is peeled: it overwrites the accumulators, so
    nobody has to clear them. `next_turn`: None, or what to call once the last WGMMA is issued.
    """
    acc, tCrA, tCrB = fragments
    release = state.clone()
    for piece in cutlass.range_constexpr(len(pieces)):
        ring.consumer_wait(state)
        issue_k_tile(tiled_mma, acc, tCrA, tCrB, state.index, piece > 0, steps=pieces[piece], units=units)
        state.advance()
        if cutlass.const_expr(piece > 0):
            warpgroup.wait_group(1)
            ring.consumer_release(release)
            release.advance()
    for _ in cutlass.range(1, groups, unroll=1):
        for piece in cutlass.range_constexpr(len(pieces)):
            ring.consumer_wait(state)
            issue_k_tile(tiled_mma, acc, tCrA, tCrB, state.index, True, steps=pieces[piece], units=units)
            state.advance()
            warpgroup.wait_group(1)
            ring.consumer_release(release)
            release.advance()
    if cutlass.const_expr(next_turn is not None):
        next_turn()
    warpgroup.wait_group(0)
    ring.consumer_release(release)
    return state


def pass_turn(group: Int32):
    """`next_turn` of a ping-pong schedule for warpgroup `group` of two."""
    return lambda: give_turn(NamedBarrier.MMA_ORDER, 1 - group)
