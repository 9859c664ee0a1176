"""Main loop of a warp-specialised fp8 GEMM whose sums have two levels; else as `operand_ring.main_loop`.

The tensor cores sum one stage, 128 of K, into a set of partial accumulators, which are then scaled and added
to the float32 set. While one warpgroup adds, another's WGMMAs run. The partial set is small, since both must
fit in the registers: a warpgroup's tile is worked off in chunks of 64 rows and an instruction's columns.
Where a tile is one chunk and there are registers for two partial sets, these take turns, and a warpgroup's
own WGMMAs of the next stage run while it adds; those of the next tile's first stage run beside the epilogue.
A warpgroup asks before the additions whether the next stage is full, and uses the answer after them: one that
asks when it could go on is late.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.barriers import Consumer
from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.blocks.hw.pipeline import is_full
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.blocks.mainloop.operand_ring import Fragments
from kernels_dsl.blocks.mainloop.scale_ring import StagedScales, entry
from kernels_dsl.config.promotion import RECENT, ScaleTiles, TileScales


class Factors(NamedTuple):
    """Factors of a thread's accumulators in a chunk: of its two rows, of its columns; [] where all are 1."""

    rows: list[Float32]
    columns: list[Float32]


class ChunkFactors:
    """The factors of a thread's accumulators in a chunk, 64 rows and an instruction's columns.

    They are those of the two rows and those of the columns, or of one column where they share its scale.
    """

    def __init__(
        self,
        tiles: ScaleTiles,
        staged: StagedScales,
        mma: cute.TiledMma,  # 64 x a chunk's columns
        row: Int32,  # of the CTA's tile, the warpgroup's first
        consumer: Consumer,
        zero: Int32,  # which the compiler does not know to be 0
    ) -> None:
        width = mma.op.shape_mnk[1]
        tCcC = mma.get_slice(consumer.thread).partition_C(cute.make_identity_tensor((WGMMA_M, width)))
        self.tiles, self.staged, self.zero, self.width = tiles, staged, zero, width
        rows = [entry(tiles.a, row + tCcC[(0, j, 0), 0, 0][0]) for j in range(2)]
        columns = [entry(tiles.b, tCcC[(v, 0, p), 0, 0][1]) for p in range(width // 8) for v in range(2)]
        self.rows = rows[:1] if tiles.a.few else rows
        self.columns = columns[:1] if tiles.b.few else columns

    def load(self, state: pipeline.PipelineState, wave: int, chunk: int) -> list[Float32]:
        """The scales of rows, then of columns, of the stage at `state`, which is full."""
        a, b = self.tiles.a, self.tiles.b
        row, column = wave * (WGMMA_M // a.step), chunk * (self.width // b.step)
        of_rows = [self.scale(a, number + row, state) for number in self.rows]
        return of_rows + [self.scale(b, number + column, state) for number in self.columns]

    def scale(self, tile: TileScales, number: Int32, state: pipeline.PipelineState) -> Float32:
        """Scale `number` of an operand's tile."""
        if tile.few:
            return self.staged.few[tile.start + number, state.count & (RECENT - 1)]
        return self.staged.stages[tile.start + number, state.index]

    def of(self, scales: list[Float32], after: Float32 | None = None) -> Factors:
        """The factors of the scales that `load` returned.

        No columns' factors where those share one: the rows' have it then. `after`: a value before which
        nothing is computed.
        """
        rows, columns = (scales[: len(self.rows)] * 2)[:2], scales[len(self.rows) :]
        if len(columns) == 1:
            if after is not None:
                columns = [computed_after(columns[0], after, self.zero)]
            return Factors([pinned(x * columns[0]) for x in rows], [])
        return Factors([pinned(x) for x in rows], [pinned(x) for x in columns])


class NextStage(NamedTuple):
    """Position of the next stage in the ring, and what `is_full` said of it."""

    state: pipeline.PipelineState
    ready: Boolean


class PartialSet(NamedTuple):
    """Partial accumulators (MMA, 1, 1) of a chunk, and registers of its scales, None without."""

    sums: cute.Tensor
    scales: cute.Tensor | None


def by_rows(acc: cute.Tensor) -> cute.Tensor:
    """Accumulators (MMA, MMA_M, MMA_N) with 64 rows after the other, as `epilogue.store_tile` counts them."""
    return cute.make_tensor(acc.iterator, cute.select(acc.layout, mode=[0, 2, 1]))


@cute.jit
def promoted_loop(
    ring: pipeline.PipelineTmaAsync,
    stage: NextStage,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    stages: Int32,
    factors: cutlass.Constexpr,
    deep: cutlass.Constexpr,
) -> NextStage:
    """acc += sum over stages of scales * (A @ B of the stage). Returns the stage after them.

    `factors`: `ChunkFactors`, None without scales. `deep`: the tile is one chunk, and two partial sets take
    turns. A tile's first stage may have been added before, by `begin_ahead` and `end_ahead`.
    """
    if const_expr(deep):
        if stages > 0:
            stage = add_overlapped(ring, stage, tiled_mma, fragments, stages, factors)
    else:
        stage = add_stages(ring, stage, tiled_mma, fragments, stages, factors)
    return stage


@cute.jit
def begin_ahead(
    ring: pipeline.PipelineTmaAsync,
    stage: NextStage,
    more: Boolean,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    into: PartialSet,
    factors: cutlass.Constexpr,
):
    """Issues the first stage of the next tile, `stage`, if there are `more` tiles.

    Else the stage before is multiplied again, for nothing: with a branch around matrix instructions that are
    not waited for, ptxas waits for them where the ways meet.
    """
    state, ready = stage
    if more:
        ring.consumer_wait(state, ready)
    issue_stage(back(state, 1 - Int32(more)), tiled_mma, fragments, into, factors)


@cute.jit
def end_ahead(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    more: Boolean,
    acc: cute.Tensor,
    found: PartialSet,
    factors: cutlass.Constexpr,
) -> pipeline.PipelineState:
    """acc = scales * partial of the stage that `begin_ahead` issued, if there are `more` tiles.

    Returns the next state.
    """
    warpgroup.wait_group(0)
    if more:
        ring.consumer_release(state)
        acc.fill(0.0)
        add_set(acc, found, scales_of(found, factors))
    state.advance()
    return state


def partial_accumulators(tiled_mma: cute.TiledMma) -> cute.Tensor:
    """Accumulators (MMA, 1, 1) of a chunk."""
    shape = tiled_mma.partition_shape_C((WGMMA_M, tiled_mma.op.shape_mnk[1]))
    return cute.make_rmem_tensor(shape, Float32)


@cute.jit
def add_stages(
    ring: pipeline.PipelineTmaAsync,
    stage: NextStage,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    stages: Int32,
    factors: cutlass.Constexpr,
) -> NextStage:
    """acc += scales * (A @ B of the stage), stage by stage and chunk by chunk, each waited for."""
    sums = partial_accumulators(tiled_mma)
    for _ in cutlass.range(stages, unroll=1):
        stage = add_stage(ring, stage, tiled_mma, fragments, sums, factors)
    return stage


@cute.jit
def add_overlapped(
    ring: pipeline.PipelineTmaAsync,
    stage: NextStage,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    stages: Int32,
    factors: cutlass.Constexpr,
) -> NextStage:
    """acc += scales * (A @ B of the stage), where a stage is one chunk: each is added while the next runs."""
    sets = overlapped_set(tiled_mma, factors), overlapped_set(tiled_mma, factors)
    acc, done = fragments.acc, stage.state.clone()
    state = begin_stage(ring, stage, tiled_mma, fragments, sets[0], factors)
    ready = is_full(ring, state)
    for _ in cutlass.range((stages - 1) // 2, unroll=1):
        state = begin_stage(ring, NextStage(state, ready), tiled_mma, fragments, sets[1], factors)
        done, ready = end_stage(ring, done, acc, sets[0], factors, 1, state)
        state = begin_stage(ring, NextStage(state, ready), tiled_mma, fragments, sets[0], factors)
        done, ready = end_stage(ring, done, acc, sets[1], factors, 1, state)
    if stages % 2 == 0:
        state = begin_stage(ring, NextStage(state, ready), tiled_mma, fragments, sets[1], factors)
        done, ready = end_stage(ring, done, acc, sets[0], factors, 1, state)
        end_stage(ring, done, acc, sets[1], factors, 0)
    else:
        end_stage(ring, done, acc, sets[0], factors, 0)
    return NextStage(state, ready)


def back(state: pipeline.PipelineState, steps: Int32) -> pipeline.PipelineState:
    """The state before `state`, which has had one, for 1; the same for 0."""
    index = state.index - steps
    index = index + (index >> 31 & state.stages)
    return pipeline.PipelineState(state.stages, state.count - steps, index, state.phase)


def overlapped_set(tiled_mma: cute.TiledMma, factors: ChunkFactors | None) -> PartialSet:
    """Registers of a partial set, with room for the scales that `factors` loads."""
    count = 0 if factors is None else len(factors.rows) + len(factors.columns)
    return PartialSet(
        partial_accumulators(tiled_mma), cute.make_rmem_tensor((count,), Float32) if count else None
    )


def scales_of(found: PartialSet, factors: ChunkFactors | None) -> Factors:
    """The factors of the scales in a set."""
    if factors is None:
        return Factors([], [])
    return factors.of([found.scales[i] for i in range(cute.size(found.scales))])


def add_set(acc: cute.Tensor, found: PartialSet, factors: Factors) -> None:
    """acc += factors * partial."""
    add_chunk(acc[None, 0, 0], found.sums, factors)


def begin_stage(
    ring: pipeline.PipelineTmaAsync,
    stage: NextStage,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    into: PartialSet,
    factors: ChunkFactors | None,
) -> pipeline.PipelineState:
    """Waits for the stage and does `issue_stage`. Returns the state of the next."""
    ring.consumer_wait(stage.state, stage.ready)
    return issue_stage(stage.state, tiled_mma, fragments, into, factors)


def issue_stage(
    state: pipeline.PipelineState,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    into: PartialSet,
    factors: ChunkFactors | None,
) -> pipeline.PipelineState:
    """Issues partial = A @ B of the stage at `state`, reads its scales. Returns the state of the next."""
    a, b = (x[None, 0, None, state.index] for x in (fragments.a, fragments.b))
    issue_chunk(tiled_mma, into.sums, a, b)
    if factors is not None:
        for i, scale in enumerate(factors.load(state, 0, 0)):
            into.scales[i] = pinned(scale)
    state.advance()
    return state


def end_stage(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    acc: cute.Tensor,
    found: PartialSet,
    factors: ChunkFactors | None,
    newer: int,
    ahead: pipeline.PipelineState | None = None,
) -> NextStage:
    """acc += scales * partial of the stage at `state`, after which `newer` were issued.

    Returns the next state, and what `is_full` says of `ahead`, if that is given.
    """
    scales = scales_of(found, factors)
    warpgroup.wait_group(newer)
    ring.consumer_release(state)
    ready = None if ahead is None else is_full(ring, ahead)
    add_set(acc, found, scales)
    state.advance()
    return NextStage(state, ready)


def add_stage(
    ring: pipeline.PipelineTmaAsync,
    stage: NextStage,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    sums: cute.Tensor,  # partial accumulators of a chunk
    factors: ChunkFactors | None,
) -> NextStage:
    """acc += scales * (A @ B of one stage). Returns the next stage."""
    (acc, tCrA, tCrB), (state, ready) = fragments, stage
    waves, chunks = cute.size(acc, mode=[1]), cute.size(acc, mode=[2])
    ring.consumer_wait(state, ready)
    ahead = state.clone()
    ahead.advance()
    for wave in range(waves):
        for chunk in range(chunks):
            a, b = tCrA[None, wave, None, state.index], tCrB[None, chunk, None, state.index]
            issue_chunk(tiled_mma, sums, a, b)
            loaded = [] if factors is None else factors.load(state, wave, chunk)
            warpgroup.wait_group(0)
            if wave == waves - 1 and chunk == chunks - 1:
                ring.consumer_release(state)
                ready = is_full(ring, ahead)
            scales = Factors([], []) if factors is None else factors.of(loaded, after=sums[0])
            add_chunk(acc[None, wave, chunk], sums, scales)
    return NextStage(ahead, ready)


def add_chunk(total: cute.Tensor, partial: cute.Tensor, factors: Factors) -> None:
    """total += partial, ((2, 2, columns / 8)), each element times its row's and column's factor, if any."""
    rows, columns = factors
    for i in range(cute.size(partial)):
        j, v, p = i // 2 % 2, i % 2, i // 4
        value = partial[i]
        if rows:
            value = value * (rows[j] * columns[v + 2 * p] if columns else rows[j])
        total[i] = pinned(total[i] + value)


@dsl_user_op
def pinned(value: Float32, *, loc=None, ip=None) -> Float32:
    """The same value, computed here and not after the next matrix instruction, where the compiler would like
    to have it: the partial accumulators would be needed twice then, and there are no registers for that."""
    return inline_ptx(Float32, (value,), "", "=f,0", effects=True, loc=loc, ip=ip)


@dsl_user_op
def computed_after(value: Float32, after: Float32, zero: Int32, *, loc=None, ip=None) -> Float32:
    """`value`, in an instruction that needs `after` as well.

    Else ptxas computes with a scale between two matrix instructions, the second of which then waits for the
    load of the scale.
    """
    text = "{\n .reg .b32 t;\n and.b32 t, $2, $3;\n or.b32 $0, $1, t;\n}"
    return inline_ptx(Float32, (value, after, zero), text, "=f,f,f,r", effects=True, loc=loc, ip=ip)


@cute.jit
def issue_chunk(tiled_mma: cute.TiledMma, partial: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """Issues partial = A @ B, (MMA, MMA_K) descriptors each, as one committed group; does not wait."""
    # Setting a field rebinds the atom's value, which must not leave a loop that the caller may be in.
    own_mma = cute.make_tiled_mma(cute.make_mma_atom(tiled_mma.op))
    own_mma.set(warpgroup.Field.ACCUMULATE, False)
    warpgroup.fence()
    for k in range_constexpr(cute.size(a, mode=[1])):
        a_k, b_k = (cute.append_ones(x[None, k], up_to_rank=2) for x in (a, b))
        cute.gemm(own_mma, partial, a_k, b_k, partial)
        own_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
