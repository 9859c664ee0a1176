"""The arguments of `gemm_gated`, and the operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.blocks.epilogue.gates import GATES, GatedEpilogue
from kernels_dsl.checks import options, overlap
from kernels_dsl.checks.eager_path import check_output, refuse_written
from kernels_dsl.config.gemm import WRITTEN
from kernels_dsl.ops import allocate
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.arguments import (
    DenseArguments,
    GemmCall,
    OperandSpec,
    batch_of,
    check_device,
    check_matrices,
    check_out,
    describe_epilogue,
    extents_of,
    result_dtype,
)
from kernels_dsl.ops.gemm.gated_gradient import GatedForBackward
from kernels_dsl.ops.gemm.plan import Plan, build
from kernels_dsl.ops.gemm.recorded import Recorded
from kernels_dsl.ops.operation import Named, Operation
from lowering.records import frozen


@frozen
class GatedArguments(DenseArguments):
    """The arguments of `gemm_gated`."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: str = "swiglu"
    bias_axis: str = "n"
    alpha: float = 1.0
    beta: float = 1.0
    out_dtype: torch.dtype | None = None
    config: Named = None
    family: str | None = None
    batch_invariant: bool = False
    out: torch.Tensor | None = None
    preact_out: torch.Tensor | None = None

    outputs = ("out", "preact_out")
    operands = ("alpha", "beta", "c", "bias", "residual", "preact_out")
    epilogue_args = ()

    def check(self) -> None:
        """TypeError or ValueError for an option that is wrong."""
        options.one_of("activation", self.activation, tuple(GATES))
        product_options.check(self.of_product())
        product_options.check_forced(self.config, self.family, self.configs)

    def of_product(self) -> dict[str, Any]:
        """The arguments of the product z, by name."""
        return {**vars(self), "activation": None}

    def operand_values(self) -> tuple[Any, ...]:
        """The values that `Plan.operands` takes; the last one is left out where it is not given."""
        values = super().operand_values()
        return values if self.preact_out is not None else values[:-1]


def product_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The shape of a @ b. TypeError or ValueError where there is none."""
    check_matrices(a, b)
    batch = batch_of(a, b)
    shape = (a.shape[-2], b.shape[-1])
    return shape if batch is None else (batch, *shape)


def describe(call: GatedArguments) -> GemmCall:
    """Checks the arguments of `gemm_gated` and says what they ask for. TypeError or ValueError says what is
    wrong."""
    a, b, out, preact = call.a, call.b, call.out, call.preact_out
    z_shape = product_shape(a, b)
    m, n, k = extents_of(a, b)
    if n % 2:
        raise ValueError(f"b has {n} columns, must have an even number: gate and up alternate")
    options.one_of("activation", call.activation, tuple(GATES))
    inner, operands = describe_epilogue(z_shape, a.device, call.of_product())
    assert isinstance(inner, LinearEpilogue)
    d_dtype = result_dtype(out, call.out_dtype, a.dtype)
    function = GatedEpilogue(inner, call.activation, preact is not None)
    found = GemmCall(
        m, n, k, batch_of(a, b), a.dtype, d_dtype, function, operands,
        batch_invariant=call.batch_invariant, gated=True,
    )  # fmt: skip
    if out is not None:
        check_out(out, found, a.device)
    if preact is None:
        return found
    _check_preact(preact, z_shape, d_dtype, a.device)
    modes = WRITTEN + "lmn"[3 - len(z_shape) :]
    return replace(found, operands=(*operands, OperandSpec("preact_out", modes)))


def _check_preact(
    preact: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    check_output("preact_out", preact)
    check_device("preact_out", preact, device)
    if tuple(preact.shape) != shape:
        raise ValueError(f"preact_out has shape {tuple(preact.shape)}, must be {shape}")
    if preact.dtype != dtype:
        raise TypeError(f"preact_out has dtype {preact.dtype}, must be the result's, {dtype}")


def check_outputs_apart(call: GatedArguments) -> None:
    """ValueError where an output shares memory with another tensor of the call."""
    written = call.written()
    for name, tensor in written.items():
        if overlap.self_overlaps(tensor):
            raise ValueError(
                f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, must not overlap "
                "itself"
            )
        others = {**call.read(), **written}
        del others[name]
        overlap.check_alone(name, tensor, others)


def _follow(plan: Plan, call: GatedArguments) -> torch.Tensor:
    """The call, after what depends on addresses was looked at."""
    check_outputs_apart(call)
    operands = None if plan.operands is None else plan.operands(call.operand_values())
    return plan.run(call.a, call.b, call.out, operands)


class _Gated(Operation[GatedArguments, Plan]):
    def recorded(self, call: GatedArguments, operator: Callable[[], Any]) -> Recorded:
        """Such calls as nodes of autograd."""
        from kernels_dsl.ops.gemm.nodes import GatedGemm

        refuse_written(call.read().values(), **call.written())
        keywords = {name: getattr(call, name) for name in call.choices}
        dtype = result_dtype(call.out, call.out_dtype, call.a.dtype)
        make = allocate.maker(product_shape(call.a, call.b), dtype, call.a.device)
        plan = self.plan_of(replace(call, preact_out=make()))
        return Recorded(GatedGemm, plan, (), call.likes(), keywords, GatedForBackward, operator, make)


GATED_GEMM = _Gated("gemm_gated", GatedArguments, describe, build, _follow)
