"""fp8: scales of groups, and conversion of float32 registers to e4m3 and e5m2.

Conversions of whole fragments with `.to(dtype)` become `cvt.rn.satfinite.e4m3x2.f32` (or e5m2x2), which exist
from sm_89 on. They round to nearest even; overflow and infinities become the largest finite value, and NaN
stays NaN.
"""

import math
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, const_expr, range_constexpr
from cutlass._mlir.dialects import math as mlir_math
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import choose, inline_ptx
from kernels_dsl.config.quantize import FORMATS, SMALLEST_SCALE

DTYPES = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2}
_PAIRS = {cutlass.BFloat16: ("bf16x2", 0x7F80), cutlass.Float16: ("f16x2", 0x7C00)}
"""16-bit dtype -> the PTX type of two of them in a register, and the bits of infinity."""


def magnitude(value: Float32) -> Float32:
    """|value|."""
    return Float32(mlir_math.absf(value.ir_value()))


def finite_magnitude(value: Float32) -> Float32:
    """|value|; 0 for infinities and NaN."""
    size = magnitude(value)
    return choose(size < Float32(math.inf), size, Float32(0.0))


def largest_magnitudes(elements: cute.Tensor, measure: Callable[[Float32], Float32]) -> cute.Tensor:
    """The maximum of `measure` along mode 1 of elements (groups, members) float32: (groups,)."""
    groups, members = cute.size(elements, mode=[0]), cute.size(elements, mode=[1])
    found = cute.make_rmem_tensor(groups, Float32)
    for g in range(groups):
        chains = [measure(elements[g, m]) for m in range(min(members, 2))]
        for m in range(2, members):
            chains[m % 2] = cute.arch.fmax(chains[m % 2], measure(elements[g, m]))
        found[g] = cute.arch.fmax(chains[0], chains[-1])
    return found


@cute.jit
def largest_finite(elements: cute.Tensor, found: cute.Tensor):
    """Finds the largest finite magnitude along mode 1 of elements (groups, members) float32: found (groups,).

    Maxima ignore NaN. Infinities are rare, so they are filtered only after a maximum turned out to be one,
    which takes a third of the instructions.
    """
    found.store(largest_magnitudes(elements, magnitude).load())
    over = found[0]
    for g in range_constexpr(1, cute.size(found)):
        over = cute.arch.fmax(over, found[g])
    if over == Float32(math.inf):
        found.store(largest_magnitudes(elements, finite_magnitude).load())


@dsl_user_op
def pair_max(a: Int32, b: Int32, dtype: type[cutlass.Numeric], *, loc=None, ip=None) -> Int32:
    """Maxima of two pairs of 16-bit floats; a number, not NaN, if one of the two is a number."""
    text = f"max.{_PAIRS[dtype][0]} $0, $1, $2;"
    return inline_ptx(Int32, (Int32(a), Int32(b)), text, "=r,r,r", effects=False, loc=loc, ip=ip)


@dsl_user_op
def e4m3_pair(pair: Int16, *, loc=None, ip=None) -> Int32:
    """Two e4m3 as two fp16, which is exact. sm_89 and later."""
    return inline_ptx(Int32, (pair,), "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", effects=False, loc=loc, ip=ip)


def _finite_halves(word: Int32, infinity: int) -> Int32:
    """Magnitudes of a pair; 0 for those that are not finite."""
    low, high = word & 0x7FFF, word & 0x7FFF0000
    zero = Int32(0)
    low = Int32(cutlass.select_(low < infinity, low.ir_value(), zero.ir_value()))
    high = Int32(cutlass.select_(high < infinity << 16, high.ir_value(), zero.ir_value()))
    return low | high


def _largest_pairs(
    words: cute.Tensor, dtype: type[cutlass.Numeric], measure: Callable[[Int32], Int32]
) -> cute.Tensor:
    """Maxima of pairs along mode 1 of words (groups, members), never NaN: (groups,)."""
    groups, members = cute.size(words, mode=[0]), cute.size(words, mode=[1])
    found = cute.make_rmem_tensor(groups, Int32)
    for g in range(groups):
        chains = [Int32(0), Int32(0)]  # not NaN, so that no maximum is one
        for m in range(members):
            chains[m % 2] = pair_max(chains[m % 2], measure(words[g, m]), dtype)
        found[g] = pair_max(chains[0], chains[1], dtype)
    return found


