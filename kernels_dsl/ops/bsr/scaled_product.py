"""The block-sparse product of fp8 factors as an operation."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.bsr.arguments import BsrProductArguments
from kernels_dsl.ops.bsr.product import BsrProduct
from kernels_dsl.ops.gemm.arguments import BLOCK_SCALE, OperandSpec
from kernels_dsl.ops.operation import Named
from kernels_dsl.ops.scaled.operand_scale import OperandScale, check_scale
from kernels_dsl.sparse.tensor import BsrTensor
from lowering.records import frozen


@frozen
class BsrScaledArguments(BsrProductArguments):
    """The arguments of `bsr_scaled_gemm`."""

    crow: torch.Tensor
    col: torch.Tensor
    values: torch.Tensor
    dense: torch.Tensor
    scales: torch.Tensor
    dense_scale: torch.Tensor
    c: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    epilogue_args: tuple[Any, ...] = ()
    shape: tuple[int, int] = (0, 0)
    transposed: bool = False
    dense_left: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    bias_axis: str = "n"
    activation: str | None = None
    epilogue: Named = None
    out_dtype: torch.dtype | None = None
    family: str | None = None
    config: Named = None
    matrix: BsrTensor | None = None
    out: torch.Tensor | None = None

    scaled = True
    operands = ("alpha", "beta", "c", "bias", "residual", "scales", "dense_scale")

    def scale_operands(self, extents: tuple[int, int], batch: int | None) -> tuple[OperandSpec, ...]:
        """The scales as operands: of the kept blocks, which the main loop takes, and of the dense factor."""
        names = self.aliases
        for field in ("scales", "dense_scale"):
            check_scale(names[field], getattr(self, field), self.values.device)
        shape, blocks = tuple(self.scales.shape), tuple(self.values.shape[:-2])
        if shape not in (blocks, (*blocks, 1, 1)):
            raise ValueError(
                f"{names['scales']} has shape {shape}, must be {blocks} or {(*blocks, 1, 1)}: one of each "
                "kept block"
            )
        left, shape = self.dense_left, tuple(self.dense_scale.shape)
        spec = OperandScale("dense_scale", left, shape, extents[0 if left else 1], 0, batch).broadcast()
        if spec is None:
            single = (extents[0], 1) if left else (1, extents[1])
            lead = "" if batch is None else f", with a batch of {batch} before it or without"
            raise ValueError(
                f"{names['dense_scale']} has shape {shape}, must be one element or {single}, a scale a "
                f"{'row' if left else 'column'}{lead}"
            )
        return OperandSpec("scales", BLOCK_SCALE), spec


BSR_SCALED_GEMM = BsrProduct("bsr_scaled_gemm", BsrScaledArguments)
