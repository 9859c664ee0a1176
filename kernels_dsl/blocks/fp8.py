"""fp8: scales of groups, and conversion of float32 registers to e4m3 and e5m2.

Conversions of whole fragments with `.to(dtype)` become `cvt.rn.satfinite.e4m3x2.f32` (or e5m2x2), which exist
from sm_89 on: to nearest even; overflow and infinities become the largest finite value, NaN stays NaN.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernels_dsl.config.quantize import FORMATS, SMALLEST_SCALE

DTYPES = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2}


def choose(condition: cutlass.Boolean, yes: Float32, no: Float32) -> Float32:
    """`yes` where the condition holds, else `no`: a select, never a branch."""
    return Float32(cutlass.select_(condition, Float32(yes).ir_value(), Float32(no).ir_value()))


def finite_magnitude(value: Float32) -> Float32:
    """|value|, and 0 for infinities and NaN."""
    magnitude = cute.arch.fmax(value, -value)
    return choose(magnitude < Float32(math.inf), magnitude, Float32(0.0))


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
