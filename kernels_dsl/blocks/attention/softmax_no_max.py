"""Online softmax for 8-bit probabilities without running maxima: sums show where a row needs a new reference.

A row has a reference in place of a maximum: the largest score of the block that it was taken from, raised by
as many powers of two as keep a thread's sum over that block at or below 2^SUM_LOG2. Probabilities of a
block are taken relative to the reference of the blocks before, so that nothing is waited for, and are packed
as they are computed. A thread needs their sum in any case, and none of them is larger than it: as long as the
sum does not exceed e4m3's largest value, no probability does. Where one does, the warp takes a new reference
and the block again: its scores are still in registers.

In blocks after the first that have no mask, some of the exponentials may be linear between powers of two.
They need no MUFU, whose 16 results a clock bound the kernel. The two rows of a thread have them at different
keys, so that a key of NaN shows in one of the two, and the warp takes the block again, exactly.

The steps between references are whole powers of two, so that the largest weight of a row, which may be most
of it, is one as well and is not rounded.
"""

import struct
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.hw.dsl import choose, inline_ptx

Pack = Callable[[int, cute.Tensor], None]
"""`pack(i, values)` takes the probabilities (2, COLUMNS) of columns 4 i … 4 i + 3 of both rows."""
LARGEST_SUM = 448.0
"""The largest e4m3."""
SUM_LOG2 = 7.0
"""Exponent of 2 of a thread's sum over the block that a reference is taken from, at most."""
MASKED_LOG2 = 4.0
"""Powers of two that a reference from a masked block is at least above its largest score: a row may have seen
one key of it, and sums of whole blocks follow."""
COLUMNS = 4
"""Columns of both rows that are packed at a time."""
SMALLEST_SCALE = 2.0**-60
"""With a smaller one all weights are alike, and references are not raised."""
RANGE = 256.0
"""Exponents that a float has."""
STEPS_LOG2 = 22
"""`_linear` divides them into 2^22 steps."""
MEAN_LOG2 = 0.0571
"""Exponent of 2 of what (1 + f) / 2^f is in the mean, f from 0 to 1."""


def first_step(
    scores: cute.Tensor,  # (rows, columns) float32: scores in, probabilities out
    reference: cute.Tensor,  # (rows,): out
    row_sum: cute.Tensor,  # (rows,): out
    scale_log2: Float32,
    may_be_empty: bool,
    masked: bool | Boolean,
    cut: bool = False,
) -> None:
    """Takes the first block of a row and its reference; exp(scale * s) as exp2(scale_log2 * s).

    `may_be_empty`: a row can have no key so far; its reference is -inf then. `cut`: an edge of the mask cuts
    the first blocks, whose references are MASKED_LOG2 above their largest scores: no sum is waited for.
    """
    columns = range(cute.size(scores, mode=[1]))
    cut = cut and len(columns) * 2.0 ** (SUM_LOG2 - MASKED_LOG2) <= LARGEST_SUM
    for r in range(cute.size(scores, mode=[0])):
        highest, shift = _highest(scores, r, scale_log2, may_be_empty)
        if cut:
            reference[r] = _raised(highest, Float32(MASKED_LOG2), scale_log2)
            shift = softmax.base_of(reference[r], may_be_empty) * scale_log2 - SUM_LOG2
            for c in columns:
                scores[r, c] = _exponential(scores[r, c], scale_log2, shift)
            row_sum[r] = softmax.fold(scores, r, softmax.plus)
            continue
        for c in columns:
            scores[r, c] = _exponential(scores[r, c], scale_log2, shift)
        total = softmax.fold(scores, r, softmax.plus)
        largest = softmax.quad_max(total)
        reference[r] = _raised_reference(highest, largest, scale_log2, masked)
        factor = cute.math.exp2((highest - reference[r]) * scale_log2 + Float32(SUM_LOG2), fastmath=True)
        factor = choose(largest > Float32(0.0), factor, Float32(0.0))
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
    pack: cutlass.Constexpr[Pack],
    linear: cutlass.Constexpr[int],  # one in so many exponentials is taken by `_linear`; 0: none
    masked: cutlass.Constexpr[bool],
) -> Boolean:
    """Takes a further block. True where this warp has new references; `correction`, what older outputs must
    be multiplied by, is set in that case alone.

    A row without any key so far has the reference -inf: its sum is infinite, or NaN where it still has none.
    """
    totals = cute.make_rmem_tensor(2, Float32)
    shifts = [reference[r] * scale_log2 - SUM_LOG2 for r in range(2)]
    _pack_and_sum(scores, totals, shifts, scale_log2, pack, linear)
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
            new = cute.arch.fmax(_raised_reference(highest, softmax.quad_max(total), scale_log2, masked), old)
            base = softmax.finite_or_zero(new)
            reference[r] = new
            correction[r] = cute.math.exp2((old - base) * scale_log2, fastmath=True)
            row_sum[r] = row_sum[r] * correction[r]
            shifts.append(base * scale_log2 - SUM_LOG2)
        _pack_and_sum(scores, totals, shifts, scale_log2, pack, 0)
    for r in cutlass.range_constexpr(2):
        row_sum[r] = row_sum[r] + totals[r]
    return moved


