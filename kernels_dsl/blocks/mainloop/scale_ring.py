"""Scales of 128 elements of K in shared memory, beside the ring's stages of A and B that they belong to.

One warp brings them. Scales of rows lie in the stage: neighbours in memory come by one bulk copy, as A and B
by TMA, others with cp.async, an element a lane, whatever their strides. Where a tile has a few only, as of
blocks, lanes load those of 32 stages at once and leave them in a ring of their own. The warp arrives at the
stage's full barrier, which waits for its copies, so who waits for A and B has waited for the scales too.
Loads to registers of those who multiply would stop them, and their matrix instructions would come late; many
cp.async get in the way of the matrix instructions' own reads of shared memory; and the warp, among so many
that want to issue, has time for some fifty instructions a stage.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.cp_async import cp_async
from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.blocks.hw.pipeline import skip
from kernels_dsl.config.promotion import RECENT, ScaleTiles, TileScales

LANES = 32
ARRIVALS = 1
"""Of the copying warp at a stage."""
BULK_BYTES = 16
"""What a bulk copy's addresses and size are multiples of."""
BULK_LEAST = 128
"""Scales from which on they are copied so: fewer come later in bulk."""


def staged_scales(
    tiles: ScaleTiles | None, stages: int
) -> tuple[int, Callable[[cute.Pointer], tuple[cute.Tensor, cute.Tensor]]] | None:
    """(8-byte words of shared memory, what makes tensors of a pointer to them); None for none.

    The tensors: (floats, stages), and of few scales (entries, RECENT stages).
    """
    if tiles is None:
        return None
    staged, recent = tiles.floats * stages, tiles.few * RECENT

    def set_up(words: cute.Pointer) -> tuple[cute.Tensor, cute.Tensor]:
        floats = cute.recast_ptr(words, dtype=Float32)
        return (
            cute.make_tensor(floats, cute.make_layout((max(1, tiles.floats), stages))),
            cute.make_tensor(floats + staged, cute.make_layout((max(1, tiles.few), RECENT))),
        )

    return (staged + recent) // 2, set_up


@cute.jit
def copy_stages(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiles: cutlass.Constexpr,  # ScaleTiles
    places: tuple,  # of `staged_scales`
    scales: tuple,  # of A and B: (groups of MN, groups of K)
    origin: tuple,  # (m, n) of the tile's first row and column
    groups: tuple,  # first and end
) -> pipeline.PipelineState:
    """What the copying warp does for the stages of a tile, from `state` on. Returns the state behind them."""
    first, end = groups
    few = fetch_few(tiles, scales, origin, first)
    while first < end:
        count = cutlass.min(end - first, Int32(LANES))
        following = fetch_few(tiles, scales, origin, first + LANES)
        in_bulk = bulk_source(tiles.a, scales[0], origin[0], first) and bulk_source(
            tiles.b, scales[1], origin[1], first
        )
        if in_bulk:
            copy_in_bulk(ring, state, tiles, places, scales, origin, (first, count), few)
        else:
            copy_singly(ring, state, tiles, places, scales, origin, (first, count), few)
        few, state = following, skip(state, count)
        first += count
    return state


