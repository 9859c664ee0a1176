"""Block rows that share tiles of 64 rows: products of blocks of 16 and 32 rows on WGMMA's M.

A block of 16 rows uses each byte of the dense matrix 16 times, and L2 cannot bring more of them. Four block
rows together are one of 64 rows, over the union of the columns that any of them keeps: of 25 % random blocks
68 %, so that the tensor cores multiply 2.7 times what is useful, at more than four times the rate.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kernels_dsl.config.bsr import (
    ITEM_K,
    MMA_K,
    ROW,
    SMALL_BLOCK,
    BsrProblem,
    Sm90BsrConfig,
    goes_in_pairs,
    stores_by_tma,
)
from lowering.records import NamedTuple

TOGETHER_COLUMNS = 512
"""Of a tile."""
STAGE_K_TOGETHER = 32
"""Elements of K in a stage of such a tile."""
LEAST_ITEMS = 100
"""Tiles of 64 x 1024, at least: fewer were not tried."""
LEAST_DENSITY = 0.04
"""Kept blocks by all, at least: fewer were not tried."""
MOST_PACKED = 1 << 30
"""Bytes of packed blocks, at most."""
LEAST_GAIN = 1.05
"""By the model of what both ways take, from which on rows go together."""


class Rate(NamedTuple):
    """TFLOPS of a large product, and elements of K that take as long as what a tile takes without any."""

    tflops: float
    item_k: float


ALONE = {16: Rate(155.0, 100.0), 32: Rate(310.0, 190.0)}
"""Rows of a block -> block rows each for itself. All rates were fitted to products of 8192 x 8192 by 8192 and
1024 columns, 5 to 35 % of random blocks kept, on an H200; they are within 10 % there."""
TOGETHER_RATE = Rate(660.0, ITEM_K)
"""Of rows together, columns that not all rows keep included."""
PACK_RATE = 3.7e6
"""Bytes a microsecond, read and written."""
PACK_US = 6.0
"""Of packing and the launch that does nothing, whatever their size."""


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


def choose_together(problem: BsrProblem, ctas: int) -> Sm90BsrConfig | None:
    """The configuration with block rows together, where that is faster than each for itself; else None.

    How many columns rows share only the GPU knows: random ones are assumed. Rows of a pattern that is not
    random share more, as a rule. `ctas`: that run at one time.
    """
    if problem.block_mn not in ALONE or problem.block_k != problem.block_mn or problem.dense_k_major:
        return None
    if -(-problem.other // TOGETHER_COLUMNS) % 2 or _items(problem) < LEAST_ITEMS:
        return None
    if not LEAST_DENSITY <= _density(problem) <= 1.0 or _packed_bytes(problem) > MOST_PACKED:
        return None
    return tiles_together(problem) if gain_together(problem, ctas) >= LEAST_GAIN else None


def gain_together(problem: BsrProblem, ctas: int) -> float:
    """The gain by rows together, where rows keep random blocks: 2 is twice as fast."""
    density, rows = _density(problem), SMALL_BLOCK // problem.block_mn
    union, clusters = union_density(density, rows), max(1, ctas // 2)
    items = _items(problem)
    even = math.ceil(items / clusters) * clusters / items
    per_k = 2.0e-6 * _blocked(problem) * problem.other * problem.l  # operations / 1e6 for an element of K
    alone, together = ALONE[problem.block_mn], TOGETHER_RATE
    alone_us = per_k * (density * problem.k + alone.item_k) / alone.tflops
    together_us = per_k * (union * problem.k + together.item_k) / together.tflops * even
    size = 2 * _blocked(problem) * problem.k * problem.l
    return alone_us / (together_us + (union + density) * size / PACK_RATE + PACK_US)


def tiles_together(problem: BsrProblem) -> Sm90BsrConfig:
    """Tiles of 64 x 512 of block rows together, in pairs that share columns where these can be found."""
    unit_k = max(MMA_K, min(problem.block_k, STAGE_K_TOGETHER))
    return Sm90BsrConfig(
        SMALL_BLOCK, TOGETHER_COLUMNS, True, unit_k, STAGE_K_TOGETHER // unit_k, cluster_x=2,
        epi_tma=stores_by_tma(problem), pairs=goes_in_pairs(problem, _lists(problem)),
        rows_together=SMALL_BLOCK // problem.block_mn,
        deep_boxes=problem.other % ROW == 0 and not problem.dense_k_major,
    )  # fmt: skip


def _blocked(problem: BsrProblem) -> int:
    """Extent of D's blocked mode."""
    return problem.n if problem.dense_left else problem.m


def _lists(problem: BsrProblem) -> int:
    """Lists of joined rows."""
    return -(-_blocked(problem) // SMALL_BLOCK)


def _items(problem: BsrProblem) -> int:
    """Tiles of a list's rows and of two times TOGETHER_COLUMNS, in all batches."""
    return _lists(problem) * -(-problem.other // (2 * TOGETHER_COLUMNS)) * problem.l


def _density(problem: BsrProblem) -> float:
    """Kept blocks by all blocks."""
    return problem.nnz * problem.block_mn * problem.block_k / max(1, _blocked(problem) * problem.k)


def _packed_bytes(problem: BsrProblem) -> int:
    """Memory for the packed blocks, as many as there may be."""
    return problem.nnz * SMALL_BLOCK * problem.block_k * 2 * problem.l
