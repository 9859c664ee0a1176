"""Softmax of the forward pass: from a block of scores to probabilities, and from sums to the rows' results.

    change_and_mask                      | softmax_step, or one of its variants    | to_operand
    scale, softcap, score function, mask | maxima, exponentials, sums, corrections | operand of P V

fp8 operands may have a factor for every 128 keys. A step multiplies its scores by K's; running maxima are
kept in units of the last block's scores, the output in units of the last block of V.
"""

from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.blocks.attention import softmax, softmax_no_max
from kernels_dsl.blocks.attention.kv_blocks import block_at
from kernels_dsl.blocks.attention.mask import query_of, row_offset
from kernels_dsl.blocks.attention.query_tiles import QueryTile
from kernels_dsl.blocks.attention.score_tile import (
    ScoreBlock,
    Tile,
    change_and_mask,
    may_hide,
    scale_of_scores,
)
from kernels_dsl.blocks.attention.work import AttentionSpec, Work, kv_head
from kernels_dsl.blocks.hw.dsl import choose
from kernels_dsl.config.attention import DESCALE_KEYS

FP8_OFFSET = 8.0
"""Probabilities as fp8 are 2^8 times as large: up to 256 of e4m3's 448, so that fewer are subnormal."""
K_NOW, V_NOW, K_NEXT, V_NEXT = range(4)
"""Elements of `Rows.scales`."""


class SoftmaxSpec(AttentionSpec, Protocol):
    """Trace-time facts of a forward kernel."""

    @property
    def lazy_rescale(self) -> bool: ...  # a row's maximum may be an older one: `softmax.lazy_step`
    @property
    def no_max(self) -> bool: ...  # `softmax_no_max` in place of `softmax`
    @property
    def linear_exps(self) -> int: ...  # with `no_max`: one in so many exponentials is linear; 0: none


class Rows(Protocol):
    """A thread's state of its rows."""

    @property
    def row_max(self) -> cute.Tensor: ...  # (rows,) float32: running maxima
    @property
    def row_sum(self) -> cute.Tensor: ...  # (rows,) float32: running sums
    @property
    def correction(self) -> cute.Tensor: ...  # (rows,) float32: what older outputs must be multiplied by
    @property
    def scales(self) -> cute.Tensor | None: ...  # (4,) float32: factors of the last and the next block


def probability_offset(spec: SoftmaxSpec) -> float:
    """Exponent of 2 of the factor of probabilities."""
    if spec.no_max:
        return softmax_no_max.SUM_LOG2
    return FP8_OFFSET if spec.dtype.width == 8 else 0.0


def descaled(work: Work, at: QueryTile) -> Work:
    """`work` with the scale of a tile's scores and the factor of its outputs, where operands are fp8."""
    if work.descales is None:
        return work
    q_scale, k_scale = work.descales.q, work.descales.k
    scale = work.scores.scale
    head = head_of_descales(at.head, work.heads_per_kv)
    if q_scale is not None:
        scale = scale * q_scale[at.batch, at.head]
    if k_scale is not None and cute.rank(k_scale) == 2:
        scale = scale * k_scale[at.batch, head]
    if work.descales.v is not None and not work.descales.by_block:
        # Loaded now, as nothing would hide it at the end of a tile.
        work = work._replace(descales=work.descales._replace(v=work.descales.v[at.batch, head]))
    return work._replace(scores=work.scores._replace(scale=scale))


@cute.jit
def head_of_descales(head: Int32, heads_per_kv: Int32) -> Int32:
    """`kv_head` behind a branch: its division does not mix with products that are being issued."""
    found = head
    if heads_per_kv > 1:
        found = kv_head(head, heads_per_kv)
    return found