@cute.jit
def fetch_few(tiles: cutlass.Constexpr, scales: tuple, origin: tuple, first: Int32) -> tuple:
    """Loads of few scales: this lane's are of K group `first` + lane, or of the last one. Not waited for."""
    values = []
    for tile, mS, start in zip((tiles.a, tiles.b), scales, origin):
        if const_expr(tile.few):
            group = cutlass.min(first + cute.arch.lane_idx(), mS.shape[1] - 1)
            for i in range_constexpr(tile.count):
                row = cutlass.min((start + i * tile.step) // tile.rows, mS.shape[0] - 1)
                values.append(mS[row, group])
    return tuple(values)


@cute.jit
def leave_few(recent: cute.Tensor, values: tuple, stage: Int32) -> None:
    """Stores what `fetch_few` loaded for the stages from number `stage` on, before what lane 0 does next.

    The stages whose scales these replace were empty when a later one was waited for.
    """
    lane = cute.arch.lane_idx()
    for i in range_constexpr(len(values)):
        recent[i, (stage + lane) & (RECENT - 1)] = values[i]
    cute.arch.sync_warp()


@cute.jit
def bulk_source(tile: cutlass.Constexpr, mS: cute.Tensor, origin: Int32, group: Int32) -> Boolean:
    """Whether an operand's scales of the tile can be copied in bulk, or need no copy."""
    possible = Boolean(True)
    if const_expr(not tile.few):
        if const_expr(tile.step > 1 or tile.count < BULK_LEAST):
            possible = Boolean(False)
        else:
            rows = bulk_rows(tile, mS, origin)
            source = (mS.iterator + cute.crd2idx((origin, group), mS.layout)).toint()
            aligned = (source % BULK_BYTES == 0) & (rows % (BULK_BYTES // 4) == 0) & (rows > 0)
            possible = aligned & (mS.stride[0] == 1) & (mS.stride[1] % (BULK_BYTES // 4) == 0)
    return possible


def bulk_rows(tile: TileScales, mS: cute.Tensor, origin: Int32) -> Int32:
    """Scales of a tile that the tensor has."""
    return cutlass.max(cutlass.min(mS.shape[0] - origin, Int32(tile.count)), Int32(0))


@cute.jit
def copy_in_bulk(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiles: cutlass.Constexpr,
    places: tuple,
    scales: tuple,
    origin: tuple,
    groups: tuple,  # first, number
    few: tuple,
) -> None:
    """Waits until the stages are empty, one after the other, and begins their copies; leaves the few scales.

    Behind a tensor's last row a copy leaves what was there.
    """
    bytes_a, source_a, step_a = bulk_copies(tiles.a, scales[0], origin[0], groups[0])
    bytes_b, source_b, step_b = bulk_copies(tiles.b, scales[1], origin[1], groups[0])
    own = state.clone()
    # The first copies do not wait for the loads of the few.
    begin_bulk(ring, own, tiles, places[0], (source_a, source_b), (bytes_a, bytes_b), False)
    leave_few(places[1], few, own.count)
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ring.producer_get_barrier(own))
    for _ in cutlass.range(1, groups[1], unroll=1):
        own.advance()
        source_a, source_b = source_a + step_a, source_b + step_b
        begin_bulk(ring, own, tiles, places[0], (source_a, source_b), (bytes_a, bytes_b), True)


@cute.jit
def begin_bulk(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiles: cutlass.Constexpr,
    sS: cute.Tensor,
    sources: tuple,
    sizes: tuple,
    arrive: cutlass.Constexpr,
) -> None:
    """Waits until the stage at `state` is empty, begins its copies from A's and B's address, and arrives."""
    ring.sync_object_empty.wait(state.index, state.phase)
    full = ring.producer_get_barrier(state)
    at = sS.iterator + state.index * tiles.floats
    if cute.arch.lane_idx() == 0:
        if const_expr(tiles.floats > 0):
            expect = cute.arch.mbarrier_arrive_and_expect_tx if arrive else cute.arch.mbarrier_expect_tx
            expect(full, sizes[0] + sizes[1])
        elif const_expr(arrive):
            cute.arch.mbarrier_arrive(full)
        for tile, source, size in zip((tiles.a, tiles.b), sources, sizes):
            if const_expr(not tile.few):
                copy_bulk(at + tile.start, source, size, full)


@cute.jit
def bulk_copies(tile: cutlass.Constexpr, mS: cute.Tensor, origin: Int32, group: Int32) -> tuple:
    """(bytes of a K group's copy, address of the first, from one to the next)."""
    size, source, step = Int32(0), Int64(0), Int64(0)
    if const_expr(not tile.few):
        size = bulk_rows(tile, mS, origin) * 4
        source = (mS.iterator + cute.crd2idx((origin, group), mS.layout)).toint()
        step = Int64(mS.stride[1]) * 4
    return size, source, step


@cute.jit
def copy_singly(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiles: cutlass.Constexpr,
    places: tuple,
    scales: tuple,
    origin: tuple,
    groups: tuple,  # first, number
    few: tuple,
) -> None:
    """The same, element by element; all lanes do it."""
    first, count = groups
    own = state.clone()
    for k in cutlass.range(count, unroll=1):
        ring.sync_object_empty.wait(own.index, own.phase)
        stage, full = places[0][None, own.index], ring.producer_get_barrier(own)
        copy_elements(tiles.a, scales[0], origin[0], first + k, stage)
        copy_elements(tiles.b, scales[1], origin[1], first + k, stage)
        arrive_with_copies(full)
        if k == 0:
            leave_few(places[1], few, own.count)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(full)
        own.advance()


@cute.jit
def copy_elements(
    tile: cutlass.Constexpr, mS: cute.Tensor, origin: Int32, group: Int32, stage: cute.Tensor
) -> None:
    """Starts copies of the scales of K group `group` of an operand's tile, whose first row is `origin`."""
    if const_expr(not tile.few):
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
def arrive_with_copies(full: cute.Pointer, *, loc=None, ip=None):
    """Keeps `full` from completing until this lane's cp.async are done; counts as no arrival."""
    text = "cp.async.mbarrier.arrive.shared::cta.b64 [$0];"
    inline_ptx(None, (full.toint(),), text, "r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def copy_bulk(target: cute.Pointer, source: Int64, size: Int32, full: cute.Pointer, *, loc=None, ip=None):
    """Starts a copy of `size` bytes to shared memory that count at `full`. All in multiples of BULK_BYTES."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    values = (target.toint(), source, size, full.toint())
    inline_ptx(None, values, text, "r,l,r,r", effects=True, loc=loc, ip=ip)


def entry(tile: TileScales, row: Int32) -> Int32:
    """Which of a tile's scales that of its row `row` is."""
    return row if tile.step == 1 else row // tile.step
