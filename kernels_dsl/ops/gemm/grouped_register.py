"""`grouped_gemm` and `scaled_grouped_gemm` as one operator of PyTorch, and one with an output: that with
`amax`, which is written."""

from __future__ import annotations

from kernels_dsl.ops.gemm.grouped import PRODUCT
from kernels_dsl.ops.gemm.operator import GemmOperator

call = GemmOperator(
    PRODUCT,
    "Tensor a, Tensor b, Tensor offs, Tensor? scale_a=None, Tensor? scale_b=None, Tensor? scale_result=None, "
    "Tensor? bias=None, Tensor? residual=None, Tensor[]? epilogue_args=None, *, "
    "float alpha=1.0, str? activation=None, str? epilogue=None, "
    "ScalarType? out_dtype=None, bool use_fast_accum=False, str? config=None, str? family=None",
    tensors=("offs", "scale_a", "scale_b", "scale_result", "bias", "residual", "epilogue_args"),
    required=1,
)
