"""Online softmax of score tiles that lie in the accumulators of a matrix instruction.

WGMMA and mma.sync spread a tile over threads alike: the four lanes of a quad share a row, and a lane has
columns 2 * (lane % 4) + {0, 1} of every eight. Scores are seen as (rows of this thread, columns of this
thread). Row maxima are kept for whole rows; row sums only for a thread's own columns until the end.
(Milakov and Gimelshein, 'Online normalizer calculation for softmax', 2018.)
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import choose, inline_ptx

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LANES_OF_A_ROW = 4
CHAINS = 4
"""Independent partial results of a reduction within a thread, which hide each other's latency."""
SLACK_LOG2 = 8.0
"""A lazy maximum is replaced once the true one is larger by this. Probabilities reach 2^8 = 256 then,
which float16 holds as precisely as those up to 1, and the division by the sum cancels the factor."""


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """View of accumulators as (rows, columns): ((2, MMA_M), (2, N)), N counting groups of eight columns.

    They are ((2, 2, N), MMA_M, 1) with WGMMA and ((2, 2), MMA_M, N) with mma.sync.
    """
    shape, stride = acc.layout.shape, acc.layout.stride
    groups = (shape[0][2], stride[0][2]) if len(shape[0]) == 3 else (shape[2], stride[2])
    layout = cute.make_layout(
        ((shape[0][1], shape[1]), (shape[0][0], groups[0])),
        stride=((stride[0][1], stride[1]), (stride[0][0], groups[1])),
    )
    return cute.make_tensor(acc.iterator, layout)


