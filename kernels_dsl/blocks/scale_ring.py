"""Scales of 128 elements of K in shared memory, beside the ring's stages of A and B that they belong to.

One warp copies those of a stage: neighbours in memory by one bulk copy, as TMA does A and B, others with
cp.async, an element a lane, whatever their strides. Its lanes arrive at the stage's full barrier when their
copies land, so who waits for A and B has waited for the scales as well. Loads to registers instead would stop
the warp that waits for them, whose matrix instructions come late then; and many cp.async get in the way of
the matrix instructions' own reads of shared memory.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.config.promotion import ScaleTiles, TileScales

from .cp_async import cp_async
from .inline_ptx import inline_ptx

LANES = 32
"""Of the copying warp, each of which arrives."""
BULK_BYTES = 16
"""What a bulk copy's addresses and size are multiples of."""
BULK_LEAST = 128
"""Scales from which on they are copied so: fewer come later in bulk."""


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
    stage, full = sS[None, state.index], ring.producer_get_barrier(state)
    copy_tile(tiles.a, scales[0], origin[0], group, stage, full)
    copy_tile(tiles.b, scales[1], origin[1], group, stage, full)
    cute.arch.cp_async_mbarrier_arrive_noinc(full)


@cute.jit
def copy_tile(
    tile: cutlass.Constexpr,  # TileScales
    mS: cute.Tensor,  # (groups of MN, groups of K)
    origin: Int32,
    group: Int32,
    stage: cute.Tensor,  # (floats,) in shared memory
    full: cute.Pointer,
) -> None:
    """Starts the copies of the scales of K group `group` of one operand's tile, whose first row is `origin`.

    Behind mS's last row a bulk copy leaves what was there, other copies repeat the last scale.
    """
    if const_expr(tile.step > 1 or tile.count < BULK_LEAST):
        copy_elements(tile, mS, origin, group, stage)
    else:
        rows = cutlass.min(mS.shape[0] - origin, Int32(tile.count))
        source = (mS.iterator + cute.crd2idx((origin, group), mS.layout)).toint()
        if (mS.stride[0] == 1) & (source % BULK_BYTES == 0) & (rows % (BULK_BYTES // 4) == 0):
            if rows > 0 and cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_expect_tx(full, rows * 4)
                copy_bulk(stage.iterator + tile.start, source, rows * 4, full)
        else:
            copy_elements(tile, mS, origin, group, stage)


@cute.jit
def copy_elements(
    tile: cutlass.Constexpr, mS: cute.Tensor, origin: Int32, group: Int32, stage: cute.Tensor
) -> None:
    """The same, element by element."""
    lane = cute.arch.lane_idx()
    for i in range_constexpr(-(-tile.count // LANES)):
        # Where there are fewer scales than lanes, some copy the last one again: a branch costs more.
        number = cutlass.min(lane + i * LANES, tile.count - 1)
        row = origin + number * tile.step
        if const_expr(tile.rows > 1):
            row = row // tile.rows
        at = (cutlass.min(row, mS.shape[0] - 1), group)
        source, target = mS.iterator + cute.crd2idx(at, mS.layout), stage.iterator + (tile.start + number)
        cp_async(target, source, 4, Int32(4))


@dsl_user_op
def copy_bulk(target: cute.Pointer, source: Int64, size: Int32, full: cute.Pointer, *, loc=None, ip=None):
    """Starts a copy of `size` bytes to shared memory that count at `full`. All in multiples of BULK_BYTES."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    values = (target.toint(), source, size, full.toint())
    inline_ptx(None, values, text, "r,l,r,r", effects=True, loc=loc, ip=ip)


def entry(tile: TileScales, row: Int32) -> Int32:
    """Where in a stage the scale of row `row` of the tile is."""
    return tile.start + (row if tile.step == 1 else row // tile.step)
