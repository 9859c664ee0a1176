"""`gemm_reduce`: a product with its epilogue, and a reduction of the result's rows or columns beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES, refuse_written
from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.reduced_arguments import (
    GEMM_REDUCE,
    Reduced,
    ReducedArguments,
    check_outputs_apart,
)
from kernels_dsl.ops.gemm.repeated import repeated, tensors_among, weight


def gemm_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    reduce: str = "sum",
    dim: int = -1,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_axis: str = "n",
    residual: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    epilogue: str | Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
    out: torch.Tensor | None = None,
    reduced_out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    family: str | None = None,
    batch_invariant: bool = False,
) -> Reduced:
    """The result D of `gemm`, and a float32 reduction of each of its rows (dim -1) or columns (dim -2).

    reduce: "sum", "sum_squares", "max" or "abs_max", of D's float32 values before they are rounded to its
    dtype; NaN gives NaN. dim: the mode of D that goes, -1 or -2. All else that is not said here is as of
    `gemm`. The kernel of the product writes a partial result for each part of a row or column, and a second,
    small one combines them in a fixed order: the same call gives the same bits. With `batch_invariant` that
    holds for the reductions of rows too, whatever M is; those of columns depend on all rows.

    reduced_out: the place of the reductions, float32 (M,) or (L, M) with dim -1, (N,) or (L, N) with dim -2,
    of any strides without overlap.

    Returns the pair `out`, `reduced`. Differentiable as `gemm` is, through both, with "sum" and "sum_squares"
    (which uses D as rounded); no gradients with "max" and "abs_max", nor with `out` or `reduced_out`. Raises
    TypeError and ValueError before any launch, naming the argument; `gemm_reduce_supports` gives the same
    reasons as text.
    """
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    key: Any = None
    extras = (c, bias, residual, None, *epilogue_args)
    tensors: tuple[Any, ...] = (a, b) if out is None else (a, b, out)
    # A reduced_out may share memory with others: checked in each call.
    if reduced_out is None and type(a) in PLAIN_TYPES and type(b) in PLAIN_TYPES:
        one = weight(alpha, 1.0)
        zero = weight(beta, 0.0) if c is not None else (beta.__class__, beta)
        options = (reduce, dim, activation, epilogue, bias_axis, out_dtype, config, family, batch_invariant)
        tensors += tensors_among(extras)
        try:
            key = (a.shape, b.shape, out.__class__, one, zero, options, *map(type, extras))
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
    result: Any = None
    if key is not None:
        result = repeated(GEMM_REDUCE.calls, key, tensors, out, alpha, beta, extras)
    if result is None:
        call = ReducedArguments(
            a, b, c, bias, residual, epilogue_args, bias_axis, alpha, beta=beta, activation=activation,
            epilogue=epilogue, out_dtype=out_dtype, config=config, family=family,
            batch_invariant=batch_invariant, out=out, reduce=reduce, dim=dim, reduced_out=reduced_out,
        )  # fmt: skip
        result = GEMM_REDUCE.first(call, key, tensors, _operator)
    return result if result.__class__ is Reduced else Reduced(*result)


def _operator() -> Callable[[ReducedArguments], Any]:
    from kernels_dsl.ops.gemm import register

    return register.GEMM_REDUCE_OPERATOR


def gemm_reduce_supports(a: torch.Tensor, b: torch.Tensor, **options: Any) -> str | None:
    """Says why `gemm_reduce(a, b, …)` cannot run here; None if it can. Compiles nothing.

    Takes the arguments of `gemm_reduce`.
    """
    try:
        options["epilogue_args"] = product_options.arguments(options.get("epilogue_args", ()))
        call = GEMM_REDUCE.call_of(a=a, b=b, **options).in_memory()
        call.check()
        GEMM_REDUCE.new_plan(call)
        check_outputs_apart(call)
        if torch.is_grad_enabled():
            call.refuse_gradients()
            refuse_written(call.read().values(), **call.written())
    except (TypeError, ValueError) as error:
        return str(error)
    return None
