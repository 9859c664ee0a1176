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
    goes_in_pairs,
    stores_by_tma,
)

TOGETHER_COLUMNS = 512
"""Of a tile."""
STAGE_K_TOGETHER = 32
"""Elements of K in a stage of such a tile."""
ROW = 64
"""Elements of 16 bits in a row of a box of TMA that goes to shared memory with a swizzle."""
LEAST_GAIN = 1.15
"""From which on rows go together: packing costs, too."""
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

    How many columns rows share only the GPU knows: random ones are assumed. Rows of a pattern that is not
    random share more, as a rule.
    """
    if problem.block_mn not in RATE or problem.block_k != problem.block_mn or problem.dense_k_major:
        return None
    panels, lists = -(-problem.other // TOGETHER_COLUMNS), _lists(problem)
    if panels % 2 or lists * (panels // 2) * problem.l < WIDE_ITEMS or not 0.0 < _density(problem) < 1.0:
        return None
    packed = problem.nnz * SMALL_BLOCK * problem.block_k * 2 * problem.l
    if gain_together(problem) < LEAST_GAIN or packed > MOST_PACKED:
        return None
    config = tiles_together(problem)
    return None if why_not_together(config, problem) else config


def gain_together(problem: BsrProblem) -> float:
    """The gain of a large product by rows together, where rows keep random blocks: 2 is twice as fast."""
    density, rows = _density(problem), SMALL_BLOCK // problem.block_mn
    return density / union_density(density, rows) * RATE_TOGETHER / RATE[problem.block_mn]


def tiles_together(problem: BsrProblem) -> Sm90BsrConfig:
    """Tiles of 64 x 512 of block rows together, in pairs that share columns where these can be found."""
    unit_k = max(MMA_K, min(problem.block_k, STAGE_K_TOGETHER))
    return Sm90BsrConfig(
        SMALL_BLOCK, TOGETHER_COLUMNS, True, unit_k, STAGE_K_TOGETHER // unit_k, cluster_x=2,
        epi_tma=stores_by_tma(problem), pairs=goes_in_pairs(problem, _lists(problem)),
        rows_together=SMALL_BLOCK // problem.block_mn,
        deep_boxes=problem.other % ROW == 0 and not problem.dense_k_major,
    )  # fmt: skip


def _lists(problem: BsrProblem) -> int:
    """Lists of joined rows."""
    return -(-(problem.n if problem.dense_left else problem.m) // SMALL_BLOCK)


def _density(problem: BsrProblem) -> float:
    """Kept blocks by all blocks."""
    cells = (problem.n if problem.dense_left else problem.m) * problem.k
    return problem.nnz * problem.block_mn * problem.block_k / max(1, cells)
