"""A block of scores in the accumulators of a matrix instruction: score functions, masks, and its conversion
to an operand of the next product.

The block lies in the accumulators of WGMMA or mma.sync, seen as (rows, columns), see `softmax`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.kv_blocks import Visit
from kernels_dsl.blocks.attention.mask import (
    HIDDEN,
    ScoreOrigin,
    change_scores,
    column_offset,
    mask_elements,
    mask_range,
    score_unit,
)
from kernels_dsl.blocks.attention.query_tiles import QueryTile
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.attention.work import AttentionSpec, Work
from kernels_dsl.blocks.hw.dsl import choose


class Tile(NamedTuple):
    """A work tile, and the first row and column of this thread in it."""

    at: QueryTile
    seq: SeqInfo
    visit: Visit
    row: Int32
    column: Int32


class ScoreBlock(NamedTuple):
    """A block of scores: those of a work tile's queries and the keys of one step."""

    tile: Tile
    work: Work
    blocks: tuple[Int32, ...]
    """Number of the block of keys, or numbers of those that lie side by side."""


def scale_of_scores(spec: AttentionSpec, work: Work, slopes: bool = False) -> Float32:
    """Factor of scores inside of exp2. `slopes`: derivatives come with them."""
    return score_unit(spec.variant, work.scores, slopes) * softmax.LOG2_E


def change_and_mask(
    spec: AttentionSpec,
    scores: cute.Tensor,
    scored: ScoreBlock,
    masked: bool | Boolean,
    slopes: cute.Tensor | None = None,
) -> None:
    """Applies scale and softcap, score functions and masks, where the variant has them.

    `masked` is known at trace time, or decides by a branch. `slopes`: accumulators too, see `change_scores`.
    """
    tile, variant = scored.tile, spec.variant
    parts = len(scored.blocks)
    for part, block in enumerate(scored.blocks):
        view = softmax.columns_of_part(softmax.rows_and_columns(scores), part, parts)
        start = block * (spec.tile_n // parts)
        origin = ScoreOrigin(tile.row, start + tile.column, tile.at.head, tile.at.batch)
        if variant.changes_scores:
            bends = None
            if slopes is not None:
                bends = softmax.columns_of_part(softmax.rows_and_columns(slopes), part, parts)
            change_scores(variant, view, origin, tile.seq, scored.work.scores, slopes=bends)
        if masked is True:
            mask_block(spec, view, origin, scored)
        elif masked is not False:
            mask_where(spec, view, origin, scored, start, masked)
        elif variant.lists is not None:
            mask_tail(view, origin, start, tile.visit.k_len)


def may_hide(spec: AttentionSpec, masked: bool | Boolean) -> bool:
    """True where all scores of a row may be -inf.

    A listed whole block of a packed sequence may lie after all of its keys.
    """
    variant = spec.variant
    return masked is not False or variant.hides_anywhere or (spec.varlen and variant.lists is not None)


def mask_block(spec: AttentionSpec, view: cute.Tensor, origin: ScoreOrigin, scored: ScoreBlock) -> None:
    """Applies every mask that the variant has, to a block that needs it."""
    variant, tile, work = spec.variant, scored.tile, scored.work
    if variant.mask == "boolean" or variant.mask_mod is not None:
        mask_elements(variant, view, origin, tile.seq, work.scores)
    mask_range(variant, view, origin, tile.seq, tile.visit.k_len, work.window, spec.pack)


@cute.jit
def mask_where(
    spec: cutlass.Constexpr[AttentionSpec],
    view: cute.Tensor,
    origin: ScoreOrigin,
    scored: ScoreBlock,
    start: Int32,
    masked: Boolean,
):
    """`mask_block` where `masked`, or else `mask_tail` where blocks are listed."""
    if masked:
        mask_block(spec, view, origin, scored)
    elif cutlass.const_expr(spec.variant.lists is not None):
        mask_tail(view, origin, start, scored.tile.visit.k_len)


@cute.jit
def mask_tail(view: cute.Tensor, origin: ScoreOrigin, start: Int32, k_len: Int32):
    """Masks the end of the keys in a whole block, whose first key is `start`: the last block of a list may
    reach past it."""
    keys = cutlass.const_expr(softmax.LANES_OF_A_ROW * cute.size(view, mode=[1]))
    if start + keys > k_len:
        for r in cutlass.range_constexpr(cute.size(view, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
                keep = origin.column + column_offset(c) < k_len
                view[r, c] = choose(keep, view[r, c], HIDDEN)


def to_operand(scores: cute.Tensor, operand: cute.Tensor) -> None:
    """Converts a block, such as probabilities, to operand A of the next product.

    An accumulator of 16 rows x 16 keys has the same elements in the same order as a 16-bit operand. An 8-bit
    one has four neighbouring keys of a row where the accumulator has two of each row: what the operand takes
    for keys 4c … 4c + 3 of sixteen are then keys 2c, 2c + 1, 2c + 8, 2c + 9, and V's keys are in that order.

    Converted 16 keys at a time: for vectors whose length is no power of two the compiler packs pairs
    by byte permutations, and puts them between the products.
    """
    dtype = operand.element_type
    for k in range(cute.size(scores) // 8):
        pairs = cute.make_layout((2, 2, 2), stride=(1, 4, 2)) if dtype.width == 8 else cute.make_layout(8)
        source = cute.make_tensor(scores.iterator + 8 * k, pairs)
        target = cute.make_tensor(operand.iterator + 8 * k, cute.make_layout(pairs.shape))
        target.store(source.load().to(dtype))
