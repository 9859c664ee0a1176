"""Scales of 128 elements of K in shared memory, beside the ring's stages of A and B that they belong to.

One warp copies those of a stage with cp.async, an element a lane, whatever their strides. Its lanes arrive at
the stage's full barrier when their copies land, so who waits for A and B has waited for the scales as well.
Loads to registers instead would stop the warp that waits for them, whose matrix instructions come late then.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr

from kernels_dsl.config.promotion import ScaleTiles, TileScales

from .cp_async import cp_async

LANES = 32
"""Of the copying warp, each of which arrives."""


def staged_scales(
    tiles: ScaleTiles | None, stages: int
) -> tuple[int, Callable[[cute.Pointer], cute.Tensor]] | None:
    """(8-byte words of shared memory, what makes (floats, stages) of a pointer to them); None for none."""
    if tiles is None:
        return None
    layout = (tiles.floats, stages)

    def set_up(words: cute.Pointer) -> cute.Tensor:
        return cute.make_tensor(cute.recast_ptr(words, dtype=Float32), cute.make_layout(layout))

    return tiles.floats * stages // 2, set_up


@cute.jit
def copy_stage(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiles: cutlass.Constexpr,  # ScaleTiles
    sS: cute.Tensor,  # (floats, stages)
    scales: tuple,  # of A and B: (groups of MN, groups of K)
    origin: tuple,  # (m, n) of the tile's first row and column
    group: Int32,
) -> None:
    """What the copying warp does for the stage at `state`: waits until it is empty, starts the copies."""
    ring.sync_object_empty.wait(state.index, state.phase)
    stage = sS[None, state.index]
    copy_tile(tiles.a, scales[0], origin[0], group, stage)
    copy_tile(tiles.b, scales[1], origin[1], group, stage)
    cute.arch.cp_async_mbarrier_arrive_noinc(ring.producer_get_barrier(state))


@cute.jit
def copy_tile(
    tile: cutlass.Constexpr, mS: cute.Tensor, origin: Int32, group: Int32, stage: cute.Tensor
) -> None:
    """Starts the copies of the scales of K group `group` of one operand's tile, whose first row is `origin`.

    mS (groups of MN, groups of K); beyond it, the last ones again. `stage` (floats) in shared memory.
    """
    lane = cute.arch.lane_idx()
    for i in range_constexpr(-(-tile.count // LANES)):
        number = cutlass.min(lane + i * LANES, tile.count - 1)  # where there are fewer, some copy the last
        row = origin + number * tile.step
        if const_expr(tile.rows > 1):
            row = row // tile.rows
        at = (cutlass.min(row, mS.shape[0] - 1), group)
        source, target = mS.iterator + cute.crd2idx(at, mS.layout), stage.iterator + (tile.start + number)
        cp_async(target, source, 4, Int32(4))


def entry(tile: TileScales, row: Int32) -> Int32:
    """Where in a stage the scale of row `row` of the tile is."""
    return tile.start + (row if tile.step == 1 else row // tile.step)
