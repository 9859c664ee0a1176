"""Online softmax for 8-bit probabilities that looks for no maximum: it watches the sums.

A row has a reference instead of a maximum: the largest score of the block that it was taken from, and as
many powers of two above it that a thread's sum over that block is at most 2^SUM_LOG2. Probabilities of a
block are taken against the reference of the blocks before, so that nothing is waited for, and are packed as
they come. A thread needs their sum in any case, and none of them is larger than it: as long as the sum does
not pass e4m3's largest value, no probability does. Where one does, the warp takes a new reference and the
block again: its scores are still there.

The steps between references are whole powers of two, so that the largest weight of a row, which may be most
of it, is one as well and is not rounded.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass.cutlass_dsl import dsl_user_op

from . import softmax
from .inline_ptx import inline_ptx

LARGEST_SUM = 448.0
"""The largest e4m3."""
SUM_LOG2 = 7.0
"""Exponent of 2 of a thread's sum over the block that a reference is taken from, at most."""
COLUMNS = 4
"""Columns of both rows that are packed at a time."""
SMALLEST_SCALE = 2.0**-60


def first_step(
    scores: cute.Tensor,  # (rows, columns) float32: scores in, probabilities out
    reference: cute.Tensor,  # (rows,): out
    row_sum: cute.Tensor,  # (rows,): out
    scale_log2: Float32,
    may_be_empty: bool,
) -> None:
    """Takes the first block of a row and its reference; exp(scale * s) as exp2(scale_log2 * s).

    `may_be_empty` says that a row can have no key so far, its reference then being -inf.
    """
    columns = range(cute.size(scores, mode=[1]))
    for r in range(cute.size(scores, mode=[0])):
        highest, shift = _highest(scores, r, scale_log2, may_be_empty)
        for c in columns:
            scores[r, c] = _exponential(scores[r, c], scale_log2, shift)
        total = softmax.fold(scores, r, softmax.plus)
        largest = softmax.quad_max(total)
        reference[r] = _raised(highest, largest, scale_log2)
        factor = cute.math.exp2((highest - reference[r]) * scale_log2 + Float32(SUM_LOG2), fastmath=True)
        factor = softmax.choose(largest > Float32(0.0), factor, Float32(0.0))
        for c in columns:
            scores[r, c] = scores[r, c] * factor
        row_sum[r] = total * factor


@cute.jit
def step(
    scores: cute.Tensor,  # (2, columns) float32
    reference: cute.Tensor,  # (2,)
    row_sum: cute.Tensor,  # (2,)
    correction: cute.Tensor,  # (2,)
    scale_log2: Float32,
    pack: cutlass.Constexpr,  # pack(i, values): takes the probabilities of columns 4 i … 4 i + 3, (2, 4)
) -> Boolean:
    """Takes a further block. Returns whether this warp has new references; `correction`, what older outputs
    must be multiplied by, is set in that case alone.

    A row without any key so far has the reference -inf: its sum is infinite, or NaN where it still has none.
    """
    totals = cute.make_rmem_tensor(2, Float32)
    shifts = [reference[r] * scale_log2 - SUM_LOG2 for r in range(2)]
    _take(scores, totals, shifts, scale_log2, pack)
    fits = (totals[0] <= Float32(LARGEST_SUM)) & (totals[1] <= Float32(LARGEST_SUM))
    moved = not cute.arch.vote_all_sync(fits)
    if moved:
        shifts = []
        for r in cutlass.range_constexpr(2):
            old = reference[r]
            highest, shift = _highest(scores, r, scale_log2, True)
            total = Float32(0.0)
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                total = total + _exponential(scores[r, c], scale_log2, shift)
            new = cute.arch.fmax(_raised(highest, softmax.quad_max(total), scale_log2), old)
            base = softmax.finite_or_zero(new)
            reference[r] = new
            correction[r] = cute.math.exp2((old - base) * scale_log2, fastmath=True)
            row_sum[r] = row_sum[r] * correction[r]
            shifts.append(base * scale_log2 - SUM_LOG2)
        _take(scores, totals, shifts, scale_log2, pack)
    for r in cutlass.range_constexpr(2):
        row_sum[r] = row_sum[r] + totals[r]
    return moved


def _take(scores: cute.Tensor, totals: cute.Tensor, shifts: list, scale_log2: Float32, pack) -> None:
    """Packs the probabilities and sums them, in two chains a row."""
    chains: list[list] = [[None, None] for _ in shifts]
    for i in range(cute.size(scores, mode=[1]) // COLUMNS):
        values = cute.make_rmem_tensor((2, COLUMNS), Float32)
        for r, shift in enumerate(shifts):
            for c in range(COLUMNS):
                value = _exponential(scores[r, COLUMNS * i + c], scale_log2, shift)
                values[r, c] = value
                before = chains[r][c % 2]
                chains[r][c % 2] = value if before is None else before + value
        pack(i, values)
    for r in range(len(shifts)):
        totals[r] = chains[r][0] + chains[r][1]


def _highest(scores: cute.Tensor, row: int, scale_log2: Float32, may_be_empty: bool) -> tuple:
    """A row's maximum, and what is subtracted from its scaled scores."""
    highest = softmax.quad_max(softmax.fold(scores, row, cute.arch.fmax))
    return highest, softmax.base_of(highest, may_be_empty) * scale_log2


def _exponential(score: Float32, scale_log2: Float32, shift: Float32) -> Float32:
    return cute.math.exp2(score * scale_log2 - shift, fastmath=True)


def _raised(highest: Float32, total: Float32, scale_log2: Float32) -> Float32:
    """The reference of a row; -inf where it has no key. `total` is a sum in units of the largest weight.

    With hardly any scale all weights are alike, and the quotient would be none.
    """
    powers = _rounded_up(cute.math.log2(total, fastmath=True))
    raised = highest + powers * cute.arch.rcp_approx(scale_log2)
    return softmax.choose(scale_log2 > Float32(SMALLEST_SCALE), raised, highest)


@dsl_user_op
def _rounded_up(value: Float32, *, loc=None, ip=None) -> Float32:
    """The smallest whole number that is not below `value`."""
    return inline_ptx(Float32, (value,), "cvt.rpi.f32.f32 $0, $1;", "=f,f", effects=False, loc=loc, ip=ip)
