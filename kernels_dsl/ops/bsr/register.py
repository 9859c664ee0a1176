"""Block-sparse products as operators of PyTorch, with gradients.

`torch.ops.kernels_dsl.bsr_gemm`, `bsr_gemm_out` and `bsr_sddmm` take the tensors of a `BsrTensor` one by one,
so torch.compile, export and autograd see nothing but tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.bsr.gradient import FACTORS, backward, summed
from kernels_dsl.ops.bsr.product import BSR_GEMM
from kernels_dsl.ops.bsr.sampled_product import BSR_SDDMM
from kernels_dsl.ops.bsr.scaled_product import BSR_SCALED_GEMM
from kernels_dsl.ops.gemm.grad import keep_for_backward
from kernels_dsl.ops.operators import LIBRARY, NO_GRADIENT, Operator

BSR_GEMM_OPERATOR = Operator(BSR_GEMM)
BSR_SCALED_GEMM_OPERATOR = Operator(BSR_SCALED_GEMM, NO_GRADIENT)
BSR_SDDMM_OPERATOR = Operator(BSR_SDDMM)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    keep_for_backward(ctx, inputs, keyword_only_inputs, FACTORS)


torch.library.register_autograd("kernels_dsl::bsr_gemm", backward, setup_context=_setup, lib=LIBRARY)


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
        d_a = summed(product(crow, col, gradient, b.mT, **common, out_dtype=torch.float32), a)
    if ctx.needs_input_grad[3]:
        d_b = product(crow, col, gradient, a.mT, **common, dense_left=True, out_dtype=torch.float32)
        d_b = summed(d_b, b)
    return None, None, d_a, d_b


torch.library.register_autograd(
    "kernels_dsl::bsr_sddmm", _backward_sampled, setup_context=_setup_sampled, lib=LIBRARY
)