@cute.jit
def largest_finite_pairs(words: cute.Tensor, found: cute.Tensor, dtype: cutlass.Constexpr):
    """Finds the largest finite magnitudes along mode 1 of words (groups, members), Int32 pairs of bf16 or
    fp16: found (groups,). Takes half the instructions of `largest_finite`, and no registers for
    conversions."""
    infinity = const_expr(_PAIRS[dtype][1])
    found.store(_largest_pairs(words, dtype, lambda word: word & 0x7FFF7FFF).load())
    over = found[0]
    for g in range_constexpr(1, cute.size(found)):
        over = pair_max(over, found[g], dtype)
    if ((over & 0x7FFF) == infinity) | ((over >> 16) == infinity):
        found.store(_largest_pairs(words, dtype, lambda word: _finite_halves(word, infinity)).load())


@cute.jit
def largest_finite_both(words: cute.Tensor, most: cute.Tensor, dtype: cutlass.Constexpr) -> Float32:
    """The largest finite magnitude of all pairs of words (n,), as `largest_finite_pairs` finds it. Also
    raises most (n,), which holds no NaN, to each pair's finite magnitudes."""
    infinity = const_expr(_PAIRS[dtype][1])
    found = cute.make_rmem_tensor(1, Int32)
    group = cute.make_tensor(words.iterator, cute.make_layout((1, cute.size(words)), stride=(0, 1)))
    found.store(_largest_pairs(group, dtype, lambda word: word & 0x7FFF7FFF).load())
    if ((found[0] & 0x7FFF) == infinity) | ((found[0] >> 16) == infinity):
        found.store(_largest_pairs(group, dtype, lambda word: _finite_halves(word, infinity)).load())
        for n in range_constexpr(cute.size(words)):
            most[n] = pair_max(most[n], _finite_halves(words[n], infinity), dtype)
    else:
        for n in range_constexpr(cute.size(words)):
            most[n] = pair_max(most[n], words[n] & 0x7FFF7FFF, dtype)
    both = halves(found, dtype)
    return cute.arch.fmax(both[0], both[1])


def widened(elements: cute.Tensor, n: int) -> Float32:
    """Element n of registers, `n` static, as float32. A bf16 in the upper half takes one instruction instead
    of the two of a conversion."""
    if elements.element_type is not cutlass.BFloat16:
        return elements[n].to(Float32)
    word = cute.recast_tensor(elements, Int32)[n // 2]
    return (word & -65536 if n % 2 else word << 16).bitcast(Float32)


def halves(words: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Pairs of 16-bit floats (n,) Int32 as float32 (2 n,)."""
    layout = cute.make_layout(2 * cute.size(words))
    found = cute.make_rmem_tensor(layout, Float32)
    found.store(cute.make_tensor(cute.recast_ptr(words.iterator, dtype=dtype), layout).load().to(Float32))
    return found


def group_scale(amax: Float32, format: str) -> Float32:
    """The scale of a group whose largest finite magnitude is `amax`: amax / largest; 1 for 0, and for NaN,
    which `largest_finite` gives for a group of nothing else."""
    scale = cute.arch.fmax(amax * Float32(1.0 / FORMATS[format]), Float32(SMALLEST_SCALE))
    return choose(amax > Float32(0.0), scale, Float32(1.0))


def reciprocal(scale: Float32) -> Float32:
    """1 / scale, correctly rounded."""
    return Float32(1.0) / scale


def block_max(value: Float32, scratch: cute.Tensor, thread: cutlass.Int32, warps: int) -> Float32:
    """The maximum of `value` over all threads of a CTA of `warps` warps; scratch: (warps,) shared float32.

    The caller synchronises before it reuses `scratch`.
    """
    value = cute.arch.warp_reduction_max(value)
    scratch[thread // 32] = value  # every lane has the same
    cute.arch.sync_threads()
    for warp in range(warps):
        value = cute.arch.fmax(value, scratch[warp])
    return value