def columns_of_part(view: cute.Tensor, part: int, parts: int) -> cute.Tensor:
    """One of `parts` equal parts, side by side, of the columns of `rows_and_columns`."""
    if parts == 1:
        return view
    (rows, (pair, groups)), (row, (column, group)) = view.layout.shape, view.layout.stride
    layout = cute.make_layout((rows, (pair, groups // parts)), stride=(row, (column, group)))
    return cute.make_tensor(view.iterator + part * (groups // parts) * group, layout)


def quad_max(value: Float32) -> Float32:
    """Maximum over the four lanes that share a row."""
    return cute.arch.warp_reduction_max(value, threads_in_group=4)


def quad_sum(value: Float32) -> Float32:
    """Sum over the four lanes that share a row."""
    return cute.arch.warp_reduction_sum(value, threads_in_group=4)


def finite_or_zero(value: Float32) -> Float32:
    """`value`, or 0 for -inf: a row that has seen no key yet has no maximum to subtract."""
    return choose(value == Float32(-math.inf), Float32(0.0), value)


def fold(scores: cute.Tensor, row: int, combine, start=None):
    """Reduces one row of this thread, in CHAINS interleaved chains."""
    columns = cute.size(scores, mode=[1])
    chains = [scores[row, c] for c in range(min(CHAINS, columns))]
    for c in range(len(chains), columns):
        chains[c % CHAINS] = combine(chains[c % CHAINS], scores[row, c])
    if start is not None:
        chains[0] = combine(chains[0], start)
    while len(chains) > 1:
        chains = [combine(*chains[i : i + 2]) for i in range(0, len(chains) - 1, 2)] + (
            [chains[-1]] if len(chains) % 2 else []
        )
    return chains[0]


def online_step(
    scores: cute.Tensor,  # (rows, columns) float32: scores in, probabilities out
    row_max: cute.Tensor,  # (rows,)
    row_sum: cute.Tensor,  # (rows,)
    correction: cute.Tensor | None,  # (rows,): factor of older sums and outputs; None: there are none
    scale_log2: Float32,
    may_be_empty: bool,
    lazy: bool = False,
    offset: float = 0.0,
) -> None:
    """Takes a tile of scores into the running softmax. exp(scale * s) is taken as exp2(scale_log2 * s).

    `may_be_empty`: a row can have no key so far; its maximum is -inf then. With `lazy` a maximum stays as it
    is until the true one is much larger (see SLACK_LOG2), so that corrections are nearly always exactly 1.
    Probabilities and sums have a factor of 2^offset.
    """
    for r in range(cute.size(scores, mode=[0])):
        old = row_max[r]
        new = quad_max(fold(scores, r, cute.arch.fmax, None if correction is None else old))
        if lazy and correction is not None:
            # From -inf the difference is +inf, or NaN where there is still no key: then nothing changes.
            new = choose((new - old) * scale_log2 > Float32(SLACK_LOG2), new, old)
        row_max[r] = new
        base = finite_or_zero(new) if may_be_empty else new
        shift = base * scale_log2 - offset if offset else base * scale_log2
        for c in range(cute.size(scores, mode=[1])):
            scores[r, c] = cute.math.exp2(scores[r, c] * scale_log2 - shift, fastmath=True)
        total = fold(scores, r, plus)
        if correction is not None:
            factor = cute.math.exp2((old - base) * scale_log2, fastmath=True)
            correction[r] = factor
            total = row_sum[r] * factor + total
        row_sum[r] = total


@cute.jit
def lazy_step(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    correction: cute.Tensor,
    scale_log2: Float32,
    may_be_empty: cutlass.Constexpr[bool],
) -> cutlass.Boolean:
    """`online_step` with a lazy maximum, which a warp computes only where one of its scores is far above the
    old one. Otherwise lanes exchange nothing, and exponentials do not wait for a maximum.

    True where this warp has new maxima; `correction` is set in that case alone.
    """
    rows = cute.size(scores, mode=[0])
    highest = [fold(scores, r, cute.arch.fmax) for r in range(rows)]
    # From -inf the difference is +inf, or NaN where there is still no key: then nothing changes.
    above = [highest[r] * scale_log2 - row_max[r] * scale_log2 > Float32(SLACK_LOG2) for r in range(rows)]
    moved = above[0]
    for r in cutlass.range_constexpr(1, rows):
        moved = moved | above[r]
    moved = cute.arch.vote_any_sync(moved)
    if moved:
        for r in cutlass.range_constexpr(rows):
            old = row_max[r]
            new = cute.arch.fmax(quad_max(highest[r]), old)
            row_max[r] = new
            factor = cute.math.exp2((old - base_of(new, may_be_empty)) * scale_log2, fastmath=True)
            correction[r] = factor
            row_sum[r] = row_sum[r] * factor
    for r in cutlass.range_constexpr(rows):
        shift = base_of(row_max[r], may_be_empty) * scale_log2
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = cute.math.exp2(scores[r, c] * scale_log2 - shift, fastmath=True)
        row_sum[r] = row_sum[r] + fold(scores, r, plus)
    return moved


def base_of(maximum: Float32, may_be_empty: bool) -> Float32:
    """The reference that is subtracted from a row's scores."""
    return finite_or_zero(maximum) if may_be_empty else maximum


def plus(x: Float32, y: Float32) -> Float32:
    """The sum, for `fold`."""
    return x + y


@cute.jit
def finish_sums(row_sum: cute.Tensor):
    """Keeps the compiler from scheduling what follows before these sums, and the exponentials in them.

    By a vote of the warp on something that never happens. Without it ptxas moves a wait for WGMMA that is
    written after the exponentials before most of them.
    """
    total = row_sum[0]
    for r in cutlass.range_constexpr(1, cute.size(row_sum)):
        total = total + row_sum[r]
    vote_that_none_is_negative(total)


@dsl_user_op
def vote_that_none_is_negative(value: Float32, *, loc=None, ip=None) -> None:
    """Ends the kernel where `value` is negative in a lane of the warp. NaN is not."""
    text = (
        "{\n .reg .pred p, q;\n setp.lt.f32 p, $0, 0f00000000;\n"
        " vote.sync.any.pred q, p, 0xffffffff;\n @q trap;\n}"
    )
    inline_ptx(None, (value,), text, "f", effects=True, loc=loc, ip=ip)


@cute.jit
def rescale_where_needed(values: cute.Tensor, factor: cute.Tensor):
    """`rescale`, left out by warps in which every factor is 1."""
    needed = factor[0] != Float32(1.0)
    for r in cutlass.range_constexpr(1, cute.size(factor)):
        needed = needed | (factor[r] != Float32(1.0))
    if cute.arch.vote_any_sync(needed):
        rescale(values, factor)


def rescale(values: cute.Tensor, factor: cute.Tensor) -> None:
    """values (rows, columns) *= factor (rows,)."""
    for r in range(cute.size(values, mode=[0])):
        for c in range(cute.size(values, mode=[1])):
            values[r, c] = values[r, c] * factor[r]


def close(
    row_max: cute.Tensor,  # (rows,): maxima in, log-sum-exp (natural) out
    row_sum: cute.Tensor,  # (rows,): sums in, what outputs are to be multiplied by out
    scale_log2: Float32,
    offset: float = 0.0,
    factor: Float32 | None = None,
) -> cutlass.Boolean:
    """From sums, which have a factor of 2^offset, to factors of the outputs, of which `factor` is a part.

    True where a row of this warp has no key: its log-sum-exp is -inf.
    """
    some_empty = cutlass.Boolean(False)
    for r in range(cute.size(row_sum)):
        total = quad_sum(row_sum[r])
        empty = total == Float32(0.0)
        some_empty = some_empty | empty
        log_sum = (row_max[r] * scale_log2 + cute.math.log2(total, fastmath=True) - offset) * LN_2
        row_max[r] = choose(empty, Float32(-math.inf), log_sum)
        inverse = cute.arch.rcp_approx(total)
        row_sum[r] = inverse if factor is None else inverse * factor
    return cute.arch.vote_any_sync(some_empty)


@cute.jit
def finish(
    output: cute.Tensor,  # (rows, columns): unnormalised outputs in, outputs out
    row_max: cute.Tensor,  # (rows,): log-sum-exp, as `close` leaves it
    factor: cute.Tensor,  # (rows,): as `close` leaves it
    some_empty: cutlass.Boolean,
):
    """Multiplies the outputs by their factors. A row without any key gives exactly 0, also where values are
    NaN.
    """
    rescale(output, factor)
    if some_empty:
        for r in cutlass.range_constexpr(cute.size(output, mode=[0])):
            empty = row_max[r] == Float32(-math.inf)
            for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                output[r, c] = choose(empty, Float32(0.0), output[r, c])
