"""`gemm_gated`: f(gate, up) of neighbouring columns of alpha · A @ B + beta · C + bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES, refuse_written
from kernels_dsl.checks.options import boolean
from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops.gemm.gated_arguments import (
    GATED_GEMM,
    GatedArguments,
    check_outputs_apart,
    product_shape,
)
from kernels_dsl.ops.gemm.repeated import repeated, tensors_among, weight
from lowering.records import NamedTuple


class Gated(NamedTuple):
    """A gated result, and the values of which it was made: gate and up in alternating columns."""

    out: torch.Tensor
    preact: torch.Tensor


def gemm_gated(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    activation: str = "swiglu",
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_axis: str = "n",
    alpha: float = 1.0,
    beta: float = 1.0,
    return_preact: bool = False,
    out: torch.Tensor | None = None,
    preact_out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    family: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor | Gated:
    """f(gate, up), gate = z[..., ::2], up = z[..., 1::2], z = alpha · a @ b + beta · c + bias, in one kernel.

    a: (M, K) or (L, M, K), b: (K, N) or (L, K, N), N even; c, bias, alpha, beta and all else that is not said
    here are those of `gemm`. Columns of gate and up alternate in b, c and bias. A weight whose halves are
    stacked is to be interleaved once, such as (N, K) by
    `weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)`. activation: "swiglu", or another name of the
    table of gates in docs/gemm.md.

    return_preact: also returns z, rounded to the result's dtype; preact_out: its place, (M, N) or (L, M, N),
    of any strides without overlap. No gradients with these, nor with `out`.

    Returns (M, N / 2) or (L, M, N / 2), with return_preact or preact_out a pair `out`, `preact`.
    Differentiable in a, b, c and bias: a call that wants gradients keeps z for them, in the result's dtype;
    under torch.compile and the like the backward pass computes it again. Raises TypeError and ValueError
    before any launch, naming the argument; `gemm_gated_supports` gives the same reasons as text.
    """
    if return_preact.__class__ is not bool:
        boolean("return_preact", return_preact)
    key: Any = None
    extras: tuple[Any, ...] = ()
    tensors: tuple[Any, ...] = (a, b) if out is None else (a, b, out)
    callers = preact_out is not None  # which may share memory with others: checked in each call
    if return_preact and not callers:
        preact_out = _empty_product(a, b, out, out_dtype)
    if not callers and type(a) in PLAIN_TYPES and type(b) in PLAIN_TYPES:
        one = weight(alpha, 1.0)
        zero = weight(beta, 0.0) if c is not None else (beta.__class__, beta)
        if preact_out is not None:
            extras = (c, bias, None, preact_out)
        elif not c is bias is None:
            extras = (c, bias, None)
        tensors += tensors_among(extras)
        options = (activation, bias_axis, out_dtype, config, family, batch_invariant)
        try:
            key = (a.shape, b.shape, out.__class__, one, zero, options, *map(type, extras))
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
    result = None
    if key is not None:
        result = repeated(GATED_GEMM.calls, key, tensors, out, alpha, beta, extras)
    if result is None:
        call = GatedArguments(
            a, b, c, bias, activation, bias_axis=bias_axis, alpha=alpha, beta=beta, out_dtype=out_dtype,
            config=config, family=family, batch_invariant=batch_invariant, out=out, preact_out=preact_out,
        )  # fmt: skip
        result = GATED_GEMM.first(call, key, tensors, _operator)
    return result if preact_out is None else Gated(result, preact_out)


def _empty_product(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """A place for z. TypeError or ValueError where a and b have no product."""
    if out_dtype is None:
        out_dtype = a.dtype if out is None else out.dtype
    if type(a) in PLAIN_TYPES and type(b) in PLAIN_TYPES and a.dim() == b.dim() == 2:
        return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    return a.new_empty(product_shape(a, b), dtype=out_dtype)


def _operator() -> Callable[[GatedArguments], torch.Tensor]:
    from kernels_dsl.ops.gemm import register

    return register.GATED_GEMM_OPERATOR


def gemm_gated_supports(a: torch.Tensor, b: torch.Tensor, **options: Any) -> str | None:
    """Says why `gemm_gated(a, b, …)` cannot run here; None if it can. Compiles nothing.

    Takes the arguments of `gemm_gated`.
    """
    try:
        wanted = boolean("return_preact", options.pop("return_preact", False))
        if wanted and options.get("preact_out") is None:
            options["preact_out"] = _empty_product(a, b, options.get("out"), options.get("out_dtype"))
        call = GATED_GEMM.call_of(a=a, b=b, **options)
        call.check()
        GATED_GEMM.new_plan(call.in_memory())
        check_outputs_apart(call)
        if torch.is_grad_enabled():
            refuse_written(call.read().values(), **call.written())
    except (TypeError, ValueError) as error:
        return str(error)
    return None
