"""Probabilities of a backward pass: scores that were computed again, less their row's log-sum-exp.

Scores lie transposed in the accumulators of WGMMA or mma.sync: rows are keys, columns are queries.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import (
    KEY_ROWS,
    ScoreOperands,
    ScoreOrigin,
    change_scores,
    column_offset,
    mask_elements,
    mask_range,
    row_offset,
    score_unit,
)
from kernels_dsl.blocks.attention.score_tile import to_operand
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.hw.dsl import choose
from kernels_dsl.blocks.hw.swizzled_rows import opaque
from kernels_dsl.config.attention import AttentionVariant

ELEMENTS = 8
"""Consecutive accumulators of a thread that are its part of 16 keys x 16 queries."""


RowValues = Callable[[int, int], cute.Tensor]
"""(number of a thread's query, count) -> float32 of as many of its queries, in registers."""


class ScoreStep(NamedTuple):
    """A thread's scores of one step: the first of them, and what masks and changes them."""

    origin: ScoreOrigin
    seq: SeqInfo
    window: Window
    operands: ScoreOperands
    masked: Boolean
    """Says whether the step needs a mask."""


def weigh(
    variant: AttentionVariant,
    scores: cute.Tensor,
    lse: RowValues,
    at: ScoreStep,
    probs: cute.Tensor,
) -> None:
    """Turns accumulators, products of keys and queries, into probabilities. `lse`: base 2, of each query.

    Where the variant bends scores, `probs` receives them as operand A of a product over the queries, and the
    float32 ones are multiplied by the derivatives of the scores by the scaled products.
    """
    if variant.by_elements:
        weigh_elements(variant, scores, lse, at, probs)
    else:
        view = softmax.rows_and_columns(scores)
        mask_where(variant, by_queries(view), at)
        columns = lse(0, cute.size(view, mode=[1]))
        exponentials(view, columns, at.operands.scale * softmax.LOG2_E)


def by_queries(view: cute.Tensor) -> cute.Tensor:
    """View (rows, columns) of keys and queries as (queries, keys)."""
    return cute.make_tensor(view.iterator, cute.select(view.layout, mode=[1, 0]))


@cute.jit
def mask_where(variant: cutlass.Constexpr[AttentionVariant], view: cute.Tensor, at: ScoreStep):
    """Every mask of the variant, on a step that needs one; else the end of the keys in a listed block."""
    if cutlass.const_expr(variant.lists is not None):
        last = at.origin.column + row_offset(cute.size(view, mode=[1]) - 1)
        if at.masked:
            mask(variant, view, at)
        elif last >= at.seq.k_len:
            mask_range(AttentionVariant(), view, at.origin, at.seq, at.seq.k_len, at.window, places=KEY_ROWS)
    elif cutlass.const_expr(variant.masks_everywhere):
        mask(variant, view, at)
    elif at.masked:
        mask(variant, view, at)


def mask(variant: AttentionVariant, view: cute.Tensor, at: ScoreStep) -> None:
    """Every mask of the variant."""
    if variant.mask == "boolean" or variant.mask_mod is not None:
        mask_elements(variant, view, at.origin, at.seq, at.operands, KEY_ROWS)
    mask_range(variant, view, at.origin, at.seq, at.seq.k_len, at.window, places=KEY_ROWS)


def exponentials(view: cute.Tensor, lse: cute.Tensor, scale_log2: Float32) -> None:
    """view (keys, queries) = exp2(view * scale_log2 - lse)."""
    for c in range(cute.size(view, mode=[1])):
        for r in range(cute.size(view, mode=[0])):
            view[r, c] = cute.math.exp2(view[r, c] * scale_log2 - lse[c], fastmath=True)


def weigh_elements(
    variant: AttentionVariant, scores: cute.Tensor, lse: RowValues, at: ScoreStep, probs: cute.Tensor
) -> None:
    """`weigh` by 16 keys x 16 queries at a time, so that few numbers between are kept in registers.

    Each finds its places anew: else the compiler would keep the addresses of all of them.
    """
    factor = score_unit(variant, at.operands, variant.bends_scores) * softmax.LOG2_E
    for n in range(cute.size(scores) // ELEMENTS):
        part, origin, first_query = part_of(scores, at.origin, n)
        here, queries = at._replace(origin=origin), by_queries(part)
        slopes = None
        if variant.bends_scores:
            slopes = cute.make_rmem_tensor(queries.layout, Float32)
        if variant.changes_scores:
            change_scores(variant, queries, origin, at.seq, at.operands, KEY_ROWS, slopes)
        mask_where(variant, queries, here)
        exponentials(part, lse(first_query, 4), factor)
        if slopes is not None:
            flat = cute.make_layout(ELEMENTS)
            operand = cute.make_tensor(probs.iterator + ELEMENTS * n, flat)
            to_operand(cute.make_tensor(part.iterator, flat), operand)
            bend(part, slopes)


class Part(NamedTuple):
    """A thread's part of 16 keys x 16 queries."""

    values: cute.Tensor
    """(keys, queries)"""
    origin: ScoreOrigin
    first_query: int
    """Number of its first query among those of the thread."""


def part_of(scores: cute.Tensor, first: ScoreOrigin, n: int) -> Part:
    """Part `n` of accumulators, or of an operand A in their order, which begin at `first`."""
    groups = cute.size(softmax.rows_and_columns(scores), mode=[1]) // 4  # side by side
    below, beside = n // groups, n % groups
    layout = cute.make_layout((2, (2, 2)), stride=(2, (1, 4)))
    values = cute.make_tensor(scores.iterator + ELEMENTS * n, layout)
    origin = first._replace(
        row=opaque(first.row) + column_offset(4 * beside),
        column=opaque(first.column) + row_offset(2 * below),
    )
    return Part(values, origin, 4 * beside)


def bend(probs: cute.Tensor, slopes: cute.Tensor) -> None:
    """probs (keys, queries) *= slopes (queries, keys), of which those of hidden keys do not count."""
    for c in range(cute.size(probs, mode=[1])):
        for r in range(cute.size(probs, mode=[0])):
            none = Float32(0.0)
            probs[r, c] = choose(probs[r, c] == none, none, probs[r, c] * slopes[c, r])
