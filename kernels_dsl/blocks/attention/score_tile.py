"""From a tile of scores to probabilities and on to the rows' results: what all attention kernels do between
and after their two products.

The tile lies in the accumulators of WGMMA or mma.sync (see `softmax`). `spec` is a kernel's own
description: read are `variant`, `tile_n`, `dtype`, `varlen`, `lazy_rescale` and `watch_sums`. `rows` is a
thread's state of its rows: `row_max`, `row_sum` and `correction`, float32 (rows,).
"""

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention import softmax_no_max as watched_softmax
from kernels_dsl.blocks.attention.kv_blocks import Visit, block_at
from kernels_dsl.blocks.attention.mask import (
    HIDDEN,
    Place,
    change_scores,
    column_offset,
    mask_elements,
    mask_range,
    query_of,
    row_offset,
)
from kernels_dsl.blocks.attention.query_tiles import QueryTile
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.attention.work import Work, kv_head
from kernels_dsl.config.attention import DESCALE_KEYS


class Rows(Protocol):
    """A thread's rows: running maxima and sums, and what older outputs must be multiplied by.

    `scales`, where fp8 operands have factors a block of keys: those of K and V of the last block and of the
    next one (4,).
    """

    @property
    def row_max(self) -> cute.Tensor: ...
    @property
    def row_sum(self) -> cute.Tensor: ...
    @property
    def correction(self) -> cute.Tensor: ...
    @property
    def scales(self) -> cute.Tensor | None: ...


class Tile(NamedTuple):
    """The work tile at hand, and the first row and column of this thread in it."""

    at: QueryTile
    seq: SeqInfo
    visit: Visit
    row: Int32
    column: Int32


FP8_OFFSET = 8.0
"""Probabilities as fp8 are 2^8 times as large: up to 256 of e4m3's 448, so that fewer are subnormal."""


def probability_offset(spec) -> float:
    """The exponent of the factor of probabilities."""
    if spec.watch_sums:
        return watched_softmax.SUM_LOG2
    return FP8_OFFSET if spec.dtype.width == 8 else 0.0


def scale_of_scores(spec, work: Work) -> Float32:
    """What scores are multiplied by inside of exp2."""
    if spec.variant.changes_scores:
        return Float32(softmax.LOG2_E)
    return work.scores.scale * softmax.LOG2_E


def descaled(work: Work, at: QueryTile) -> Work:
    """`work` with the scale of a tile's scores, where Q and K are fp8."""
    if work.descales is None:
        return work
    q_scale, k_scale, _ = work.descales
    scale = work.scores.scale
    if q_scale is not None:
        scale = scale * q_scale[at.batch, at.head]
    if k_scale is not None and cute.rank(k_scale) == 2:
        scale = scale * k_scale[at.batch, kv_head(at.head, work.heads_per_kv)]
    return work._replace(scores=work.scores._replace(scale=scale))


