"""A call of `bsr_gemm` as a node of autograd."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.bsr import gradient as gradients
from kernels_dsl.ops.bsr.arguments import BsrArguments
from kernels_dsl.ops.bsr.gradient import sampled_factors
from kernels_dsl.ops.gemm import nodes
from kernels_dsl.ops.gemm.recorded import RecordedCall
from kernels_dsl.sparse.tensor import unchecked


class BsrGemm(torch.autograd.Function):
    """A call of `bsr_gemm`."""

    forward = staticmethod(nodes.record)
    backward = staticmethod(nodes.backward)
    general = staticmethod(gradients.backward)


def factors_of_bsr(
    operation: Any,
    call: RecordedCall,
    needs: tuple[bool, ...],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> nodes.Factors | None:
    """`Recorded.factors` of `operation`, which is `bsr_gemm`, for one matrix."""
    from kernels_dsl.ops.bsr.sampled_product import BSR_SDDMM, SampledArguments

    gradient, values, dense = tensors
    keywords, (crow, col) = call.recorded.keywords, call.recorded.indices
    shape, transposed, left = (keywords[name] for name in ("shape", "transposed", "dense_left"))
    common: dict[str, Any] = {"shape": shape, "alpha": call.alpha}
    matrix = unchecked((crow, col, values), (shape, not transposed), call.calls)
    of_dense = BsrArguments(
        crow, col, values, gradient, transposed=not transposed, dense_left=left, matrix=matrix,
        family=keywords["family"], out_dtype=dense.dtype, **common,
    )  # fmt: skip
    if values.dim() != 3 or operation.target_of(of_dense).emulated:
        return None
    product = nodes.run_of(operation, of_dense) if needs[1] else None
    sampled, operands = None, None if call.alpha == 1.0 else (call.alpha,)
    if needs[0]:
        x, y = sampled_factors(dense, gradient, left, transposed)
        block = (values.shape[1], values.shape[2])
        of_values = SampledArguments(
            crow, col, x, y, block=block, out_dtype=values.dtype, matrix=matrix, **common
        )
        sampled = BSR_SDDMM.plan_of(of_values)

    def run(gradient: torch.Tensor, values: torch.Tensor, dense: torch.Tensor) -> nodes.Both:
        d_values = d_dense = None
        if sampled is not None:
            d_values = sampled(*sampled_factors(dense, gradient, left, transposed), operands)
        if product is not None:
            d_dense = product(values, gradient)
        return d_values, d_dense

    return run
