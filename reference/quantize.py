"""Quantisation to fp8 as plainly as it can be said: values · scale is close to x.

Definitions, which the kernels follow bit for bit:

* a group is a set of elements that share a scale: the whole tensor ("tensor"), each matrix of the last two
  modes ("matrix"), each row ("row"), 128 neighbours of a row ("1x128"), or 128 × 128 elements ("128x128").
  The last groups of a row or matrix may be smaller;
* `amax` is the largest magnitude of the group's finite elements, 0 where it has none;
* scale = max(amax · (1 / largest), 2⁻¹²⁶) in float32, `largest` being 448 for e4m3 and 57344 for e5m2, and 1
  for a group whose amax is 0;
* value = fp8(x · (1 / scale)): product and quotient rounded to float32, then rounded to the nearest fp8
  number, ties to the one with an even mantissa; what is larger than `largest`, infinities too, becomes
  ±`largest`; NaN becomes NaN. One infinity or NaN thus leaves the rest of its group usable.
"""

from __future__ import annotations

import math
from functools import cache

import torch

GROUP = 128
"""Elements of a group along a mode, in the scalings that have groups."""
SCALINGS = ("tensor", "matrix", "row", "1x128", "128x128")
SMALLEST_SCALE = 2.0**-126
# dtype -> (exponent bits, mantissa bits, largest finite value)
_FORMATS = {torch.float8_e4m3fn: (4, 3, 448.0), torch.float8_e5m2: (5, 2, 57344.0)}


def largest(dtype: torch.dtype) -> float:
    """The largest finite value of an fp8 dtype."""
    return _FORMATS[dtype][2]


@cache
def decoded(dtype: torch.dtype) -> torch.Tensor:
    """float64 (256,): the value of every bit pattern of an fp8 dtype (OCP 'OFP8', 2023)."""
    exponent_bits, mantissa_bits, limit = _FORMATS[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for pattern in range(128):
        exponent, mantissa = pattern >> mantissa_bits, pattern % (1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        if exponent == 0:
            value = math.ldexp(fraction, 1 - bias)
        else:
            value = math.ldexp(1 + fraction, exponent - bias)
        if value > limit:  # e4m3 has one such pattern, NaN; e5m2 has infinity, then NaN
            value = math.inf if dtype == torch.float8_e5m2 and mantissa == 0 else math.nan
        values.append(value)
    positive = torch.tensor(values, dtype=torch.float64)
    return torch.cat([positive, -positive])


def to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x (any float dtype and shape) rounded to the nearest fp8 value, ties to even, saturating; NaN stays."""
    table = decoded(dtype)[:128].to(x.device)
    finite = table[torch.isfinite(table)]
    magnitude = (
        x.double()
        .contiguous()
        .abs()
        .nan_to_num(nan=0.0, posinf=float(finite[-1]))
        .clamp(max=float(finite[-1]))
    )
    upper = torch.searchsorted(finite, magnitude).clamp(max=finite.numel() - 1)  # first value >= magnitude
    lower = (upper - 1).clamp(min=0)
    above, below = finite[upper] - magnitude, magnitude - finite[lower]
    take_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    pattern = torch.where(take_lower, lower, upper)
    pattern = torch.where(torch.isnan(x), 127, pattern)
    # A NaN has no sign that anyone defines; the hardware's is positive.
    negative = torch.signbit(x) & ~torch.isnan(x)
    return (pattern + 128 * negative).to(torch.uint8).view(dtype)


def from_fp8(values: torch.Tensor) -> torch.Tensor:
    """float64 values of an fp8 tensor."""
    return decoded(values.dtype).to(values.device)[values.contiguous().view(torch.uint8).long()]


def expand_scale(scale: torch.Tensor, shape: torch.Size | tuple[int, ...], scaling: str) -> torch.Tensor:
    """One scale for each element of a tensor of `shape`, from the scales as `quantize` returns them."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}, must be one of {SCALINGS}")
    if scaling in ("1x128", "128x128"):
        scale = scale.repeat_interleave(GROUP, dim=-1)[..., : shape[-1]]
    if scaling == "128x128":
        scale = scale.repeat_interleave(GROUP, dim=-2)[..., : shape[-2], :]
    return scale.expand(shape)


def group_amax(x: torch.Tensor, scaling: str) -> torch.Tensor:
    """The largest finite magnitude of every group of x (..., M, K), float32.

    Shapes: "tensor" (), "matrix" (..., 1, 1), "row" (..., M, 1), "1x128" (..., M, ceil(K / 128)), "128x128"
    (..., ceil(M / 128), ceil(K / 128)).
    """
    magnitude = torch.where(torch.isfinite(x), x.abs(), torch.zeros_like(x)).float()
    if scaling == "tensor":
        return magnitude.amax() if x.numel() else magnitude.new_zeros(())
    if scaling in ("matrix", "row"):
        modes = (-1,) if scaling == "row" else (-2, -1)
        shape = (*x.shape[:-1], 1) if scaling == "row" else (*x.shape[:-2], 1, 1)
        return magnitude.amax(modes, keepdim=True) if x.numel() else magnitude.new_zeros(shape)
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}, must be one of {SCALINGS}")
    rows = 1 if scaling == "1x128" else GROUP
    padded = torch.nn.functional.pad(magnitude, (0, -x.shape[-1] % GROUP, 0, -x.shape[-2] % rows))
    blocks = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, rows))
    return blocks.amax((-3, -1)) if x.numel() else blocks.new_zeros((*blocks.shape[:-3], blocks.shape[-2]))


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of groups of that amax, float32."""
    inverse = torch.tensor(1.0, dtype=torch.float32) / torch.tensor(largest(dtype), dtype=torch.float32)
    scale = (amax.float() * inverse).clamp(min=SMALLEST_SCALE)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scaling: str = "tensor",
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales) of x (..., M, K); `scale` is used in place of a computed one."""
    scale = scale_of(group_amax(x, scaling), dtype) if scale is None else scale
    inverse = torch.ones_like(scale) / scale
    return to_fp8(x.float() * expand_scale(inverse, x.shape, scaling), dtype), scale


def dequantize(values: torch.Tensor, scale: torch.Tensor, scaling: str = "tensor") -> torch.Tensor:
    """values · scale in float64."""
    return from_fp8(values) * expand_scale(scale.double(), values.shape, scaling)


def signal_to_noise(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """10 · log10 of the power of `expected` over that of the error of `actual`, in decibels; inf if equal."""
    noise = float((actual.double() - expected.double()).square().sum())
    signal = float(expected.double().square().sum())
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
