"""`quantize`: fp8 values and float32 scales of a tensor, of its transpose, or of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES, check_tensor
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.quantize.arguments import check, check_target
from kernels_dsl.ops.quantize.buffers import Made
from kernels_dsl.ops.quantize.operation import QUANTIZE, QuantizeArguments
from kernels_dsl.ops.target import target_of


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
        return _into(x, dtype, scaling, transpose, scale, out)
    key: Any = None
    tensors = (x,) if scale is None else (x, scale)
    if type(x) in PLAIN_TYPES:
        key = (_shape(x), scale is None, dtype, scaling, transpose)
        plan = call_cache.find(QUANTIZE.calls, key, tensors)
        if plan is not None:
            try:
                result: Made = plan(x, scale, None)
                return result
            except ValueError as error:
                call_cache.refused(QUANTIZE.calls, key, error)
    call = QuantizeArguments(x, scale, dtype, scaling, transpose)
    made: Made = QUANTIZE.first(call, key, tensors, _operator)
    return made


def _into(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    transpose: bool | str,
    scale: torch.Tensor | None,
    out: Made,
) -> Made:
    """The same into tensors that the caller has."""
    key: Any = None
    tensors: tuple[Any, ...] = ()
    if type(x) in PLAIN_TYPES and type(out) is tuple and len(out) > 1 and (scale is None or scale is out[1]):
        distinct = out[:3] if len(out) == 4 and out[3] is out[1] else out
        tensors = (x, *distinct)
        key = (_shape(x), scale is None, dtype, scaling, transpose, len(out), len(distinct))
        found = call_cache.find(QUANTIZE.calls, key, tensors)
        if found is not None:
            plan, share_nothing = found
            if share_nothing(tensors):
                try:
                    plan(x, scale, out)
                    return out
                except ValueError as error:
                    call_cache.refused(QUANTIZE.calls, key, error)
    QUANTIZE.first(QuantizeArguments(x, scale, dtype, scaling, transpose, out), key, tensors, _operator)
    return out


def _shape(x: torch.Tensor) -> torch.Size:
    try:
        return x.shape
    except RuntimeError:
        check_tensor("x", x)  # nested tensors have no shape
        raise


def _operator() -> Callable[[QuantizeArguments], Made]:
    from kernels_dsl.ops.quantize import register

    return register.operator


def quantize_supports(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scaling: str = "tensor",
    transpose: bool | str = False,
    scale: torch.Tensor | None = None,
) -> str | None:
    """Says why `quantize` with these arguments cannot run here; None if it can. Compiles nothing."""
    try:
        check(x, dtype, scaling, transpose, scale)
        check_target(target_of(x, "x"))
    except (TypeError, ValueError) as error:
        return str(error)
    return None
