"""`bsr_scaled_gemm`: block-sparse products of fp8 factors, with a scale a kept block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.options import boolean
from kernels_dsl.ops.bsr.arguments import BsrConfig
from kernels_dsl.ops.bsr.scaled_product import BSR_SCALED_GEMM, BsrScaledArguments
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.repeated import repeated, tensors_among, weight
from kernels_dsl.sparse.tensor import BsrTensor

_Tensor = torch.Tensor


def bsr_scaled_gemm(
    a: BsrTensor | torch.Tensor,
    b: BsrTensor | torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
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
    out_dtype: torch.dtype | None = None,
    config: BsrConfig | None = None,
    family: str | None = None,
    check: bool = False,
) -> torch.Tensor:
    """activation(alpha · (a · scale_a) @ (b · scale_b) + beta · c + bias) + residual of fp8 factors.

    One of a and b is a `BsrTensor` (or its `t()`) with e4m3 or e5m2 values, the other dense, (M, K) or
    (L, M, K), (K, N) or (L, K, N), e4m3 or e5m2. The scale of the sparse one is float32 (nnz,), or
    (L, nnz) where the values have a batch, or these with two more modes of size 1, as
    `kernels_dsl.quantize(values, scaling="matrix")` returns them. That of the dense one is a single element,
    or one a row of a, (M, 1), or a column of b, (1, N), with a batch before it or without.

    Sums of a block, of 128 of K at most, are the tensor cores'; they are multiplied by the block's scale and
    added in float32. The instructions read along K only: a dense factor whose K is not contiguous, in rows at
    multiples of 16 bytes, is copied first, and so are the values where their rows do not run along K
    (w.t() @ x, x @ w).

    The other arguments are those of `bsr_gemm`. out_dtype: bf16 (the default), fp16 or fp32. Compute
    capability 9.0; from 8.9 on where blocks have a multiple of 32 along the summed mode (family "sm80"), in
    which an instruction then has one scale. No gradients. Raises TypeError and ValueError before any launch,
    naming the argument.
    """
    sparse: BsrTensor
    dense: Any
    if type(a) is BsrTensor and type(b) is _Tensor:
        sparse, dense, left = a, b, False
    elif type(b) is BsrTensor and type(a) is _Tensor:
        sparse, dense, left = b, a, True
    else:
        sparse, dense, left = _factors(a, b)
    scales, dense_scale = (scale_b, scale_a) if left else (scale_a, scale_b)
    if check is not False and boolean("check", check):
        sparse.check()
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    values = sparse.values
    key: Any = None
    tensors: tuple[Any, ...] = ()
    if type(dense) is type(values) is _Tensor:
        one = weight(alpha, 1.0) if alpha.__class__ is not float or alpha != 1.0 else True
        try:
            key = (
                dense.shape, left, sparse.transposed, out.__class__, one, activation, epilogue, out_dtype,
                family, config,
            )  # fmt: skip
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
    if key is not None:
        tensors = (values, dense, scales, dense_scale) if out is None else (values, dense, out)
        extras = (c, bias, residual, scales, dense_scale, *epilogue_args)
        if c is bias is residual is None and not epilogue_args:
            if out is not None:
                tensors += (scales, dense_scale)
            if beta.__class__ is not float or beta != 1.0 or bias_axis != "n":
                key = (key, bias_axis, beta.__class__, beta)  # without effect: an error
        else:
            tensors = (values, dense, *tensors_among((out, *extras)))
            zero = weight(beta, 0.0) if c is not None else (beta.__class__, beta)
            key = (key, bias_axis, zero, *map(type, extras))
        result = repeated(sparse._kept, key, tensors, out, alpha, beta, extras)
        if result is not None:
            return result
    call = BsrScaledArguments(
        sparse.crow_indices, sparse.col_indices, values, dense, scales, dense_scale, c, bias,
        residual=residual, epilogue_args=epilogue_args, shape=sparse.shape, transposed=sparse.transposed,
        dense_left=left, alpha=alpha, beta=beta, bias_axis=bias_axis, activation=activation,
        epilogue=epilogue, out_dtype=out_dtype, family=family, config=config, matrix=sparse, out=out,
    )  # fmt: skip
    return BSR_SCALED_GEMM.first(call, key, tensors, _operator)


def _operator() -> Callable[[BsrScaledArguments], torch.Tensor]:
    from kernels_dsl.ops.bsr import register

    return register.BSR_SCALED_GEMM_OPERATOR


def _factors(a: Any, b: Any) -> tuple[BsrTensor, torch.Tensor, bool]:
    """(sparse, dense, whether the dense one is on the left)."""
    sparse = [isinstance(x, BsrTensor) for x in (a, b)]
    if sum(sparse) != 1:
        raise TypeError(f"a and b are {type(a).__name__} and {type(b).__name__}, one must be a BsrTensor")
    return (b, a, True) if sparse[1] else (a, b, False)


def bsr_scaled_supports(
    a: BsrTensor | torch.Tensor,
    b: BsrTensor | torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    config: BsrConfig | None = None,
    family: str | None = None,
    out: torch.Tensor | None = None,
    **arguments: Any,
) -> str | None:
    """Says why `bsr_scaled_gemm` with these arguments cannot run here; None if it can. Compiles nothing."""
    try:
        boolean("check", arguments.pop("check", False))
        sparse, dense, left = _factors(a, b)
        scales, dense_scale = (scale_b, scale_a) if left else (scale_a, scale_b)
        return BSR_SCALED_GEMM.why_not(
            sparse=sparse, dense=dense, dense_left=left, scales=scales, dense_scale=dense_scale,
            config=config, family=family, out=out, **arguments,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        return str(error)
