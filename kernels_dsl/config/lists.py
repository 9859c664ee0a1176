"""Options of the kernels that make lists of key blocks."""

from __future__ import annotations

from lowering.records import frozen

WARPS = 4
"""Warps of a CTA where each has a list of its own."""
MAX_PER_LANE = 32
MAX_ROW_WARPS = 32


@frozen
class WindowSpec:
    """Block (queries, keys) of a window's lists, and which edges it has."""

    block: tuple[int, int]
    left: bool
    right: bool


@frozen
class DocumentSpec:
    """Block (queries, keys) of documents' lists; `causal`: none behind the last query."""

    block: tuple[int, int]
    causal: bool


@frozen
class TopkSpec:
    """A row of scores lies in the registers of `row_warps` warps, `per_lane` scores in each thread.

    `causal`: only blocks that begin at or before a query block's last diagonal are taken; it needs `block`.
    """

    per_lane: int
    row_warps: int
    causal: bool
    block: tuple[int, int]


def topk_spec(columns: int, causal: bool, block: tuple[int, int]) -> TopkSpec | None:
    """The division of rows of `columns` scores among threads; None where they do not fit in registers."""
    per_lane = 1
    while per_lane < MAX_PER_LANE and 32 * per_lane < columns:
        per_lane *= 2
    row_warps = 1
    while 32 * per_lane * row_warps < columns:
        row_warps *= 2
    if row_warps > MAX_ROW_WARPS:
        return None
    return TopkSpec(per_lane, row_warps, causal, block if causal else (1, 1))
