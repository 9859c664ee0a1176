"""Scales of 128 elements of K in shared memory, beside the ring's stages of A and B that they belong to.

One warp brings them. Scales of rows lie in the stage: neighbours in memory come by one bulk copy, as A and B
by TMA, others with cp.async, an element a lane, whatever their strides. Where a tile has a few only, as of
blocks, lanes load those of 32 stages at once and leave them in a ring of their own. The warp arrives at the
stage's full barrier, which waits for its copies, so who waits for A and B has waited for the scales too.
Loads to registers of those who multiply would stop them, and their matrix instructions would come late; many
cp.async get in the way of the matrix instructions' own reads of shared memory; and the warp, among so many
that want to issue, has time for some fifty instructions a stage.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.cp_async import arrive_with_copies, cp_async
from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.blocks.hw.pipeline import skip
from kernels_dsl.blocks.mainloop.operand_ring import ExtraWords
from kernels_dsl.config.promotion import RECENT, ScaleTiles, TileScales

LANES = 32
ARRIVALS = 1
"""Of the copying warp at a stage."""
BULK_BYTES = 16
"""The addresses and size of a bulk copy are multiples of it."""
BULK_LEAST = 128
"""Scales from which on they are copied so: fewer come later in bulk."""


class Scales(NamedTuple):
    """Scales of 128 elements of K, float32: of A (groups of M, groups of K), of B (groups of N, groups of K).

    In kernels' arguments both have a third mode, L.
    """

    a: cute.Tensor
    b: cute.Tensor


class StagedScales(NamedTuple):
    """Scales in shared memory: (floats, stages), and where a tile has few (entries, RECENT stages)."""

    stages: cute.Tensor
    few: cute.Tensor


def staged_scales(tiles: ScaleTiles | None, stages: int) -> ExtraWords | None:
    """Shared memory of `StagedScales`; None where there are no scales."""
    if tiles is None:
        return None
    staged, recent = tiles.floats * stages, tiles.few * RECENT

    def set_up(words: cute.Pointer) -> StagedScales:
        floats = cute.recast_ptr(words, dtype=Float32)
        return StagedScales(
            cute.make_tensor(floats, cute.make_layout((max(1, tiles.floats), stages))),
            cute.make_tensor(floats + staged, cute.make_layout((max(1, tiles.few), RECENT))),
        )

    return ExtraWords((staged + recent) // 2, set_up)


class BulkCopies(NamedTuple):
    """Copies of an operand's scales, one a K group: bytes of each, address of the first, step to the next."""

    size: Int32
    source: Int64
    step: Int64


