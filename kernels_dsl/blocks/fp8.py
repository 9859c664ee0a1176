"""fp8: scales of groups, and conversion of float32 registers to e4m3 and e5m2.

Conversions of whole fragments with `.to(dtype)` become `cvt.rn.satfinite.e4m3x2.f32` (or e5m2x2), which exist
from sm_89 on: to nearest even; overflow and infinities become the largest finite value, NaN stays NaN.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import math as mlir_math

from kernels_dsl.config.quantize import FORMATS, SMALLEST_SCALE

DTYPES = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2}


def choose(condition: cutlass.Boolean, yes: Float32, no: Float32) -> Float32:
    """`yes` where the condition holds, else `no`: a select, never a branch."""
    return Float32(cutlass.select_(condition, Float32(yes).ir_value(), Float32(no).ir_value()))


def magnitude(value: Float32) -> Float32:
    """|value|."""
    return Float32(mlir_math.absf(value.ir_value()))


def finite_magnitude(value: Float32) -> Float32:
    """|value|, and 0 for infinities and NaN."""
    size = magnitude(value)
    return choose(size < Float32(math.inf), size, Float32(0.0))


def largest_magnitudes(elements: cute.Tensor, measure) -> cute.Tensor:
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
    """found (groups,) = the largest finite magnitude along mode 1 of elements (groups, members) float32.

    Maxima ignore NaN by themselves. Infinities are so rare that they are looked for only where a maximum is
    one: a third of the instructions.
    """
    found.store(largest_magnitudes(elements, magnitude).load())
    over = found[0]
    for g in cutlass.range_constexpr(1, cute.size(found)):
        over = cute.arch.fmax(over, found[g])
    if over == Float32(math.inf):
        found.store(largest_magnitudes(elements, finite_magnitude).load())


def group_scale(amax: Float32, format: str) -> Float32:
    """The scale of a group whose largest finite magnitude is `amax`: amax / largest, 1 for 0."""
    scale = cute.arch.fmax(amax * Float32(1.0 / FORMATS[format]), Float32(SMALLEST_SCALE))
    return choose(amax == Float32(0.0), Float32(1.0), scale)


def reciprocal(scale: Float32) -> Float32:
    """1 / scale, correctly rounded."""
    return Float32(1.0) / scale


def block_max(value: Float32, scratch: cute.Tensor, thread: cutlass.Int32, warps: int) -> Float32:
    """The maximum of `value` over all threads of a CTA of `warps` warps; scratch: (warps,) shared float32.

    The caller synchronises before `scratch` is used for something else.
    """
    value = cute.arch.warp_reduction_max(value)
    scratch[thread // 32] = value  # every lane has the same
    cute.arch.sync_threads()
    for warp in range(warps):
        value = cute.arch.fmax(value, scratch[warp])
    return value
