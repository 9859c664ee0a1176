"""Main loop of a warp-specialised fp8 GEMM whose sums have two levels; else as `operand_ring.main_loop`.

The tensor cores sum one stage, 128 of K, into a set of partial accumulators, which are then scaled and added
to the float32 set. While one warpgroup adds, another's WGMMAs run. The partial set is small, since both must
fit in the registers: a warpgroup's tile is worked off in chunks of 64 rows and an instruction's columns.
Where a tile is one chunk and there are registers for two partial sets, these take turns, and a warpgroup's
own WGMMAs of the next stage run while it adds; those of the next tile's first stage run beside the epilogue.
Whether the stage that comes then is full is asked before the additions and used behind them: a warpgroup that
asks when it could go on is late.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.blocks.hw.pipeline import is_full
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.blocks.mainloop.scale_ring import entry
from kernels_dsl.config.promotion import RECENT, ScaleTiles, TileScales


class ChunkFactors:
    """The factors of a thread's accumulators in a chunk, 64 rows and an instruction's columns.

    They are those of the two rows and those of the columns, or of one column where they share its scale.
    """

    def __init__(
        self,
        tiles: ScaleTiles,
        places: tuple,  # of `scale_ring.staged_scales`
        mma: cute.TiledMma,  # 64 x a chunk's columns
        row: Int32,  # of the CTA's tile, the warpgroup's first
        thread: Int32,  # within the warpgroup
        zero: Int32,  # which the compiler does not know to be 0
    ) -> None:
        width = mma.op.shape_mnk[1]
        tCcC = mma.get_slice(thread).partition_C(cute.make_identity_tensor((WGMMA_M, width)))
        self.tiles, self.places, self.zero, self.width = tiles, places, zero, width
        rows = [entry(tiles.a, row + tCcC[(0, j, 0), 0, 0][0]) for j in range(2)]
        columns = [entry(tiles.b, tCcC[(v, 0, p), 0, 0][1]) for p in range(width // 8) for v in range(2)]
        self.rows = rows[:1] if tiles.a.few else rows
        self.columns = columns[:1] if tiles.b.few else columns

    def load(self, state: pipeline.PipelineState, wave: int, chunk: int) -> list:
        """The scales of rows, then of columns, of the stage at `state`, which is full."""
        a, b = self.tiles.a, self.tiles.b
        row, column = wave * (WGMMA_M // a.step), chunk * (self.width // b.step)
        of_rows = [self.at(a, at + row, state) for at in self.rows]
        return of_rows + [self.at(b, at + column, state) for at in self.columns]

    def at(self, tile: TileScales, number: Int32, state: pipeline.PipelineState) -> Float32:
        """Scale `number` of an operand's tile."""
        if tile.few:
            return self.places[1][tile.start + number, state.count & (RECENT - 1)]
        return self.places[0][tile.start + number, state.index]

    def of(self, scales: list, after: Float32 | None = None) -> tuple[list, list]:
        """(two rows' factors, columns' factors) of what `load` returned.

        No columns' factors where those share one: the rows' have it then. `after`: a value before which
        nothing is computed.
        """
        rows, columns = (scales[: len(self.rows)] * 2)[:2], scales[len(self.rows) :]
        if len(columns) == 1:
            if after is not None:
                columns = [behind(columns[0], after, self.zero)]
            return [pinned(x * columns[0]) for x in rows], []
        return [pinned(x) for x in rows], [pinned(x) for x in columns]


def chunk_factors(tiles: ScaleTiles | None, staged: tuple, *rest: Any) -> ChunkFactors | None:
    """`ChunkFactors` of `staged`, one entry, and the rest; None where no scales are."""
    return None if tiles is None else ChunkFactors(tiles, staged[0], *rest)


def by_rows(acc: cute.Tensor) -> cute.Tensor:
    """Accumulators (MMA, MMA_M, MMA_N) with 64 rows after the other, as `epilogue.store_tile` counts them."""
    return cute.make_tensor(acc.iterator, cute.select(acc.layout, mode=[0, 2, 1]))