@dataclass(frozen=True)
class ScaleLoader:
    """The copying warp's work on one tile of the output, whose first row and column are `m` and `n`."""

    ring: pipeline.PipelineTmaAsync
    tiles: ScaleTiles
    staged: StagedScales
    scales: Scales  # of the tile's batch
    m: Int32
    n: Int32

    @cute.jit
    def copy(self, state: pipeline.PipelineState, first: Int32, end: Int32) -> pipeline.PipelineState:
        """Copies the scales of K groups `first` to `end`. Returns the state after their stages."""
        few = self.fetch_few(first)
        while first < end:
            count = cutlass.min(end - first, Int32(LANES))
            following = self.fetch_few(first + LANES)
            in_bulk = bulk_source(self.tiles.a, self.scales.a, self.m, first) and bulk_source(
                self.tiles.b, self.scales.b, self.n, first
            )
            if in_bulk:
                self.copy_in_bulk(state, first, count, few)
            else:
                self.copy_singly(state, first, count, few)
            few, state = following, skip(state, count)
            first += count
        return state

    def operands(self) -> tuple[tuple[TileScales, cute.Tensor, Int32], ...]:
        """Of A and B: how their scales lie, the scales, the tile's first row."""
        return (self.tiles.a, self.scales.a, self.m), (self.tiles.b, self.scales.b, self.n)

    @cute.jit
    def fetch_few(self, first: Int32) -> tuple[Float32, ...]:
        """Starts loads of few scales: of K group `first` + this lane, or of the last one."""
        values = []
        for tile, mS, start in self.operands():
            if const_expr(tile.few):
                group = cutlass.min(first + cute.arch.lane_idx(), mS.shape[1] - 1)
                for i in range_constexpr(tile.count):
                    row = cutlass.min((start + i * tile.step) // tile.rows, mS.shape[0] - 1)
                    values.append(mS[row, group])
        return tuple(values)

    @cute.jit
    def leave_few(self, values: cutlass.Constexpr, stage: Int32) -> None:
        """Stores what `fetch_few` loaded for the stages from number `stage` on, before what lane 0 does next.

        The stages whose scales these replace were empty when a later one was waited for.
        """
        lane, few = cute.arch.lane_idx(), self.staged.few
        for i in range_constexpr(len(values)):
            few[i, (stage + lane) & (RECENT - 1)] = values[i]
        cute.arch.sync_warp()

    @cute.jit
    def copy_in_bulk(
        self, state: pipeline.PipelineState, first: Int32, count: Int32, few: cutlass.Constexpr
    ) -> None:
        """Waits until each stage is empty, and begins its copies; leaves the few scales.

        After a tensor's last row a copy leaves what was there.
        """
        a = bulk_copies(self.tiles.a, self.scales.a, self.m, first)
        b = bulk_copies(self.tiles.b, self.scales.b, self.n, first)
        source_a, source_b = a.source, b.source
        own = state.clone()
        # The first copies do not wait for the loads of the few.
        self.begin_bulk(own, a, b, False)
        self.leave_few(few, own.count)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.ring.producer_get_barrier(own))
        for _ in cutlass.range(1, count, unroll=1):
            own.advance()
            source_a, source_b = source_a + a.step, source_b + b.step
            self.begin_bulk(own, a._replace(source=source_a), b._replace(source=source_b), True)

    @cute.jit
    def begin_bulk(
        self, state: pipeline.PipelineState, a: BulkCopies, b: BulkCopies, arrive: cutlass.Constexpr
    ) -> None:
        """Waits until the stage at `state` is empty, begins its copies from both addresses, and arrives."""
        self.ring.sync_object_empty.wait(state.index, state.phase)
        full = self.ring.producer_get_barrier(state)
        target = self.staged.stages.iterator + state.index * self.tiles.floats
        if cute.arch.lane_idx() == 0:
            if const_expr(self.tiles.floats > 0):
                expect = cute.arch.mbarrier_arrive_and_expect_tx if arrive else cute.arch.mbarrier_expect_tx
                expect(full, a.size + b.size)
            elif const_expr(arrive):
                cute.arch.mbarrier_arrive(full)
            for tile, copies in ((self.tiles.a, a), (self.tiles.b, b)):
                if const_expr(not tile.few):
                    copy_bulk(target + tile.start, copies.source, copies.size, full)

    @cute.jit
    def copy_singly(
        self, state: pipeline.PipelineState, first: Int32, count: Int32, few: cutlass.Constexpr
    ) -> None:
        """The same, element by element; all lanes do it."""
        own = state.clone()
        for k in cutlass.range(count, unroll=1):
            self.ring.sync_object_empty.wait(own.index, own.phase)
            stage, full = self.staged.stages[None, own.index], self.ring.producer_get_barrier(own)
            for tile, mS, start in self.operands():
                copy_elements(tile, mS, start, first + k, stage)
            arrive_with_copies(full)
            if k == 0:
                self.leave_few(few, own.count)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(full)
            own.advance()


@cute.jit
def bulk_source(tile: cutlass.Constexpr, mS: cute.Tensor, origin: Int32, group: Int32) -> Boolean:
    """True where an operand's scales of the tile can be copied in bulk, or need no copy."""
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
def bulk_copies(tile: cutlass.Constexpr, mS: cute.Tensor, origin: Int32, group: Int32) -> BulkCopies:
    """Copies of an operand's scales of the tile at `origin`, from K group `group` on; none of few scales."""
    size, source, step = Int32(0), Int64(0), Int64(0)
    if const_expr(not tile.few):
        size = bulk_rows(tile, mS, origin) * 4
        source = (mS.iterator + cute.crd2idx((origin, group), mS.layout)).toint()
        step = Int64(mS.stride[1]) * 4
    return BulkCopies(size, source, step)


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
def copy_bulk(target: cute.Pointer, source: Int64, size: Int32, full: cute.Pointer, *, loc=None, ip=None):
    """Starts a copy of `size` bytes to shared memory that count at `full`. All in multiples of BULK_BYTES."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    values = (target.toint(), source, size, full.toint())
    inline_ptx(None, values, text, "r,l,r,r", effects=True, loc=loc, ip=ip)


def entry(tile: TileScales, row: Int32) -> Int32:
    """Number of row `row`'s scale among those of a tile."""
    return row if tile.step == 1 else row // tile.step
