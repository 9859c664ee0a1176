"""Block-sparse products as operations. Their plans are kept with the matrix, or with its pattern."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from kernels_dsl.ops import call_cache, overlap
from kernels_dsl.ops.bsr.arguments import (
    BsrArguments,
    BsrProductArguments,
    BsrScaledArguments,
    MatrixArguments,
    SampledArguments,
    describe,
    describe_sampled,
)
from kernels_dsl.ops.bsr.plan import Plan, build, build_sampled
from kernels_dsl.ops.bsr.tensor import BsrTensor
from kernels_dsl.ops.operation import Operation

Call = TypeVar("Call", bound=MatrixArguments)
Product = TypeVar("Product", bound=BsrProductArguments)
Made = TypeVar("Made")


class MatrixOperation(Operation[Call, Made]):
    """An operation whose plans are kept with a matrix."""

    most_plans = 256  # of one matrix

    def calls_of(self, call: Call) -> dict[Any, Any]:
        """The call cache of such calls."""
        return call.plans

    plans_of = calls_of


class BsrProduct(MatrixOperation[Product, Plan]):
    """A product with a sparse factor."""

    def __init__(self, name: str, record: type[Product]) -> None:
        super().__init__(name, record, describe, build, _follow)

    def call_of(self, **arguments: Any) -> Product:
        """The record of arguments by name, the matrix as `sparse`."""
        sparse: BsrTensor = arguments.pop("sparse")
        return super().call_of(
            crow=sparse.crow_indices, col=sparse.col_indices, values=sparse.values, shape=sparse.shape,
            transposed=sparse.transposed, **arguments,
        )  # fmt: skip


def _follow(plan: Plan, call: BsrProductArguments) -> torch.Tensor:
    """The call, after what depends on addresses was looked at."""
    if call.out is not None:
        tensors = {name: x for name, x in call.read().items() if isinstance(x, torch.Tensor)}
        epilogue = ("c", "bias", "residual", "epilogue_args[")
        operands = {name: tensors.pop(name) for name in list(tensors) if name.startswith(epilogue)}
        overlap.check_alone("out", call.out, tensors)
        overlap.check_overlap(call.out, operands)
    given = None if plan.operands is None else plan.operands(call.operand_values())
    return plan.run(call.values, call.dense, call.out, given)


def repeated_sampled(calls: dict[Any, Any], key: Any, factors: tuple[Any, ...], alpha: float) -> Any:
    """The values of a sampled product like an earlier one; None where there was none."""
    plan = call_cache.find(calls, key, factors)
    if plan is None:
        return None
    try:
        return plan(*factors, None if alpha == 1.0 else (alpha,))
    except ValueError as error:
        call_cache.refused(calls, key, error)
    return None


def _follow_sampled(plan: Any, call: SampledArguments) -> torch.Tensor:
    result: torch.Tensor = plan(call.a, call.b, None if call.alpha == 1.0 else (float(call.alpha),))
    return result


BSR_GEMM = BsrProduct("bsr_gemm", BsrArguments)
BSR_SCALED_GEMM = BsrProduct("bsr_scaled_gemm", BsrScaledArguments)
BSR_SDDMM: MatrixOperation[SampledArguments, Any] = MatrixOperation(
    "bsr_sddmm", SampledArguments, describe_sampled, build_sampled, _follow_sampled
)
