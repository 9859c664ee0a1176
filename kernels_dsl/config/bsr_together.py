"""Block rows that share tiles of 64 rows: products of blocks of 16 and 32 rows on WGMMA's M.

A block of 16 rows uses each byte of the dense matrix 16 times, and L2 cannot bring more of them. Four block
rows together are one of 64 rows, over the union of the columns that any of them keeps: of 25 % random blocks
68 %, so that the tensor cores multiply 2.7 times what is useful, at more than four times the rate.
"""

from __future__ import annotations

from dataclasses import replace

from kernels_dsl.config.bsr import (
    MMA_K,
    SMALL_BLOCK,
    WIDE_ITEMS,
    BsrProblem,
    Sm90BsrConfig,
    stores_by_tma,
)

TOGETHER_COLUMNS = 512
"""Of a tile."""
STAGE_K_TOGETHER = 32
"""Elements of K in a stage of such a tile."""
LEAST_GAIN = {16: 1.15, 32: 1.15}
"""Rows of a block -> the estimated gain from which on rows go together: packing costs, too."""
RATE = {16: 140, 32: 280}
"""Rows of a block -> useful TFLOPS of block rows each for itself, 25 % kept at 8192 x 8192 x 8192 (H200)."""
RATE_TOGETHER = 500
"""TFLOPS of blocks of 64 rows in tiles of 64 x 512, what is kept by none of their rows left out."""
MOST_PACKED = 1 << 30
"""Bytes of packed blocks, at most."""


def union_density(density: float, rows: int) -> float:
    """Columns that any of `rows` block rows keeps, by all columns, where each keeps `density` at random."""
    return 1.0 - (1.0 - density) ** rows


def problem_together(problem: BsrProblem, rows: int) -> BsrProblem:
    """The product of `rows` block rows together, of as many blocks as there may be."""
    return problem if rows == 1 else replace(problem, block_mn=rows * problem.block_mn)


def why_not_together(config: Sm90BsrConfig, problem: BsrProblem) -> str | None:
    """Says why block rows cannot go together as `config` wants; None if they can."""
    rows = config.rows_together
    if rows == 1:
        return None
    found = f"rows_together is {rows}, must be"
    if rows < 1 or rows * problem.block_mn != SMALL_BLOCK:
        return f"{found} 1, or {SMALL_BLOCK} by the block's rows, {problem.block_mn}"
    if problem.dtype == "fp8":
        return f"{found} 1 for fp8 blocks, which have scales"
    if config.split or problem.nnz == 0 or not config.sparse_on_m:
        return f"{found} 1 for lists in pieces, without kept blocks, and without sparse_on_m"
    return None


def choose_together(problem: BsrProblem) -> Sm90BsrConfig | None:
    """The configuration with block rows together, where that is faster than each for itself; else None.

    How many columns rows share only the GPU knows: random ones are assumed, and rows share more in patterns
    that are not random, as a rule.
    """
    rows = SMALL_BLOCK // problem.block_mn
    if problem.block_mn not in RATE or problem.block_k != problem.block_mn or problem.dense_k_major:
        return None
    blocked = problem.n if problem.dense_left else problem.m
    panels, lists = -(-problem.other // (2 * TOGETHER_COLUMNS)), -(-blocked // SMALL_BLOCK)
    density = problem.nnz * problem.block_mn * problem.block_k / max(1, blocked * problem.k)
    if not 0.0 < density < 1.0 or lists * panels * problem.l < WIDE_ITEMS:
        return None
    gain = density / union_density(density, rows) * RATE_TOGETHER / RATE[problem.block_mn]
    packed = problem.nnz * SMALL_BLOCK * problem.block_k * 2 * problem.l
    if gain < LEAST_GAIN[problem.block_mn] or packed > MOST_PACKED:
        return None
    config = tiles_together(problem)
    return None if why_not_together(config, problem) else config


def tiles_together(problem: BsrProblem, pairs: bool = False) -> Sm90BsrConfig:
    """Tiles of 64 x 512 of block rows together."""
    unit_k = max(MMA_K, min(problem.block_k, STAGE_K_TOGETHER))
    return Sm90BsrConfig(
        SMALL_BLOCK, TOGETHER_COLUMNS, True, unit_k, STAGE_K_TOGETHER // unit_k, cluster_x=2,
        epi_tma=stores_by_tma(problem), pairs=pairs, rows_together=SMALL_BLOCK // problem.block_mn,
    )  # fmt: skip
