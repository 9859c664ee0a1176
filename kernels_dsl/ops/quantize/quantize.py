"""`quantize`: fp8 values and float32 scales of a tensor, of its transpose, or of both."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops import call_cache
from kernels_dsl.ops.eager_path import PLAIN_TYPES, check_tensor, needs_dispatcher, watched, written_out
from kernels_dsl.ops.quantize.arguments import check, check_target
from kernels_dsl.ops.quantize.buffers import Made
from kernels_dsl.ops.quantize.into import quantize_into
from kernels_dsl.ops.quantize.plan import Plan, plan_of
from kernels_dsl.ops.target import target_of

_PLANS: dict[Any, Any] = {}


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scaling: str = "tensor",
    transpose: bool | str = False,
    scale: torch.Tensor | None = None,
    out: Made | None = None,
) -> Made:
    """(values, scales): fp8 values with values · scales close to x.

    x: (…, M, K) or (K,), bf16, fp16 or fp32, any strides. dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    scaling, and the shape of the float32 scales: "tensor" (), "matrix" (…, 1, 1), "row" (…, M, 1),
    "1x128" (…, M, ceil(K / 128)) with contiguous M as `torch._scaled_mm` and DeepGEMM take it, "128x128"
    (…, ceil(M / 128), ceil(K / 128)).
    transpose: False; True for `quantize(x.mT)`, values (…, K, M) with contiguous M; "both" for four results,
    values, scales, values of x.mT and scales of x.mT, from one read of x where the scales allow.
    scale: with "tensor", a float32 tensor of one element to use in place of a computed scale; it is returned.
    out: what a call with such arguments returned before, or tensors of the same shapes, strides and dtypes;
    they are written and returned. Their memory must be their own, values begin at a multiple of 16 bytes, and
    of a padded row all may be written. It takes half of the host's time.

    Values are new tensors, the last mode contiguous, rows at multiples of 16 bytes (so with K not a multiple
    of 16 they are a view of a wider tensor). A group's scale is its largest finite magnitude over the largest
    fp8 value, and 1 where that is 0. Rounding is to nearest even; what is too large, infinities too, becomes
    the largest value of its sign, NaN stays NaN (`reference/quantize.py` has the definition to the bit).

    Not differentiable: a backward pass that comes here raises RuntimeError. Compute capability 8.9 or later.
    Raises TypeError and ValueError that name the argument; `quantize_supports` gives the same reasons as
    text.
    """
    if out is not None:
        return quantize_into(x, dtype, scaling, transpose, scale, out)
    key: Any = None
    usual = (x,) if scale is None else (x, scale)
    if type(x) in PLAIN_TYPES:
        try:
            key = (x.shape, scale is None, dtype, scaling, transpose)
        except RuntimeError:  # of a nested tensor, which has no shape
            check_tensor("x", x)
            raise
        plan: Plan | None = call_cache.find(_PLANS, key, usual)
        if plan is not None:
            try:
                return plan(x, scale, None)
            except ValueError:
                call_cache.look_at_addresses(_PLANS, key)
    if not watched():
        check(x, dtype, scaling, transpose, scale)
        tensors = written_out((x, scale))
        if tensors is not None:
            return quantize(tensors[0], dtype, scaling=scaling, transpose=transpose, scale=tensors[1])
    if needs_dispatcher((x, scale)) or key is None:
        from kernels_dsl.ops.quantize import register as quantize_register

        return quantize_register.call(x, dtype, scaling, transpose, scale)
    plan = plan_of(x, dtype, scaling, transpose, scale)
    results = plan(x, scale, None)
    if not target_of(x, "x").emulated:
        call_cache.keep(_PLANS, key, usual, plan)
    return results


def quantize_supports(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scaling: str = "tensor",
    transpose: bool | str = False,
    scale: torch.Tensor | None = None,
) -> str | None:
    """Why `quantize` with these arguments cannot run here; None if it can. Compiles nothing."""
    try:
        check(x, dtype, scaling, transpose, scale)
        check_target(target_of(x, "x"))
    except (TypeError, ValueError) as error:
        return str(error)
    return None
