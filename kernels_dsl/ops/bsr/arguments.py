"""The arguments of block-sparse products: checked once, as plain data."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch

from kernels_dsl.blocks.epilogue.functions import ScaledEpilogue
from kernels_dsl.checks.eager_path import asks_gradients, check_output, check_tensor
from kernels_dsl.config.bsr import Sm90BsrConfig
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.ops.gemm.arguments import (
    FP8_DTYPES,
    GemmCall,
    OperandSpec,
    ProductArguments,
    check_dtype,
    check_extents,
    check_out,
    describe_epilogue,
    result_dtype,
)
from kernels_dsl.ops.operation import Arguments, Named
from kernels_dsl.sparse.pattern import Pattern, pattern_of
from kernels_dsl.sparse.tensor import BsrTensor
from lowering.records import frozen

BsrConfig = Sm90BsrConfig | Sm80GemmConfig
CONFIGS = (Sm90BsrConfig, Sm80GemmConfig)


class MatrixArguments(Arguments):
    """The common part of calls with a pattern of blocks: its indices and, where the caller has one, the
    matrix, which keeps plans of calls with it."""

    unlisted = ("config", "matrix")
    crow: torch.Tensor
    col: torch.Tensor
    shape: tuple[int, int]
    block: tuple[int, int]
    matrix: BsrTensor | None

    @property
    def pattern(self) -> Pattern:
        """The pattern of the kept blocks."""
        rows, columns = (size // block for size, block in zip(self.shape, self.block))
        return pattern_of(self.crow, self.col, rows, columns)

    @property
    def plans(self) -> dict[Any, Any]:
        """The dictionary that keeps plans of such calls, with the matrix, or its pattern where there is
        none."""
        return self.pattern.plans if self.matrix is None else self.matrix._kept

    def plan_key(self) -> Any:
        """All that a plan depends on."""
        return type(self), getattr(self, "config", None), super().plan_key()


class BsrProductArguments(MatrixArguments, ProductArguments):
    """The common part of the call records of both products: the parts of the sparse matrix, (bm, bk) blocks
    of `values`, `shape` as it is stored, and the dense factor."""

    required = ("shape",)
    leading = "dense"
    configs = CONFIGS
    values: torch.Tensor
    dense: torch.Tensor
    out_dtype: torch.dtype | None
    transposed: bool
    dense_left: bool
    scaled: ClassVar[bool] = False
    """True if the factors are fp8, with scales."""

    @property
    def aliases(self) -> dict[str, str]:
        """Field -> the caller's name for it."""
        dense, sparse = "ab" if self.dense_left else "ba"
        return {
            "crow": "crow_indices", "col": "col_indices", "values": "the values", "dense": dense,
            "scales": f"scale_{sparse}", "dense_scale": f"scale_{dense}",
        }  # fmt: skip

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The values and the dense factor."""
        return self.values, self.dense

    @property
    def by_column(self) -> bool:
        """True if the lists of block columns are followed, and blocks transposed: for AᵀB and for B A."""
        return self.transposed != self.dense_left

    @cached_property
    def sparse(self) -> BsrTensor:
        """The matrix of its parts."""
        if self.matrix is not None:
            return self.matrix
        return BsrTensor(self.crow, self.col, self.values, self.shape, self.transposed)

    @property
    def block(self) -> tuple[int, int]:  # type: ignore[override]
        """Rows and columns of a block as it is stored."""
        return self.values.shape[-2], self.values.shape[-1]

    def scale_operands(self, extents: tuple[int, int], batch: int | None) -> tuple[OperandSpec, ...]:
        """The scales of the factors as operands, for a result of (M, N) `extents`."""
        return ()

    def refuse_gradients(self) -> None:
        """ValueError where gradients are asked for that do not exist, and for a `config`."""
        if self.config is not None:
            raise ValueError("config is given, must be None with gradients, under torch.compile and in modes")


@frozen
class BsrArguments(BsrProductArguments):
    """The arguments of `bsr_gemm`."""

    crow: torch.Tensor
    col: torch.Tensor
    values: torch.Tensor
    dense: torch.Tensor
    c: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    epilogue_args: tuple[Any, ...] = ()
    shape: tuple[int, int] = (0, 0)
    transposed: bool = False
    dense_left: bool = False
    bias_axis: str = "n"
    alpha: float = 1.0
    beta: float = 1.0
    activation: str | None = None
    epilogue: Named = None
    out_dtype: torch.dtype | None = None
    family: str | None = None
    config: Named = None
    matrix: BsrTensor | None = None
    out: torch.Tensor | None = None

    operands = ("alpha", "beta", "c", "bias", "residual")

    def refuse_gradients(self) -> None:
        """ValueError where gradients are asked for that do not exist."""
        super().refuse_gradients()
        if asks_gradients((*self.read().values(), self.out)):
            from kernels_dsl.ops.gemm.grad import refuse_functions

            refuse_functions(self.epilogue, self.activation)


def describe(call: BsrProductArguments) -> GemmCall:
    """Check a product's arguments; TypeError or ValueError says what is wrong."""
    sparse, dense, name = call.sparse, call.dense, call.aliases["dense"]
    check_tensor(name, dense)
    if call.out is not None:
        check_output("out", call.out)
    _check_dtypes(call, name)
    if dense.dim() not in (2, 3):
        raise ValueError(f"{name} has shape {tuple(dense.shape)}, must have two modes, or three with a batch")
    if dense.device != sparse.device:
        raise ValueError(
            f"{name} is on {dense.device}, must be on the sparse matrix' device, {sparse.device}"
        )
    rows, columns = sparse.size
    m, k, n = (dense.shape[-2], rows, columns) if call.dense_left else (rows, columns, dense.shape[-1])
    inner = dense.shape[-1] if call.dense_left else dense.shape[-2]
    if inner != k:
        mode = "columns" if call.dense_left else "rows"
        raise ValueError(
            f"{name} has shape {tuple(dense.shape)}, must have {k} {mode}: the sparse matrix has shape "
            f"{(rows, columns)}"
        )
    check_extents(m, n, k)
    batch = _batch(call, name)
    d_shape = (m, n) if batch is None else (batch, m, n)
    epilogue, operands = describe_epilogue(d_shape, sparse.device, vars(call))
    if call.scaled:
        operands = (*call.scale_operands((m, n), batch), *operands)
        epilogue = ScaledEpilogue(epilogue, 1)
    default = torch.bfloat16 if call.scaled else sparse.dtype
    out_dtype = result_dtype(call.out, call.out_dtype, default)
    found = GemmCall(m, n, k, batch, sparse.dtype, out_dtype, epilogue, operands)
    if call.out is not None:
        check_out(call.out, found, sparse.device)
    return found


def _check_dtypes(call: BsrProductArguments, name: str) -> None:
    """TypeError where the factors' dtypes do not go together."""
    dtype, dense = call.values.dtype, call.dense.dtype
    if call.scaled:
        check_dtype("the sparse matrix", dtype, FP8_DTYPES)
        check_dtype(name, dense, FP8_DTYPES)
    elif dtype.itemsize == 1:
        raise TypeError(f"the sparse matrix has dtype {dtype}, must be 16 bits: see bsr_scaled_gemm")
    elif dense != dtype:
        raise TypeError(f"{name} has dtype {dense}, must be the sparse matrix' dtype, {dtype}")


def _batch(call: BsrProductArguments, name: str) -> int | None:
    factors = ((call.values, 4), (call.dense, 3))
    batches = [x.shape[0] for x, rank in factors if x.dim() == rank]
    if len(batches) == 2 and batches[0] != batches[1]:
        raise ValueError(f"{name} has batch {batches[1]}, must be that of the values, {batches[0]}")
    return batches[0] if batches else None