def fetch_descales(spec, rows: Rows, tile: Tile, work: Work, position: Int32) -> None:
    """Loads the factors of K and V for the key block at `position` of a visit into rows.scales[2:]; 1 where
    there is none a block. A step early: in its own step the products would wait for the load."""
    position = cutlass.min(position, tile.visit.count - 1)
    block = block_at(spec.variant, tile.visit, tile.at, work.lists, position)
    for i, scale in enumerate(work.descales[1:]):
        if scale is None or cute.rank(scale) == 2:
            rows.scales[2 + i] = Float32(1.0)
        else:
            head = kv_head(tile.at.head, work.heads_per_kv)
            rows.scales[2 + i] = scale[tile.at.batch, head, block * spec.tile_n // DESCALE_KEYS]


def start_descales(spec, rows: Rows, tile: Tile, work: Work) -> Work:
    """`of_block` for the first block; factors of the second are under way."""
    fetch_descales(spec, rows, tile, work, Int32(0))
    rows.scales[0], rows.scales[1] = rows.scales[2], rows.scales[3]
    fetch_descales(spec, rows, tile, work, Int32(1))
    return of_block(work, rows)


def of_block(work: Work, rows: Rows) -> Work:
    """`work` with the scale of the scores of the block that `rows.scales` are of."""
    return work._replace(scores=work.scores._replace(scale=work.scores.scale * rows.scales[0]))


def enter_block(spec, rows: Rows, work: Work) -> Work:
    """`of_block` for the next block; maxima so far are taken into its units."""
    if not spec.variant.changes_scores:
        ratio = rows.scales[0] * cute.arch.rcp_approx(rows.scales[2])
        for r in range(cute.size(rows.row_max)):
            rows.row_max[r] = rows.row_max[r] * ratio
    rows.scales[0] = rows.scales[2]
    return of_block(work, rows)


def take_values(rows: Rows) -> None:
    """Outputs change to units of V's next block with the next correction."""
    ratio = rows.scales[1] * cute.arch.rcp_approx(rows.scales[3])
    for r in range(cute.size(rows.correction)):
        rows.correction[r] = rows.correction[r] * ratio
    rows.scales[1] = rows.scales[3]


def start_rows(spec, rows: Rows, tile: Tile, work: Work) -> None:
    """No key so far; an attention sink counts as a key with a value of 0, which one lane of a quad adds."""
    if not spec.variant.sinks:
        return
    logit = Float32(work.sinks[tile.at.head]) * softmax.LOG2_E / scale_of_scores(spec, work)
    once = softmax.choose(tile.column == 0, Float32(2.0 ** probability_offset(spec)), Float32(0.0))
    for r in range(cute.size(rows.row_max)):
        rows.row_max[r], rows.row_sum[r] = logit, once


def soften(
    spec, scores: cute.Tensor, rows: Rows, place: tuple, masked: bool | cutlass.Boolean, first: bool
) -> None:
    """Masks the scores of one block and takes them into the running softmax; they become probabilities.

    `place`: (tile, work, key block). `masked` is known at trace time, or decides by a branch. `first`: there
    is no maximum yet, `row_max` and `row_sum` may hold anything.
    """
    change_and_mask(spec, scores, place, masked)
    exponentiate(spec, scores, rows, place[1], masked, first)


def soften_lazily(spec, scores: cute.Tensor, rows: Rows, place: tuple, masked: bool) -> cutlass.Boolean:
    """`soften` for blocks after the first, with a maximum that may fall behind. Returns whether a row of this
    warp has a new one: older outputs must be multiplied by `correction` then, and only then.
    """
    change_and_mask(spec, scores, place, masked)
    view, work = softmax.rows_and_columns(scores), place[1]
    return softmax.lazy_step(
        view, rows.row_max, rows.row_sum, rows.correction, scale_of_scores(spec, work), may_hide(spec, masked)
    )


def soften_watched(
    spec, scores: cute.Tensor, operand: cute.Tensor, rows: Rows, place: tuple, masked: bool
) -> cutlass.Boolean:
    """`soften` and `to_operand` for blocks after the first, with `watched_softmax`; as `soften_lazily`."""
    change_and_mask(spec, scores, place, masked)

    def pack(i: int, values: cute.Tensor) -> None:
        ordered = cute.make_rmem_tensor(cute.make_layout((2, (2, 2)), stride=(4, (1, 2))), Float32)
        for r in range(2):
            for c in range(4):
                ordered[r, c] = values[r, c]
        for r in range(2):  # four keys of a row are a register of the operand
            source = cute.make_tensor(ordered.iterator + 4 * r, cute.make_layout(4))
            target = cute.make_tensor(operand.iterator + 8 * i + 4 * r, cute.make_layout(4))
            target.store(source.load().to(spec.dtype))

    view, scale = softmax.rows_and_columns(scores), scale_of_scores(spec, place[1])
    exact = masked or place[1].lse is not None  # which shows the sums
    linear = 0 if exact else spec.linear_exps
    state = rows.row_max, rows.row_sum, rows.correction
    return watched_softmax.step(view, *state, scale, pack, linear, masked)


def change_and_mask(spec, scores: cute.Tensor, place: tuple, masked: bool | cutlass.Boolean) -> None:
    """The first half of `soften`: what becomes of the scores."""
    tile, work, block = place
    variant = spec.variant
    view = softmax.rows_and_columns(scores)
    start = block * spec.tile_n
    at = Place(tile.row, start + tile.column, tile.at.head, tile.at.batch)
    if variant.changes_scores:
        change_scores(variant, view, at, tile.seq, work.scores)
    if masked is True:
        mask_block(spec, view, at, tile, work)
    elif masked is not False:
        mask_where(spec, view, (at, tile, work, start), masked)
    elif variant.lists is not None:
        mask_tail(spec, view, at, tile, start)


def exponentiate(
    spec, scores: cute.Tensor, rows: Rows, work: Work, masked: bool | cutlass.Boolean, first: bool
) -> None:
    """The second half of `soften`: scores become probabilities."""
    if spec.watch_sums:
        view, scale = softmax.rows_and_columns(scores), scale_of_scores(spec, work)
        empty = may_hide(spec, masked)
        watched_softmax.first_step(view, rows.row_max, rows.row_sum, scale, empty, masked)
        return
    softmax.online_step(
        softmax.rows_and_columns(scores),
        rows.row_max,
        rows.row_sum,
        None if first and not spec.variant.sinks else rows.correction,
        scale_of_scores(spec, work),
        may_hide(spec, masked),
        spec.lazy_rescale,
        offset=probability_offset(spec),
    )


def may_hide(spec, masked: bool | cutlass.Boolean) -> bool:
    """Whether all scores of a row may be -inf.

    Of a packed sequence a listed whole block may lie behind all keys.
    """
    variant = spec.variant
    return masked is not False or variant.hides_anywhere or (spec.varlen and variant.lists is not None)


def mask_block(spec, view: cute.Tensor, at: Place, tile: Tile, work: Work) -> None:
    """Every mask that the variant has, on a block that needs it."""
    variant = spec.variant
    if variant.mask == "boolean" or variant.mask_mod is not None:
        mask_elements(variant, view, at, tile.seq, work.scores)
    mask_range(variant, view, at, tile.seq, tile.visit.k_len, work.window, spec.pack)


@cute.jit
def mask_where(spec: cutlass.Constexpr, view: cute.Tensor, place: tuple, masked: cutlass.Boolean):
    """`mask_block` where `masked`, or else the end of the keys where blocks are listed."""
    at, tile, work, start = place
    if masked:
        mask_block(spec, view, at, tile, work)
    elif cutlass.const_expr(spec.variant.lists is not None):
        mask_tail(spec, view, at, tile, start)


@cute.jit
def mask_tail(spec: cutlass.Constexpr, view: cute.Tensor, at: Place, tile: Tile, start: Int32):
    """A listed whole block may be the last one, and reach past the end of the keys."""
    if start + spec.tile_n > tile.visit.k_len:
        for r in cutlass.range_constexpr(cute.size(view, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
                keep = at.column + column_offset(c) < tile.visit.k_len
                view[r, c] = softmax.choose(keep, view[r, c], HIDDEN)


def to_operand(spec, scores: cute.Tensor, operand: cute.Tensor) -> None:
    """Probabilities as operand A of the second product.

    An accumulator of 16 rows x 16 keys has the same elements in the same order as a 16-bit operand. An 8-bit
    one has four neighbouring keys of a row where the accumulator has two of each row: what the operand takes
    for keys 4c … 4c + 3 of sixteen are then keys 2c, 2c + 1, 2c + 8, 2c + 9, and V's keys are in that order.

    Converted 16 keys at a time: for vectors whose length is no power of two the compiler packs pairs
    by byte permutations, and puts them between the products.
    """
    for k in range(cute.size(scores) // 8):
        pairs = (
            cute.make_layout((2, 2, 2), stride=(1, 4, 2)) if spec.dtype.width == 8 else cute.make_layout(8)
        )
        source = cute.make_tensor(scores.iterator + 8 * k, pairs)
        target = cute.make_tensor(operand.iterator + 8 * k, cute.make_layout(pairs.shape))
        target.store(source.load().to(spec.dtype))


@cute.jit
def finish_rows(spec: cutlass.Constexpr, output: cute.Tensor, rows: Rows, tile: Tile, work: Work):
    """Divides the output (accumulators) by the row sums and stores the log-sum-exp."""
    view = softmax.rows_and_columns(output)
    factor = None
    if cutlass.const_expr(work.descales is not None and work.descales[2] is not None):
        if cutlass.const_expr(cute.rank(work.descales[2]) == 3):
            factor = rows.scales[1]
        else:
            factor = work.descales[2][tile.at.batch, kv_head(tile.at.head, work.heads_per_kv)]
    scale, offset = scale_of_scores(spec, work), probability_offset(spec)
    softmax.finish(view, rows.row_max, rows.row_sum, scale, offset, factor)
    if cutlass.const_expr(work.lse is not None):
        if tile.column == 0:
            for r in cutlass.range_constexpr(cute.size(rows.row_max)):
                row = query_of(tile.row + row_offset(r), spec.pack)
                head = tile.at.head * spec.pack + (tile.row + row_offset(r)) % spec.pack
                if row < tile.seq.q_len:
                    if cutlass.const_expr(spec.varlen):
                        work.lse[head, tile.seq.q_start + row] = rows.row_max[r]
                    else:
                        work.lse[tile.at.batch, head, row] = rows.row_max[r]
