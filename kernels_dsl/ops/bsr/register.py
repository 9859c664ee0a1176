"""Block-sparse products as operators of PyTorch, with gradients.

`torch.ops.kernels_dsl.bsr_gemm`, `bsr_gemm_out` and `bsr_sddmm` take the tensors of a `BsrTensor` one by one,
so torch.compile, export and autograd see nothing but tensors. With z = alpha · A B + beta · C + bias,
D = f(z) + R and G the gradient of D, dz = G · f'(z): the dense factor gets alpha · Aᵀ dz, the values the
blocks of alpha · dz Bᵀ that A keeps, and so on for the other orientations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels_dsl.ops.bsr.product import BSR_GEMM, BSR_SCALED_GEMM, BSR_SDDMM
from kernels_dsl.ops.gemm.grad import epilogue_gradients, keep_for_backward, needed_of
from kernels_dsl.ops.operators import LIBRARY, NO_GRADIENT, Operator

_FACTORS = 4  # crow, col, values, dense

BSR_GEMM_OPERATOR = Operator(BSR_GEMM)
BSR_SCALED_GEMM_OPERATOR = Operator(BSR_SCALED_GEMM, NO_GRADIENT)
BSR_SDDMM_OPERATOR = Operator(BSR_SDDMM)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    keep_for_backward(ctx, inputs, keyword_only_inputs, _FACTORS)


def _summed(found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient in like's shape and dtype: summed over batches that `like` does not have."""
    if found.dim() > like.dim():
        found = found.sum(0)
    return found.to(like.dtype)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of the positional arguments, None for those that are not needed."""
    crow, col, values, dense, c, bias = ctx.saved_tensors
    keywords, needed = ctx.keywords, needed_of(ctx, _FACTORS)
    operator = torch.ops.kernels_dsl.bsr_gemm

    def product() -> torch.Tensor:
        names = ("shape", "transposed", "dense_left", "bias_axis", "alpha", "beta", "family")
        again = {name: keywords[name] for name in names}
        found: torch.Tensor = operator(crow, col, values, dense, c, bias, **again, out_dtype=torch.float32)
        return found

    through = epilogue_gradients(ctx, gradient, needed, product)
    d_values = d_dense = None
    if needed[2] or needed[3]:
        d_z = through.d_z.to(values.dtype)
    if needed[2]:
        d_values = _values_gradient(ctx.saved_tensors, d_z, keywords)
    if needed[3]:
        batched = d_z.dim() > dense.dim()
        found = operator(
            crow, col, values, d_z, shape=keywords["shape"], transposed=not keywords["transposed"],
            dense_left=keywords["dense_left"], alpha=keywords["alpha"], family=keywords["family"],
            out_dtype=torch.float32 if batched else dense.dtype,
        )  # fmt: skip
        d_dense = _summed(found, dense)
    made = (None, None, d_values, d_dense, through.c, through.bias, through.residual, None)
    return made[: len(ctx.needs_input_grad)]


def _values_gradient(saved: Sequence[Any], d_z: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
    """The stored blocks of alpha · dz Bᵀ, or of its transpose, by orientation."""
    crow, col, values, dense = saved[:4]
    left, transposed = keywords["dense_left"], keywords["transposed"]
    x, y = (dense.mT, d_z) if left else (d_z, dense.mT)
    if transposed:
        x, y = y.mT, x.mT
    batched = d_z.dim() == 3 and values.dim() == 3
    found = torch.ops.kernels_dsl.bsr_sddmm(
        crow, col, x, y, shape=keywords["shape"], block=list(values.shape[-2:]), alpha=keywords["alpha"],
        out_dtype=torch.float32 if batched else values.dtype,
    )  # fmt: skip
    return _summed(found, values)


torch.library.register_autograd("kernels_dsl::bsr_gemm", _backward, setup_context=_setup, lib=LIBRARY)


def _setup_sampled(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.keywords = keyword_only_inputs


def _backward_sampled(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """da = alpha · dV bᵀ and db = alpha · aᵀ dV, dV being block-sparse."""
    crow, col, a, b = ctx.saved_tensors
    common = {"shape": ctx.keywords["shape"], "alpha": ctx.keywords["alpha"]}
    gradient = gradient.to(a.dtype).contiguous()
    d_a = d_b = None
    product = torch.ops.kernels_dsl.bsr_gemm
    if ctx.needs_input_grad[2]:
        d_a = _summed(product(crow, col, gradient, b.mT, **common, out_dtype=torch.float32), a)
    if ctx.needs_input_grad[3]:
        d_b = product(crow, col, gradient, a.mT, **common, dense_left=True, out_dtype=torch.float32)
        d_b = _summed(d_b, b)
    return None, None, d_a, d_b


torch.library.register_autograd(
    "kernels_dsl::bsr_sddmm", _backward_sampled, setup_context=_setup_sampled, lib=LIBRARY
)