def fetch_descales(spec: SoftmaxSpec, rows: Rows, tile: Tile, work: Work, position: Int32) -> None:
    """Loads the factors of K and V for the key block at `position` of a visit as those of the next block; 1
    where there is none a block. A step early: in its own step the products would wait for the load."""
    position = cutlass.min(position, tile.visit.count - 1)
    block = block_at(spec.variant, tile.visit, tile.at, work.lists, position)
    for i, scale in ((K_NEXT, work.descales.k), (V_NEXT, work.descales.v)):
        if scale is None or cute.rank(scale) == 2:
            rows.scales[i] = Float32(1.0)
        else:
            head = kv_head(tile.at.head, work.heads_per_kv)
            rows.scales[i] = scale[tile.at.batch, head, block * spec.tile_n // DESCALE_KEYS]


def fetch_first_descales(spec: SoftmaxSpec, rows: Rows, tile: Tile, work: Work) -> Work:
    """`in_block_units` of the first block, whose factors are those of the last block and of the next."""
    fetch_descales(spec, rows, tile, work, Int32(0))
    rows.scales[K_NOW], rows.scales[V_NOW] = rows.scales[K_NEXT], rows.scales[V_NEXT]
    return in_block_units(work, rows)


def start_descales(spec: SoftmaxSpec, rows: Rows, tile: Tile, work: Work) -> Work:
    """`in_block_units` of the first block; factors of the second are under way."""
    work = fetch_first_descales(spec, rows, tile, work)
    fetch_descales(spec, rows, tile, work, Int32(1))
    return work


def in_block_units(work: Work, rows: Rows) -> Work:
    """`work` with the scale of the scores of the last block."""
    return work._replace(scores=work.scores._replace(scale=work.scores.scale * rows.scales[K_NOW]))


def enter_block(spec: SoftmaxSpec, rows: Rows, work: Work) -> Work:
    """`in_block_units` of the next block, which becomes the last; maxima are converted to its units."""
    if not spec.variant.changes_scores:
        ratio = rows.scales[K_NOW] * cute.arch.rcp_approx(rows.scales[K_NEXT])
        for r in range(cute.size(rows.row_max)):
            rows.row_max[r] = rows.row_max[r] * ratio
    rows.scales[K_NOW] = rows.scales[K_NEXT]
    return in_block_units(work, rows)


def convert_output_units(rows: Rows) -> None:
    """Lets the next correction convert outputs to units of V's next block, which becomes the last."""
    ratio = rows.scales[V_NOW] * cute.arch.rcp_approx(rows.scales[V_NEXT])
    for r in range(cute.size(rows.correction)):
        rows.correction[r] = rows.correction[r] * ratio
    rows.scales[V_NOW] = rows.scales[V_NEXT]


def start_rows(spec: SoftmaxSpec, rows: Rows, tile: Tile, work: Work) -> None:
    """Takes an attention sink, a key with a value of 0, into the sums; one lane of a quad adds it."""
    if not spec.variant.sinks:
        return
    logit = Float32(work.sinks[tile.at.head]) * softmax.LOG2_E / scale_of_scores(spec, work)
    once = choose(tile.column == 0, Float32(2.0 ** probability_offset(spec)), Float32(0.0))
    for r in range(cute.size(rows.row_max)):
        rows.row_max[r], rows.row_sum[r] = logit, once


def softmax_step(
    spec: SoftmaxSpec,
    scores: cute.Tensor,
    rows: Rows,
    scored: ScoreBlock,
    masked: bool | Boolean,
    first: bool,
) -> None:
    """Masks the scores of one block and takes them into the running softmax; they become probabilities.

    `masked` is known at trace time, or decides by a branch. `first`: there is no maximum yet, `row_max` and
    `row_sum` may hold anything.
    """
    change_and_mask(spec, scores, scored, masked)
    exponentiate(spec, scores, rows, scored.work, masked, first)


def softmax_step_lazy(
    spec: SoftmaxSpec, scores: cute.Tensor, rows: Rows, scored: ScoreBlock, masked: bool
) -> Boolean:
    """`softmax_step` of blocks after the first, with a maximum that may lag. True where a row of this warp
    has a new one: older outputs must be multiplied by `correction` then, and only then.
    """
    change_and_mask(spec, scores, scored, masked)
    view = softmax.rows_and_columns(scores)
    scale = scale_of_scores(spec, scored.work)
    return softmax.lazy_step(view, rows.row_max, rows.row_sum, rows.correction, scale, may_hide(spec, masked))


def softmax_step_no_max(
    spec: SoftmaxSpec, scores: cute.Tensor, operand: cute.Tensor, rows: Rows, scored: ScoreBlock, masked: bool
) -> Boolean:
    """`softmax_step` and `to_operand` of blocks after the first, with `softmax_no_max`; result as that of
    `softmax_step_lazy`."""
    change_and_mask(spec, scores, scored, masked)

    def pack(i: int, values: cute.Tensor) -> None:
        ordered = cute.make_rmem_tensor(cute.make_layout((2, (2, 2)), stride=(4, (1, 2))), Float32)
        for r in range(2):
            for c in range(4):
                ordered[r, c] = values[r, c]
        for r in range(2):  # four keys of a row are a register of the operand
            source = cute.make_tensor(ordered.iterator + 4 * r, cute.make_layout(4))
            target = cute.make_tensor(operand.iterator + 8 * i + 4 * r, cute.make_layout(4))
            target.store(source.load().to(spec.dtype))

    view, scale = softmax.rows_and_columns(scores), scale_of_scores(spec, scored.work)
    exact = masked or scored.work.lse is not None  # which shows the sums
    linear = 0 if exact else spec.linear_exps
    return softmax_no_max.step(view, rows.row_max, rows.row_sum, rows.correction, scale, pack, linear, masked)


def exponentiate(
    spec: SoftmaxSpec, scores: cute.Tensor, rows: Rows, work: Work, masked: bool | Boolean, first: bool
) -> None:
    """Takes changed and masked scores into the running softmax; they become probabilities."""
    view, scale = softmax.rows_and_columns(scores), scale_of_scores(spec, work)
    may_be_empty = may_hide(spec, masked)
    if spec.no_max:
        cut = spec.variant.right and not spec.varlen
        softmax_no_max.first_step(view, rows.row_max, rows.row_sum, scale, may_be_empty, masked, cut)
        return
    correction = None if first and not spec.variant.sinks else rows.correction
    softmax.online_step(
        view, rows.row_max, rows.row_sum, correction, scale, may_be_empty, spec.lazy_rescale,
        offset=probability_offset(spec),
    )  # fmt: skip


def output_factor(rows: Rows, tile: Tile, work: Work) -> Float32 | None:
    """Factor that takes outputs from units of fp8 V to theirs, or None."""
    if work.descales is None or work.descales.v is None:
        return None
    if isinstance(work.descales.v, Float32):
        return work.descales.v
    if cute.rank(work.descales.v) == 3:
        return rows.scales[V_NOW]
    return work.descales.v[tile.at.batch, kv_head(tile.at.head, work.heads_per_kv)]


def finish_rows(spec: SoftmaxSpec, output: cute.Tensor, rows: Rows, tile: Tile, work: Work) -> None:
    """Divides the output (accumulators) by the row sums and stores the log-sum-exp."""
    divide_rows(output, rows, close_rows(spec, rows, tile, work))


def divide_rows(output: cute.Tensor, rows: Rows, some_empty: Boolean) -> None:
    """Divides the output (accumulators) by the row sums, after `close_rows`."""
    softmax.finish(softmax.rows_and_columns(output), rows.row_max, rows.row_sum, some_empty)


@cute.jit
def close_rows(spec: cutlass.Constexpr[SoftmaxSpec], rows: Rows, tile: Tile, work: Work) -> Boolean:
    """Makes factors of the output from the row sums and stores the log-sum-exp; for `divide_rows`, and needs
    no output yet. True where a row of this warp has no key."""
    factor = output_factor(rows, tile, work)
    scale, offset = scale_of_scores(spec, work), probability_offset(spec)
    some_empty = softmax.close(rows.row_max, rows.row_sum, scale, offset, factor)
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
    return some_empty
