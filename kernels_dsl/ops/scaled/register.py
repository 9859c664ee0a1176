"""`scaled_gemm` as operators of PyTorch. With `amax`, which is written, it is the one with an output."""

from __future__ import annotations

from kernels_dsl.ops.gemm.operator import GemmOperator
from kernels_dsl.ops.scaled.scaled_gemm import PRODUCT

call = GemmOperator(
    PRODUCT,
    "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? scale_result=None, "
    "Tensor? c=None, Tensor? bias=None, Tensor? residual=None, Tensor[]? epilogue_args=None, *, "
    'float alpha=1.0, float beta=1.0, str bias_axis="n", str? activation=None, str? epilogue=None, '
    "ScalarType? out_dtype=None, bool use_fast_accum=False, str? config=None, str? family=None",
    tensors=("scale_a", "scale_b", "scale_result", "c", "bias", "residual", "epilogue_args"),
    required=2,
)
