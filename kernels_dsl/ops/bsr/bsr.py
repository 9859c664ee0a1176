"""`bsr_gemm`: products in which a factor keeps some blocks only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES
from kernels_dsl.checks.options import boolean
from kernels_dsl.ops.bsr.arguments import BsrArguments, BsrConfig
from kernels_dsl.ops.bsr.product import BSR_GEMM
from kernels_dsl.ops.bsr.torch_matrices import from_torch
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.repeated import repeated, tensors_among, weight
from kernels_dsl.sparse.tensor import BsrTensor

_Tensor = torch.Tensor


def bsr_gemm(
    a: BsrTensor | torch.Tensor,
    b: BsrTensor | torch.Tensor,
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
    family: str | None = None,
    config: BsrConfig | None = None,
    check: bool = False,
) -> torch.Tensor:
    """activation(alpha · a @ b + beta · c + bias) + residual, where a or b is block-sparse; float32 sums.

    One of a and b is a `BsrTensor` (or its `t()`) or a torch.sparse_bsr tensor, the other dense: (M, K) or
    (L, M, K), (K, N) or (L, K, N), of the same dtype, bf16 or fp16; any strides, any alignment, any extent
    of the dense mode. Batched values (L, nnz, bm, bk) and a batched dense factor have the same L; either
    may lack the batch. Rows of the dense factor that meet no kept block are not read: NaN there stays out.

    The other arguments are those of `gemm`. `check` verifies the indices first, waiting for the GPU; see
    `BsrTensor` for what holds without. `family`: "sm90" or "sm80" forces one; `config` is in place of the
    chosen one; one with `split` False cuts no list.

    Returns (M, N) or (L, M, N). Differentiable in the values, the dense factor, c, bias and residual, but
    not with `epilogue` or `out`. Sums run in the order of the stored columns, those of long lists in pieces
    that are added in order, those of block rows that are pairs or share tiles in an order that follows from
    the whole pattern, so results repeat bit for bit.
    Raises TypeError and ValueError before any launch, naming the argument.
    """
    sparse: BsrTensor
    dense: Any
    if type(a) is BsrTensor:
        sparse, dense, left = a, b, False
    elif type(b) is BsrTensor:
        sparse, dense, left = b, a, True
    else:
        sparse, dense, left = _factors(a, b)
    if check is not False and boolean("check", check):
        sparse.check()
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    values = sparse.values
    key: Any = None
    tensors: tuple[Any, ...] = (values, dense) if out is None else (values, dense, out)
    plain = type(dense) is type(values) is _Tensor
    if plain or (type(dense) in PLAIN_TYPES and type(values) in PLAIN_TYPES):
        one = weight(alpha, 1.0) if alpha.__class__ is not float or alpha != 1.0 else True
        try:
            key = (
                dense.shape, left, sparse.transposed, out.__class__, one, activation, out_dtype, family,
                config,
            )  # fmt: skip
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
    if key is not None:
        extras: tuple[Any, ...] = ()
        if not (c is bias is residual is epilogue is None) or epilogue_args:
            extras = (c, bias, residual, *epilogue_args)
            tensors += tensors_among(extras)
            zero = weight(beta, 0.0) if c is not None else (beta.__class__, beta)
            key = (key, epilogue, bias_axis, zero, *map(type, extras))
        elif beta.__class__ is not float or beta != 1.0 or bias_axis != "n":
            key = (key, bias_axis, beta.__class__, beta)  # without effect: an error
        result = repeated(sparse._kept, key, tensors, out, alpha, beta, extras)
        if result is not None:
            return result
    call = BsrArguments(
        sparse.crow_indices, sparse.col_indices, values, dense, c, bias, residual, epilogue_args,
        shape=sparse.shape, transposed=sparse.transposed, dense_left=left, bias_axis=bias_axis, alpha=alpha,
        beta=beta, activation=activation, epilogue=epilogue, out_dtype=out_dtype, family=family,
        config=config, matrix=sparse, out=out,
    )  # fmt: skip
    return BSR_GEMM.first(call, key, tensors, _operator)


def _operator() -> Callable[[BsrArguments], torch.Tensor]:
    from kernels_dsl.ops.bsr import register

    return register.BSR_GEMM_OPERATOR


def _factors(a: Any, b: Any) -> tuple[BsrTensor, torch.Tensor, bool]:
    """(sparse, dense, whether the dense one is on the left)."""
    if isinstance(a, BsrTensor) or isinstance(b, BsrTensor):
        return (a, b, False) if isinstance(a, BsrTensor) else (b, a, True)
    for x in (a, b):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"a and b are {type(a).__name__} and {type(b).__name__}, must be tensors")
    if a.layout == torch.sparse_bsr:
        return from_torch(a), b, False
    if b.layout == torch.sparse_bsr:
        return from_torch(b), a, True
    raise TypeError(
        f"a and b have layouts {a.layout} and {b.layout}, one must be a BsrTensor or torch.sparse_bsr"
    )


def bsr_supports(a: BsrTensor | torch.Tensor, b: BsrTensor | torch.Tensor, **options: Any) -> str | None:
    """Says why `bsr_gemm(a, b, …)` with these arguments cannot run here; None if it can. Compiles nothing."""
    try:
        boolean("check", options.pop("check", False))
        sparse, dense, left = _factors(a, b)
        return BSR_GEMM.why_not(sparse=sparse, dense=dense, dense_left=left, **options)
    except (TypeError, ValueError) as error:
        return str(error)
