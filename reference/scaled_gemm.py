"""Products of fp8 operands with their scales: in float64, and as the tensor cores of Hopper add.

`scaled_gemm` is the reference. `as_tensor_cores` is what the tolerance rule measures against: the hardware
aligns 32 products and the running sum to the largest exponent among them and keeps 13 bits below it, so fp8
products have an error of their own, whatever the kernel. The model reproduces an H200's bits on random
values. PyTorch's `_scaled_mm` has the same error but takes few shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reference.gemm import finish
from reference.quantize import from_fp8

STEP = 32
"""Products that the hardware adds at a time."""
KEPT_BITS = 13
PROMOTED = 128
"""Elements of K between two additions to a float32 sum, where sums are promoted; a block scale's too."""
_LEAST = -1000.0


def expand_scale(
    scale: torch.Tensor, shape: Sequence[int], group: tuple[int, int] | None = None
) -> torch.Tensor:
    """A scale for each element of an operand of `shape`, float64. `group`: rows and columns that share one
    where scales are block-wise; None where they broadcast."""
    scale = scale.double()
    if group is not None:
        for mode, size in ((-2, group[0]), (-1, group[1])):
            scale = scale.repeat_interleave(size, dim=mode).narrow(mode, 0, shape[mode])
    return scale.expand(torch.broadcast_shapes(scale.shape, tuple(shape)))


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    groups: tuple[tuple[int, int], tuple[int, int]] | None = None,
    **epilogue: Any,
) -> torch.Tensor:
    """epilogue((a · scale_a) @ (b · scale_b)) in float64.

    a: (…, M, K), b: (…, K, N), fp8. groups: of the block-wise scales of a and b, None for scales that
    broadcast. epilogue: c, bias, residual, alpha, beta, activation, as in `reference.gemm`. Where K is 0: 0
    times the scales that broadcast, NaN where they are.
    """
    group_a, group_b = groups or (None, None)
    product = torch.matmul(
        from_fp8(a) * expand_scale(scale_a, a.shape, group_a),
        from_fp8(b) * expand_scale(scale_b, b.shape, group_b),
    )
    if a.shape[-1] == 0 and groups is None:
        product = product * scale_a.double() * scale_b.double()
    return _finish(product, epilogue)


def as_tensor_cores(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    groups: tuple[tuple[int, int], tuple[int, int]] | None = None,
    fast: bool = True,
    pieces: int = 1,
    out_dtype: torch.dtype = torch.float32,
    **epilogue: Any,
) -> torch.Tensor:
    """`scaled_gemm` with the sums of Hopper's tensor cores, everything behind them in float32.

    fast: the tensor cores add all of K; else each 128 of K are added in float32, as with block-wise scales.
    pieces: of K, multiples of 128, that the tensor cores add with `fast` and that are added in float32.
    """
    x, y = from_fp8(a), from_fp8(b)
    k = a.shape[-1]
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = torch.zeros(shape, dtype=torch.float32, device=a.device)
    step = -(-k // (pieces * PROMOTED)) * PROMOTED if fast and groups is None else PROMOTED
    for start in range(0, k, max(step, 1)):
        part = slice(start, min(start + step, k))
        partial = aligned_sums(x[..., part], y[..., part, :], torch.zeros_like(total).double()).float()
        if groups is not None:
            first = slice(start, start + 1)
            factor = expand_scale(scale_a, a.shape, groups[0])[..., first]
            partial = partial * (factor * expand_scale(scale_b, b.shape, groups[1])[..., first, :]).float()
        total = total + partial
    if groups is None:
        total = total * scale_a * scale_b
    return _finish(total, epilogue).to(out_dtype)


def _finish(product: torch.Tensor, epilogue: dict[str, Any]) -> torch.Tensor:
    defaults = {"c": None, "bias": None, "residual": None, "alpha": 1.0, "beta": 1.0, "activation": None}
    return finish(product, **{**defaults, **epilogue})


def _exponent(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 |x|), far below every other for zeros."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(mantissa == 0, _LEAST, exponent.double() - 1)


def _cut(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x without what is below `KEPT_BITS` bits under the exponent `largest`."""
    unit = torch.exp2(largest - KEPT_BITS)
    return torch.trunc(x / unit) * unit


def aligned_sums(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """total + a @ b, float64, step by step as the tensor cores add fp8 products. NaN and infinities as IEEE
    has them."""
    for start in range(0, a.shape[-1], STEP):
        x, y = a[..., start : start + STEP].unsqueeze(-2), b[..., start : start + STEP, :].mT.unsqueeze(-3)
        products = x * y  # (…, M, N, STEP)
        exact = total + products.sum(-1)
        largest = torch.maximum((_exponent(x) + _exponent(y)).amax(-1), _exponent(total)).clamp(min=_LEAST)
        kept = _cut(products, largest.unsqueeze(-1)).sum(-1) + _cut(total, largest)
        kept = _cut(kept, _exponent(kept))
        total = torch.where(torch.isfinite(exact), kept, exact)
    return total
