"""The arguments of `gemm_reduce`, and the operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.blocks.reduce.reductions import REDUCTIONS
from kernels_dsl.checks import options, overlap
from kernels_dsl.checks.eager_path import asks_gradients, check_output
from kernels_dsl.config.gemm import PARTIALS
from kernels_dsl.config.reductions import CallReduction
from kernels_dsl.ops.gemm import arguments as gemm_arguments
from kernels_dsl.ops.gemm.arguments import GemmArguments, GemmCall, OperandSpec, check_device
from kernels_dsl.ops.gemm.plan import Plan
from kernels_dsl.ops.gemm.product import check_out_apart
from kernels_dsl.ops.gemm.reduced_plan import build, reduced_shape
from kernels_dsl.ops.operation import Operation
from lowering.records import NamedTuple, frozen

_DIMS = (-1, -2)


class Reduced(NamedTuple):
    """A product, and a float32 number for each of its rows or columns."""

    out: torch.Tensor
    reduced: torch.Tensor


@frozen
class ReducedArguments(GemmArguments):
    """The arguments of `gemm_reduce`."""

    reduce: str = "sum"
    dim: int = -1
    reduced_out: torch.Tensor | None = None

    outputs = ("out", "reduced_out")
    operands = ("alpha", "beta", "c", "bias", "residual", "reduced_out")

    def check(self) -> None:
        """TypeError or ValueError for an option that is wrong."""
        super().check()
        self.check_reduction()

    def check_reduction(self) -> None:
        """The same of `reduce` and `dim`."""
        options.one_of("reduce", self.reduce, tuple(REDUCTIONS))
        if options.integer("dim", self.dim) not in _DIMS:
            raise ValueError(f"dim is {self.dim}, must be -1 (a number a row) or -2 (a number a column)")

    def refuse_gradients(self) -> None:
        """ValueError where gradients are asked for that do not exist."""
        if REDUCTIONS[self.reduce].backward is None and asks_gradients(
            (*self.read().values(), *self.written().values())
        ):
            known = ", ".join(repr(name) for name, row in REDUCTIONS.items() if row.backward is not None)
            raise ValueError(
                f"reduce is {self.reduce!r} and an input requires grad, must be one with a derivative: "
                f"{known}; or use torch.no_grad()"
            )
        super().refuse_gradients()


def describe(call: ReducedArguments) -> GemmCall:
    """Checks the arguments of `gemm_reduce` and says what they ask for. TypeError or ValueError says what is
    wrong."""
    call.check_reduction()
    found = gemm_arguments.describe(call)
    reduction = CallReduction(call.reduce, call.dim)
    if REDUCTIONS[call.reduce].identity is None and found.d_shape[call.dim] == 0:
        raise ValueError(
            f"reduce is {call.reduce!r} and the result has shape {found.d_shape}, must have elements along "
            f"dim {call.dim}"
        )
    spec = OperandSpec("reduced_out", PARTIALS)
    found = replace(found, operands=(*found.operands, spec), reduction=reduction)
    if call.reduced_out is not None:
        _check_reduced_out(call.reduced_out, reduced_shape(found), call.a.device)
    return found


def _check_reduced_out(tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    check_output("reduced_out", tensor)
    check_device("reduced_out", tensor, device)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"reduced_out has shape {tuple(tensor.shape)}, must be {shape}")
    if tensor.dtype != torch.float32:
        raise TypeError(f"reduced_out has dtype {tensor.dtype}, must be torch.float32")
    if overlap.self_overlaps(tensor):
        raise ValueError(
            f"reduced_out has strides {tensor.stride()} for shape {shape}, must not overlap itself"
        )


def check_outputs_apart(call: ReducedArguments) -> None:
    """ValueError where an output shares memory with another tensor of the call; out may be c or residual."""
    if call.out is not None:
        check_out_apart(call)
    if call.reduced_out is not None:
        others = {**call.read(), **call.written()}
        overlap.check_alone("reduced_out", others.pop("reduced_out"), others)


def _follow(plan: Plan, call: ReducedArguments) -> Any:
    """The call, after what depends on addresses was looked at."""
    check_outputs_apart(call)
    assert plan.operands is not None
    return Reduced(*plan.run(call.a, call.b, call.out, plan.operands(call.operand_values())))


GEMM_REDUCE: Operation[ReducedArguments, Plan] = Operation(
    "gemm_reduce", ReducedArguments, describe, build, _follow
)
