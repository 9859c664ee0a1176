"""Products with a block-sparse factor as operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from kernels_dsl.checks import overlap
from kernels_dsl.checks.eager_path import refuse_written
from kernels_dsl.ops.bsr.arguments import (
    BsrArguments,
    BsrProductArguments,
    describe,
)
from kernels_dsl.ops.bsr.matrix_operation import MatrixOperation
from kernels_dsl.ops.bsr.plan import Plan, build
from kernels_dsl.ops.gemm.recorded import Recorded
from kernels_dsl.ops.gemm.repeated import repeated, tensors_among, weight
from kernels_dsl.sparse.tensor import BsrTensor, unchecked

Product = TypeVar("Product", bound=BsrProductArguments)


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
    values = None if plan.operands is None else plan.operands(call.operand_values())
    return plan.run(call.values, call.dense, call.out, values)


class _BsrGemm(BsrProduct[BsrArguments]):
    def recorded(self, call: BsrArguments, operator: Callable[[], Any]) -> Recorded:
        """Such calls as nodes of autograd."""
        from kernels_dsl.ops.bsr.node import BsrGemm, factors_of_bsr

        call.refuse_gradients()
        refuse_written(call.read().values(), out=call.out)
        keywords = {name: getattr(call, name) for name in call.choices}
        indices = (call.crow, call.col)
        return Recorded(
            BsrGemm, self.plan_of(call), indices, call.likes(), keywords, _ForBackward, operator,
            factors=partial(factors_of_bsr, self),
        )  # fmt: skip


class _ForBackward:
    """Products of a backward pass that nothing watches, by the operators' names. `calls`: what the matrix
    keeps."""

    def __init__(self, calls: dict[Any, Any]) -> None:
        self._calls = calls

    def bsr_gemm(
        self,
        crow: torch.Tensor,
        col: torch.Tensor,
        values: torch.Tensor,
        dense: torch.Tensor,
        c: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        shape: tuple[int, int],
        alpha: float = 1.0,
        beta: float = 1.0,
        **others: Any,
    ) -> torch.Tensor:
        """As the operator."""
        extras = () if c is bias is None else (c, bias, None)
        one = weight(alpha, 1.0) if alpha != 1.0 else True
        zero = weight(beta, 0.0) if c is not None else None
        key = (dense.shape, "for backward", one, zero, *others.items(), *map(type, extras))
        tensors = (values, dense, *tensors_among(extras))
        result = repeated(self._calls, key, tensors, None, alpha, beta, extras)
        if result is not None:
            return result
        matrix = unchecked((crow, col, values), (shape, others["transposed"]), self._calls)
        call = BsrArguments(
            crow, col, values, dense, c, bias, shape=shape, alpha=alpha, beta=beta, matrix=matrix, **others
        )
        product: torch.Tensor = BSR_GEMM.first_below(call, key, tensors)
        return product

    def bsr_sddmm(
        self,
        crow: torch.Tensor,
        col: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        shape: tuple[int, int],
        block: list[int],
        alpha: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """As the operator."""
        from kernels_dsl.ops.bsr.sampled_product import BSR_SDDMM, SampledArguments, repeated_sampled

        key = ("for backward", a.shape, b.shape, alpha, out_dtype)
        result = repeated_sampled(self._calls, key, (a, b), alpha)
        if result is None:
            matrix = unchecked((crow, col, a.new_empty(0)), (shape, False), self._calls)
            call = SampledArguments(
                crow, col, a, b, shape, (block[0], block[1]), alpha=alpha, out_dtype=out_dtype, matrix=matrix
            )
            result = BSR_SDDMM.first_below(call, key, (a, b))
        values: torch.Tensor = result
        return values


BSR_GEMM = _BsrGemm("bsr_gemm", BsrArguments)
