"""Main loop of a warp-specialised fp8 GEMM whose sums have two levels; else as `operand_ring.main_loop`.

The tensor cores sum one stage, 128 of K, into a set of partial accumulators, which are then scaled and added
to the float32 set. While one warpgroup adds, another's WGMMAs run. The partial set is small, since both must
fit in the registers: a warpgroup's tile is worked off in chunks of 64 rows and an instruction's columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.config.promotion import Promotion

from .promotion import TileScales, tile_scales
from .wgmma import WGMMA_M


@dataclass(frozen=True)
class ChunkScales:
    """The scales of a stage that a thread's accumulators need: of each chunk's rows, and of its columns.

    Loads start behind this stage's first product, so that the addresses cost nothing, and are for the stage
    after the next: whatever waits for a load, if only to copy a register, does so a stage later. Where every
    column has a scale, there are registers for one stage ahead only.
    """

    rows: tuple[TileScales, ...]  # one for each 64 rows of the warpgroup's tile; (2) values or (1)
    columns: tuple[TileScales, ...]  # one for each chunk of columns; (columns / 4) values or (1)
    factors: cute.Tensor  # (2, waves, chunks) of this stage: of rows, times the columns' if they share one
    following: cute.Tensor | None  # those of the next stage, where columns share one
    across: cute.Tensor | None  # (columns / 4, chunks) of this stage, where each column has its own

    def fetch(self, group: Int32) -> None:
        """Start the loads for elements 128 * group ... of K."""
        for scales in (*self.rows, *self.columns):
            scales.fetch(group)

    def start(self, stages: tuple) -> None:
        """Before the first of `stages` (first, past the last)."""
        self.fetch(stages[0])
        self._take(self.factors)
        if self.following is not None:
            self.fetch(cutlass.min(stages[0] + 1, stages[1] - 1))

    def ahead(self, stage: Int32, stages: tuple) -> None:
        """Behind the first product of `stage`."""
        distance = 1
        if self.following is not None:
            self._take(self.following)
            distance = 2
        self.fetch(cutlass.min(stage + distance, stages[1] - 1))

    def step(self) -> None:
        """Behind the last sum of a stage."""
        if self.following is not None:
            self.factors.store(self.following.load())
        else:
            self._take(self.factors)

    def _take(self, factors: cute.Tensor) -> None:
        """What was fetched becomes factors."""
        for chunk, columns in enumerate(self.columns):
            for wave, rows in enumerate(self.rows):
                for j in range(2):
                    factor = rows.of(j) if self.across is not None else rows.of(j) * columns.of(0)
                    factors[j, wave, chunk] = pinned(factor)
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
) -> ChunkScales | None:
    """The scales of a warpgroup's tile; None where `promotion` has none."""
    if not promotion.scaled:
        return None
    columns = mma.op.shape_mnk[1]
    tCcC = mma.get_slice(thread).partition_C(cute.make_identity_tensor((WGMMA_M, columns)))
    m, n, batch = origin
    mSA, mSB = (scale[None, None, batch] for scale in scales)
    row = [tCcC[(0, j, 0), 0, 0][0] for j in range(2)]
    column = [tCcC[(v, 0, p), 0, 0][1] for p in range(columns // 8) for v in range(2)]
    of_rows = tuple(
        tile_scales(mSA, [m + start + x for x in row], promotion.rows_a, WGMMA_M)
        for start in range(0, tile[0], WGMMA_M)
    )
    of_columns = tuple(
        tile_scales(mSB, [n + start + x for x in column], promotion.rows_b, columns)
        for start in range(0, tile[1], columns)
    )
    each = cute.size(of_columns[0].tCrS)
    factors = [cute.make_rmem_tensor((2, len(of_rows), len(of_columns)), Float32) for _ in range(2)]
    if each > 1:
        across = cute.make_rmem_tensor((each, len(of_columns)), Float32)
        return ChunkScales(of_rows, of_columns, factors[0], None, across)
    return ChunkScales(of_rows, of_columns, factors[0], factors[1], None)


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
    scales: Any,  # ChunkScales, or None
    next_turn: cutlass.Constexpr,
) -> pipeline.PipelineState:
    """acc = sum over stages of scales * (A @ B of the stage).

    `next_turn`: None, or what to call at the end.
    """
    acc, tCrA, tCrB = fragments
    waves, chunks = cute.size(acc, mode=[1]), cute.size(acc, mode=[2])
    acc.fill(0.0)
    columns = tiled_mma.op.shape_mnk[1]
    partial = cute.make_rmem_tensor(tiled_mma.partition_shape_C((WGMMA_M, columns)), Float32)  # (MMA, 1, 1)
    if const_expr(scales is not None):
        scales.start(stages)
    for stage in cutlass.range(stages[0], stages[1], unroll=1):
        ring.consumer_wait(state)
        for wave in range_constexpr(waves):
            for chunk in range_constexpr(chunks):
                a, b = tCrA[None, wave, None, state.index], tCrB[None, chunk, None, state.index]
                issue_chunk(tiled_mma, partial, a, b)
                if const_expr(scales is not None and wave == 0 and chunk == 0):
                    scales.ahead(stage, stages)
                warpgroup.wait_group(0)
                if const_expr(wave == waves - 1 and chunk == chunks - 1):
                    ring.consumer_release(state)
                total = acc[None, wave, chunk]
                if const_expr(scales is not None):
                    scales.add(total, partial, wave, chunk)
                else:
                    for i in range_constexpr(cute.size(total)):
                        total[i] = pinned(total[i] + partial[i])
        if const_expr(scales is not None):
            scales.step()
        state.advance()
    if const_expr(next_turn is not None):
        next_turn()
    return state


@dsl_user_op
def pinned(value: Float32, *, loc=None, ip=None) -> Float32:
    """The same value, computed here and not behind the next matrix instruction, where the compiler would like
    to have it: the partial accumulators would be needed twice then, and there are no registers for that."""
    return Float32(
        llvm.inline_asm(
            Float32.mlir_type,
            [value.ir_value(loc=loc, ip=ip)],
            "",
            "=f,0",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@cute.jit
def issue_chunk(tiled_mma: cute.TiledMma, partial: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """Issues partial = A @ B, (MMA, MMA_K) descriptors each, as one committed group; does not wait."""
    warpgroup.fence()
    tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
    for k in range_constexpr(cute.size(a, mode=[1])):
        a_k, b_k = (cute.append_ones(x[None, k], up_to_rank=2) for x in (a, b))
        cute.gemm(tiled_mma, partial, a_k, b_k, partial)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
