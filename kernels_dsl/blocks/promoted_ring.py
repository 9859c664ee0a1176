"""Main loop of a warp-specialised fp8 GEMM whose sums have two levels; else as `operand_ring.main_loop`.

The tensor cores sum one stage, 128 of K, into a set of partial accumulators, which are then scaled and added
to the float32 set. While one warpgroup adds, another's WGMMAs run. The partial set is small, since both must
fit in the registers: a warpgroup's tile is worked off in chunks of 64 rows and an instruction's columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.config.promotion import Promotion

from .inline_ptx import inline_ptx
from .promotion import TileScales, tile_scales
from .wgmma import WGMMA_M


@dataclass(frozen=True)
class ChunkScales:
    """The scales of a stage that a thread's accumulators need: of each chunk's rows, and of its columns.

    Loads start behind a stage's first product, so that their addresses cost nothing. Two of these are taken
    and loaded together, every other stage, for the two stages behind: ptxas gives all these loads one
    scoreboard, so a wait for one set is a wait for what was loaded last.
    """

    rows: tuple[TileScales, ...]  # one for each 64 rows of the warpgroup's tile; (2) values or (1)
    columns: tuple[TileScales, ...]  # one for each chunk of columns; (columns / 4) values or (1)
    factors: cute.Tensor  # (2, waves, chunks) of this stage: of rows, times the columns' if they share one
    across: cute.Tensor | None  # (columns / 4, chunks) of this stage, where each column has its own

    def fetch(self, stage: Int32, end: Int32) -> None:
        """Start the loads for `stage`; for the last before `end`, if that is before it."""
        for scales in (*self.rows, *self.columns):
            scales.fetch(cutlass.min(stage, end - 1))

    def take(self) -> None:
        """What was fetched becomes factors of this stage."""
        for chunk, columns in enumerate(self.columns):
            for wave, rows in enumerate(self.rows):
                for j in range(2):
                    factor = rows.of(j) if self.across is not None else rows.of(j) * columns.of(0)
                    self.factors[j, wave, chunk] = pinned(factor)
            if self.across is not None:
                for i in range(cute.size(columns.tCrS)):
                    self.across[i, chunk] = pinned(columns.of(i))

    def add(self, total: cute.Tensor, partial: cute.Tensor, wave: int, chunk: int) -> None:
        """total += partial, ((2, 2, columns / 8)), each element times its row's and its column's scale."""
        for i in range(cute.size(partial)):
            j, v, p = i // 2 % 2, i % 2, i // 4
            factor = self.factors[j, wave, chunk]
            if self.across is not None:
                factor = factor * self.across[v + 2 * p, chunk]
            total[i] = pinned(total[i] + partial[i] * factor)


def chunk_scales(
    promotion: Promotion,
    scales: tuple | None,  # of A and of B: (groups of M or N, groups of K, L)
    mma: cute.TiledMma,  # 64 x a chunk's columns
    tile: tuple[int, int],  # the warpgroup's rows and columns
    origin: tuple,  # (m, n, batch) of its tile in the problem
    thread: Int32,  # within the warpgroup
) -> tuple[ChunkScales, ...]:
    """Sets of scales of a warpgroup's tile: two, one where registers allow no more, none without scales."""
    if not promotion.scaled:
        return ()
    columns = mma.op.shape_mnk[1]
    tCcC = mma.get_slice(thread).partition_C(cute.make_identity_tensor((WGMMA_M, columns)))
    m, n, batch = origin
    mSA, mSB = (scale[None, None, batch] for scale in scales)
    row = [tCcC[(0, j, 0), 0, 0][0] for j in range(2)]
    column = [tCcC[(v, 0, p), 0, 0][1] for p in range(columns // 8) for v in range(2)]

    def one_set() -> tuple[tuple[TileScales, ...], tuple[TileScales, ...]]:
        return tuple(
            tile_scales(mSA, [m + start + x for x in row], promotion.rows_a, WGMMA_M)
            for start in range(0, tile[0], WGMMA_M)
        ), tuple(
            tile_scales(mSB, [n + start + x for x in column], promotion.rows_b, columns)
            for start in range(0, tile[1], columns)
        )

    first = one_set()
    each = cute.size(first[1][0].tCrS)
    factors = [cute.make_rmem_tensor((2, len(first[0]), len(first[1])), Float32) for _ in range(2)]
    if each > 1:
        across = cute.make_rmem_tensor((each, len(first[1])), Float32)
        return (ChunkScales(*first, factors[0], across),)
    return ChunkScales(*first, factors[0], None), ChunkScales(*one_set(), factors[1], None)


def by_rows(acc: cute.Tensor) -> cute.Tensor:
    """Accumulators (MMA, MMA_M, MMA_N) with 64 rows after the other, as `epilogue.store_tile` counts them."""
    return cute.make_tensor(acc.iterator, cute.select(acc.layout, mode=[0, 2, 1]))


@cute.jit
def promoted_loop(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiled_mma: cute.TiledMma,
    fragments: tuple,  # acc (MMA, MMA_M, MMA_N), A and B descriptors (MMA, MMA_MN, MMA_K, slots)
    stages: tuple,  # first stage's number along K, and past the last
    scales: tuple,  # of `chunk_scales`
    next_turn: cutlass.Constexpr,
) -> pipeline.PipelineState:
    """acc = sum over stages of scales * (A @ B of the stage).

    `next_turn`: None, or what to call at the end.
    """
    first, end = stages
    acc = fragments[0]
    acc.fill(0.0)
    columns = tiled_mma.op.shape_mnk[1]
    partial = cute.make_rmem_tensor(tiled_mma.partition_shape_C((WGMMA_M, columns)), Float32)  # (MMA, 1, 1)
    tensors = (*fragments, partial)
    for i in range_constexpr(len(scales)):
        scales[i].fetch(first + i, end)
    if const_expr(len(scales) == 2):
        for pair in cutlass.range((end - first) // 2, unroll=1):
            stage = first + 2 * pair
            state = add_stage(ring, state, tiled_mma, tensors, (stage, end), scales[:1], scales)
            state = add_stage(ring, state, tiled_mma, tensors, (stage + 1, end), scales[1:], ())
        if (end - first) % 2 == 1:
            state = add_stage(ring, state, tiled_mma, tensors, (end - 1, end), scales[:1], scales[:1])
    else:
        for stage in cutlass.range(first, end, unroll=1):
            state = add_stage(ring, state, tiled_mma, tensors, (stage, end), scales, scales)
    if const_expr(next_turn is not None):
        next_turn()
    return state


def add_stage(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiled_mma: cute.TiledMma,
    tensors: tuple,  # acc, A, B as in `promoted_loop`, and the partial accumulators of a chunk
    stages: tuple,  # this one's number along K, and past the last
    scales: tuple,  # none, or what holds the scales of this stage
    renewed: tuple,  # sets, from this stage's on, that are taken here, and fetched for the stages behind them
) -> pipeline.PipelineState:
    """acc += scales * (A @ B of one stage). Returns the state of the next."""
    acc, tCrA, tCrB, partial = tensors
    waves, chunks = cute.size(acc, mode=[1]), cute.size(acc, mode=[2])
    ring.consumer_wait(state)
    for wave in range(waves):
        for chunk in range(chunks):
            a, b = tCrA[None, wave, None, state.index], tCrB[None, chunk, None, state.index]
            issue_chunk(tiled_mma, partial, a, b)
            if wave == chunk == 0:
                for of_stage in renewed:
                    of_stage.take()
                for i, of_stage in enumerate(renewed):
                    of_stage.fetch(stages[0] + len(renewed) + i, stages[1])
            warpgroup.wait_group(0)
            if wave == waves - 1 and chunk == chunks - 1:
                ring.consumer_release(state)
            total = acc[None, wave, chunk]
            if scales:
                scales[0].add(total, partial, wave, chunk)
            else:
                for i in range(cute.size(total)):
                    total[i] = pinned(total[i] + partial[i])
    state.advance()
    return state


@dsl_user_op
def pinned(value: Float32, *, loc=None, ip=None) -> Float32:
    """The same value, computed here and not behind the next matrix instruction, where the compiler would like
    to have it: the partial accumulators would be needed twice then, and there are no registers for that."""
    return inline_ptx(Float32, (value,), "", "=f,0", effects=True, loc=loc, ip=ip)


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
