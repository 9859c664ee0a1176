"""`bsr_sddmm`: products whose result keeps some blocks only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.eager_path import check_tensor, refuse_forward_mode
from kernels_dsl.checks.options import instance, number
from kernels_dsl.ops.bsr.sampled_product import BSR_SDDMM, SampledArguments, check_sampled, repeated_sampled
from kernels_dsl.ops.bsr.torch_matrices import from_torch
from kernels_dsl.ops.gemm.arguments import check_dtype
from kernels_dsl.sparse.tensor import BsrTensor

_Tensor = torch.Tensor


def bsr_sddmm(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: BsrTensor | torch.Tensor,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> BsrTensor:
    """The blocks of alpha · a @ b that `pattern` keeps: a sampled product, with float32 sums.

    a (M, K) or (L, M, K), b (K, N) or (L, K, N), bf16 or fp16 of one dtype, any strides. pattern:
    a `BsrTensor` (or its `t()`) or torch.sparse_bsr tensor of shape (M, N), of which the indices and the
    block's extents count. out_dtype: bf16 or fp16, default a's.

    Returns a `BsrTensor` of the pattern, with values (nnz, bm, bk) or (L, nnz, bm, bk); no `out`, as that is
    no dense tensor. Differentiable in a and b. Raises TypeError and ValueError that name the argument.
    """
    if not isinstance(pattern, BsrTensor):
        if not isinstance(pattern, torch.Tensor) or pattern.layout != torch.sparse_bsr:
            raise TypeError("pattern must be a BsrTensor or a torch.sparse_bsr tensor")
        pattern = from_torch(pattern)
    key: Any = None
    if type(a) is type(b) is _Tensor and alpha.__class__ is float and not pattern.transposed:
        try:
            key = ("sampled", a.shape, b.shape, alpha, out_dtype)
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
        else:
            values = repeated_sampled(pattern._kept, key, (a, b), alpha)
            if values is not None:
                return pattern.with_values(values)
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x)
    number("alpha", alpha)
    wanted = instance("out_dtype", out_dtype, torch.dtype, type(None)) or a.dtype
    check_dtype("out_dtype", wanted, (torch.bfloat16, torch.float16))
    # In the caller's terms, as the operator may get other ones.
    check_sampled(a, b, pattern.size, pattern.block, wanted)
    refuse_forward_mode("bsr_sddmm", {"a": a, "b": b})
    factors = (b.mT, a.mT) if pattern.transposed else (a, b)  # the stored blocks are those of (a b)ᵀ = bᵀ aᵀ
    call = SampledArguments(
        pattern.crow_indices, pattern.col_indices, *factors, pattern.shape, pattern.block,
        alpha=alpha, out_dtype=wanted, matrix=pattern,
    )  # fmt: skip
    return pattern.with_values(BSR_SDDMM.first(call, key, (a, b), _sampled_operator))


def _sampled_operator() -> Callable[[SampledArguments], torch.Tensor]:
    from kernels_dsl.ops.bsr import register

    return register.BSR_SDDMM_OPERATOR