@cute.jit
def promoted_loop(
    ring: pipeline.PipelineTmaAsync,
    full: tuple,  # (state, what `is_full` said of it)
    tiled_mma: cute.TiledMma,
    fragments: tuple,  # acc (MMA, MMA_M, MMA_N), A and B descriptors (MMA, MMA_MN, MMA_K, slots)
    stages: Int32,
    factors: cutlass.Constexpr,
    deep: cutlass.Constexpr,
) -> tuple:
    """acc += sum over stages of scales * (A @ B of the stage). Returns `full` of the stage behind them.

    `factors`: of `chunk_factors`. `deep`: the tile is one chunk, and two partial sets take turns. A tile's
    first stage may have been added before, by `begin_ahead` and `end_ahead`.
    """
    state, ready = full
    if const_expr(deep):
        if stages > 0:
            state, ready = add_overlapped(ring, (state, ready), tiled_mma, fragments, stages, factors)
    else:
        state, ready = add_stages(ring, (state, ready), tiled_mma, fragments, stages, factors)
    return state, ready


@cute.jit
def begin_ahead(
    ring: pipeline.PipelineTmaAsync,
    full: tuple,  # (state, what `is_full` said of it)
    more: Boolean,
    tiled_mma: cute.TiledMma,
    fragments: tuple,
    into: tuple,  # of `overlapped_set`
    factors: cutlass.Constexpr,
):
    """Issues the first stage of the next tile, at `full`, if there are `more` tiles.

    Else the stage before is multiplied again, for nothing: with a branch around matrix instructions that are
    not waited for, ptxas waits for them where the ways meet.
    """
    state, ready = full
    if more:
        ring.consumer_wait(state, ready)
    issue_stage(back(state, 1 - Int32(more)), tiled_mma, fragments, into, factors)