def _pack_and_sum(
    scores: cute.Tensor,
    totals: cute.Tensor,
    shifts: list[Float32],
    scale_log2: Float32,
    pack: Pack,
    linear: int,
) -> None:
    """Packs the probabilities and sums them, in two chains a row."""
    share = scale_log2 * Float32(1 / RANGE)
    starts = [(Float32(127.0 - MEAN_LOG2) - shift) * Float32(1 / RANGE) for shift in shifts]
    chains: list[list] = [[None, None] for _ in shifts]
    for i in range(cute.size(scores, mode=[1]) // COLUMNS):
        values = cute.make_rmem_tensor((2, COLUMNS), Float32)
        for r, shift in enumerate(shifts):
            for c in range(COLUMNS):
                column = COLUMNS * i + c
                if linear and (column + r) % linear == linear - 1:
                    value = _linear(scores[r, column], share, starts[r])
                else:
                    value = _exponential(scores[r, column], scale_log2, shift)
                values[r, c] = value
                before = chains[r][c % 2]
                chains[r][c % 2] = value if before is None else before + value
        pack(i, values)
    for r in range(len(shifts)):
        totals[r] = chains[r][0] + chains[r][1]


def _highest(
    scores: cute.Tensor, row: int, scale_log2: Float32, may_be_empty: bool
) -> tuple[Float32, Float32]:
    """A row's maximum, and the shift that is subtracted from its scaled scores."""
    highest = softmax.quad_max(softmax.fold(scores, row, cute.arch.fmax))
    return highest, softmax.base_of(highest, may_be_empty) * scale_log2


def _exponential(score: Float32, scale_log2: Float32, shift: Float32) -> Float32:
    return cute.math.exp2(score * scale_log2 - shift, fastmath=True)


@dsl_user_op
def _linear(score: Float32, share: Float32, start: Float32, *, loc=None, ip=None) -> Float32:
    """2^(x + MEAN_LOG2) for x = RANGE * (score * share + start) - 127, linear between powers of two: with a
    relative error of -4 to 2 %, 0 in the mean.

    Without MUFU (Schraudolph, 'A compact approximation of the exponential function', 1999). x is rounded to
    steps by a sum with 2^23, whose bits, shifted, are the exponent and the fraction of a float. 0 where x is
    below -127 and for NaN; infinite or NaN from 128 on, where the last step is.
    """
    last = struct.pack(">f", 2.0**STEPS_LOG2 - 1).hex()
    text = (
        "{ .reg .f32 t; .reg .b32 b;\n fma.rn.sat.f32 t, $1, $2, $3;\n"
        f" fma.rn.f32 t, t, 0f{last}, 0f4B000000;\n"
        f" mov.b32 b, t;\n shl.b32 b, b, {31 - STEPS_LOG2};\n mov.b32 $0, b;\n}}"
    )
    return inline_ptx(Float32, (score, share, start), text, "=f,f,f,f", effects=False, loc=loc, ip=ip)


def _raised_reference(
    highest: Float32, total: Float32, scale_log2: Float32, masked: bool | Boolean
) -> Float32:
    """The reference of a row; -inf where it has no key. `total` is a sum in units of the largest weight."""
    powers = _rounded_up(cute.math.log2(total, fastmath=True))
    if masked is not False:
        least = Float32(MASKED_LOG2)
        if masked is not True:
            least = choose(masked, least, Float32(0.0))
        powers = cute.arch.fmax(powers, least)
    return _raised(highest, powers, scale_log2)


def _raised(highest: Float32, powers: Float32, scale_log2: Float32) -> Float32:
    """`highest`, raised by `powers` of two."""
    # With hardly any scale all weights are alike, and the quotient would be infinite.
    raised = highest + powers * cute.arch.rcp_approx(scale_log2)
    return choose(scale_log2 > Float32(SMALLEST_SCALE), raised, highest)


@dsl_user_op
def _rounded_up(value: Float32, *, loc=None, ip=None) -> Float32:
    """The smallest whole number that is not below `value`."""
    return inline_ptx(Float32, (value,), "cvt.rpi.f32.f32 $0, $1;", "=f,f", effects=False, loc=loc, ip=ip)
