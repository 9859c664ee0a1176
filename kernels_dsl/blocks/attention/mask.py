"""Masks and score functions on a thread's part of a score tile.

Scores are seen as (queries, keys). Of the rows of accumulators a thread has every eighth, of their columns
0, 1, 8, 9, 16, 17, … from its first; rows are queries in a forward pass and keys in a backward pass
(`Places`). So a mask that is a range of keys a query is one compare a score, against a number that is known
at trace time.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.kv_blocks import Window, diagonal_shift
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.hw.dsl import choose
from kernels_dsl.blocks.hw.user_functions import call_of_score
from kernels_dsl.config.attention import AttentionVariant

HIDDEN = -math.inf
"""The score of a key that a query does not attend to."""


class ScoreOrigin(NamedTuple):
    """The first of a thread's scores: its query row and key in their sequences, and their head and batch."""

    row: Int32
    column: Int32
    head: Int32
    batch: Int32


class ScoreOperands(NamedTuple):
    """Operands of the scale, the softcap, masks and score functions."""

    scale: Float32
    softcap: Float32
    mask: cute.Tensor | None
    """(B, H, Sq, Sk): numbers to add, or bytes that are not 0 where a query may attend."""
    aux: tuple[cute.Tensor, ...] | None
    """Extra arguments of user functions."""


def row_offset(r: int) -> int:
    """Rows from a thread's first to its row `r`: a warp's rows are consecutive, 16 for each step of M."""
    return 8 * r


def column_offset(c: int) -> int:
    """Columns from a thread's first to its column `c`."""
    return 8 * (c // 2) + c % 2


class Places(NamedTuple):
    """Steps from a thread's first query and key to its others, by their numbers in a view of its scores."""

    query: Callable[[int], int]
    key: Callable[[int], int]


QUERY_ROWS = Places(row_offset, column_offset)
"""Rows of the accumulators are queries."""
KEY_ROWS = Places(column_offset, row_offset)
"""Rows of the accumulators are keys: scores are computed transposed."""


def query_of(row: Int32, pack: int) -> Int32:
    """The query of a row, where the rows of `pack` heads alternate."""
    return row if pack == 1 else row // pack


def mask_range(
    variant: AttentionVariant,
    scores: cute.Tensor,
    origin: ScoreOrigin,
    seq: SeqInfo,
    k_len: Int32,
    window: Window,
    pack: int = 1,
    places: Places = QUERY_ROWS,
) -> None:
    """Sets scores outside of the window or of the first `k_len` keys to -inf. `pack` rows are one query."""
    shift = diagonal_shift(variant, seq)
    for r in range(cute.size(scores, mode=[0])):
        diagonal = query_of(origin.row + places.query(r), pack) + shift - origin.column
        last = k_len - 1 - origin.column
        if variant.right:
            last = cutlass.min(last, diagonal + window.right)
        for c in range(cute.size(scores, mode=[1])):
            keep = last >= places.key(c)
            if variant.left:
                keep = keep & (diagonal - window.left <= places.key(c))
            scores[r, c] = choose(keep, scores[r, c], HIDDEN)


def score_unit(variant: AttentionVariant, operands: ScoreOperands, slopes: bool = False) -> Float32:
    """Factor from products, or from scores as `change_scores` leaves them, with `slopes` or without, to what
    the softmax takes."""
    if variant.caps_last and not slopes:
        return operands.softcap
    return Float32(1.0) if variant.changes_scores else operands.scale


def change_scores(
    variant: AttentionVariant,
    scores: cute.Tensor,
    origin: ScoreOrigin,
    seq: SeqInfo,
    operands: ScoreOperands,
    places: Places = QUERY_ROWS,
    slopes: cute.Tensor | None = None,
) -> None:
    """scores = score_mod(softcap(scale * scores)) + mask, where `variant` has those, in `score_unit` units.

    `slopes`, like `scores`: receives the derivatives of the results by scale * scores.
    """
    scaled, in_caps = operands.scale, variant.caps_last and slopes is None
    if variant.caps_last:  # a division of each score is a subroutine, which takes no register for a factor
        inverse = cute.arch.rcp_approx(operands.softcap)
        scaled = scaled * inverse if in_caps else scaled
    for r in range(cute.size(scores, mode=[0])):
        for c in range(cute.size(scores, mode=[1])):
            score, slope = scores[r, c] * scaled, Float32(1.0)
            if variant.softcap:
                if not variant.caps_last:
                    score = score / operands.softcap
                elif not in_caps:
                    score = score * inverse
                bent = cute.math.tanh(score, fastmath=True)
                slope = 1.0 - bent * bent
                score = bent if in_caps else operands.softcap * bent
            i, j = origin.row + places.query(r), origin.column + places.key(c)
            if variant.score_mod is not None:
                indices = (origin.batch, origin.head, *_inside(i, j, seq))
                values = (score, *indices, *(operands.aux or ()))
                if slopes is not None:
                    assert variant.score_mod_bwd is not None
                    of_one = call_of_score("score_mod_bwd", variant.score_mod_bwd, (Float32(1.0), *values))
                    slope = slope * Float32(of_one)
                score = Float32(call_of_score("score_mod", variant.score_mod, values))
            if variant.mask == "additive":
                score = score + _read(operands.mask, origin, i, j)
            scores[r, c] = score
            if slopes is not None:
                slopes[r, c] = slope


def mask_elements(
    variant: AttentionVariant,
    scores: cute.Tensor,
    origin: ScoreOrigin,
    seq: SeqInfo,
    operands: ScoreOperands,
    places: Places = QUERY_ROWS,
) -> None:
    """Sets scores to -inf where the boolean mask or `mask_mod` hides them."""
    for r in range(cute.size(scores, mode=[0])):
        for c in range(cute.size(scores, mode=[1])):
            i, j = origin.row + places.query(r), origin.column + places.key(c)
            score = scores[r, c]
            if variant.mask == "boolean":
                seen = _read(operands.mask, origin, i, j) != Float32(0.0)
                score = choose(seen, score, HIDDEN)
            if variant.mask_mod is not None:
                indices = (origin.batch, origin.head, *_inside(i, j, seq))
                seen = call_of_score("mask_mod", variant.mask_mod, (*indices, *(operands.aux or ())))
                score = choose(cutlass.Boolean(seen), score, HIDDEN)
            scores[r, c] = score


def _inside(i: Int32, j: Int32, seq: SeqInfo) -> tuple[Int32, Int32]:
    """Query and key as user functions may index tensors with them: tiles reach past the ends of sequences.
    The key of a sequence without keys is 0."""
    return cutlass.min(i, seq.q_len - 1), cutlass.min(j, cutlass.max(seq.k_len - 1, 0))


@cute.jit
def _read(mask: cute.Tensor, origin: ScoreOrigin, i: Int32, j: Int32) -> Float32:
    """mask[batch, head, i, j] as float32; 0 outside of it."""
    value = Float32(0.0)
    if i < mask.shape[2] and j < mask.shape[3]:
        value = Float32(mask[origin.batch, origin.head, i, j])
    return value