@cute.jit
def end_ahead(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    more: Boolean,
    acc: cute.Tensor,
    found: tuple,  # of `overlapped_set`
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


def partial_set(tiled_mma: cute.TiledMma) -> cute.Tensor:
    """Accumulators (MMA, 1, 1) of a chunk."""
    shape = tiled_mma.partition_shape_C((WGMMA_M, tiled_mma.op.shape_mnk[1]))
    return cute.make_rmem_tensor(shape, Float32)


@cute.jit
def add_stages(
    ring: pipeline.PipelineTmaAsync,
    full: tuple,
    tiled_mma: cute.TiledMma,
    fragments: tuple,
    stages: Int32,
    factors: cutlass.Constexpr,
) -> tuple:
    """acc += scales * (A @ B of the stage), stage by stage and chunk by chunk, each waited for."""
    state, ready = full
    partial = partial_set(tiled_mma)
    for _ in cutlass.range(stages, unroll=1):
        state, ready = add_stage(ring, (state, ready), tiled_mma, (*fragments, partial), factors)
    return state, ready


@cute.jit
def add_overlapped(
    ring: pipeline.PipelineTmaAsync,
    full: tuple,
    tiled_mma: cute.TiledMma,
    fragments: tuple,
    stages: Int32,
    factors: cutlass.Constexpr,
) -> tuple:
    """acc += scales * (A @ B of the stage), where a stage is one chunk: each is added while the next runs."""
    sets = overlapped_set(tiled_mma, factors), overlapped_set(tiled_mma, factors)
    done = full[0].clone()
    state = begin_stage(ring, full, tiled_mma, fragments, sets[0], factors)
    ready = is_full(ring, state)
    for _ in cutlass.range((stages - 1) // 2, unroll=1):
        state = begin_stage(ring, (state, ready), tiled_mma, fragments, sets[1], factors)
        done, ready = end_stage(ring, done, fragments[0], sets[0], factors, 1, state)
        state = begin_stage(ring, (state, ready), tiled_mma, fragments, sets[0], factors)
        done, ready = end_stage(ring, done, fragments[0], sets[1], factors, 1, state)
    if stages % 2 == 0:
        state = begin_stage(ring, (state, ready), tiled_mma, fragments, sets[1], factors)
        done, ready = end_stage(ring, done, fragments[0], sets[0], factors, 1, state)
        end_stage(ring, done, fragments[0], sets[1], factors, 0)
    else:
        end_stage(ring, done, fragments[0], sets[0], factors, 0)
    return state, ready


def back(state: pipeline.PipelineState, steps: Int32) -> pipeline.PipelineState:
    """The state before `state`, which has had one, for 1; the same for 0."""
    index = state.index - steps
    index = index + (index >> 31 & state.stages)
    return pipeline.PipelineState(state.stages, state.count - steps, index, state.phase)


def overlapped_set(tiled_mma: cute.TiledMma, factors: ChunkFactors | None) -> tuple:
    """(partial accumulators of a chunk, registers of its scales or None)."""
    count = 0 if factors is None else len(factors.rows) + len(factors.columns)
    return partial_set(tiled_mma), cute.make_rmem_tensor((count,), Float32) if count else None


def scales_of(found: tuple, factors: ChunkFactors | None) -> tuple[list, list]:
    """(rows' factors, columns' factors) of the scales in `found`, of `overlapped_set`."""
    return ([], []) if factors is None else factors.of([found[1][i] for i in range(cute.size(found[1]))])


def add_set(acc: cute.Tensor, found: tuple, scales: tuple[list, list]) -> None:
    """acc += scales * partial."""
    add_chunk(acc[None, 0, 0], found[0], *scales)


def begin_stage(
    ring: pipeline.PipelineTmaAsync,
    full: tuple,  # (state, what `is_full` said of it)
    tiled_mma: cute.TiledMma,
    fragments: tuple,
    into: tuple,  # of `overlapped_set`
    factors: ChunkFactors | None,
) -> pipeline.PipelineState:
    """Waits for the stage at `full` and does `issue_stage`. Returns the state of the next."""
    state, ready = full
    ring.consumer_wait(state, ready)
    return issue_stage(state, tiled_mma, fragments, into, factors)


def issue_stage(
    state: pipeline.PipelineState,
    tiled_mma: cute.TiledMma,
    fragments: tuple,
    into: tuple,  # of `overlapped_set`
    factors: ChunkFactors | None,
) -> pipeline.PipelineState:
    """Issues partial = A @ B of the stage at `state`, reads its scales. Returns the state of the next."""
    a, b = (x[None, 0, None, state.index] for x in fragments[1:])
    issue_chunk(tiled_mma, into[0], a, b)
    if factors is not None:
        for i, scale in enumerate(factors.load(state, 0, 0)):
            into[1][i] = pinned(scale)
    state.advance()
    return state


def end_stage(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    acc: cute.Tensor,
    found: tuple,  # of `overlapped_set`
    factors: ChunkFactors | None,
    newer: int,
    ahead: pipeline.PipelineState | None = None,
) -> tuple:
    """acc += scales * partial of the stage at `state`, behind which `newer` were issued.

    Returns the next state, and what `is_full` says of `ahead`, if that is given.
    """
    scales = scales_of(found, factors)
    warpgroup.wait_group(newer)
    ring.consumer_release(state)
    ready = None if ahead is None else is_full(ring, ahead)
    add_set(acc, found, scales)
    state.advance()
    return state, ready


def add_stage(
    ring: pipeline.PipelineTmaAsync,
    full: tuple,  # (state, what `is_full` said of it)
    tiled_mma: cute.TiledMma,
    tensors: tuple,  # acc, A, B as in `promoted_loop`, and the partial accumulators of a chunk
    factors: ChunkFactors | None,
) -> tuple:
    """acc += scales * (A @ B of one stage). Returns the same of the next."""
    state, ready = full
    acc, tCrA, tCrB, partial = tensors
    waves, chunks = cute.size(acc, mode=[1]), cute.size(acc, mode=[2])
    ring.consumer_wait(state, ready)
    ahead = state.clone()
    ahead.advance()
    for wave in range(waves):
        for chunk in range(chunks):
            a, b = tCrA[None, wave, None, state.index], tCrB[None, chunk, None, state.index]
            issue_chunk(tiled_mma, partial, a, b)
            loaded = [] if factors is None else factors.load(state, wave, chunk)
            warpgroup.wait_group(0)
            if wave == waves - 1 and chunk == chunks - 1:
                ring.consumer_release(state)
                ready = is_full(ring, ahead)
            scales = ([], []) if factors is None else factors.of(loaded, after=partial[0])
            add_chunk(acc[None, wave, chunk], partial, *scales)
    return ahead, ready


def add_chunk(total: cute.Tensor, partial: cute.Tensor, rows: list, columns: list) -> None:
    """total += partial, ((2, 2, columns / 8)), each element times its row's and column's factor, if any."""
    for i in range(cute.size(partial)):
        j, v, p = i // 2 % 2, i % 2, i // 4
        value = partial[i]
        if rows:
            value = value * (rows[j] * columns[v + 2 * p] if columns else rows[j])
        total[i] = pinned(total[i] + value)


@dsl_user_op
def pinned(value: Float32, *, loc=None, ip=None) -> Float32:
    """The same value, computed here and not behind the next matrix instruction, where the compiler would like
    to have it: the partial accumulators would be needed twice then, and there are no registers for that."""
    return inline_ptx(Float32, (value,), "", "=f,0", effects=True, loc=loc, ip=ip)


@dsl_user_op
def behind(value: Float32, after: Float32, zero: Int32, *, loc=None, ip=None) -> Float32:
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
