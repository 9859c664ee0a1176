"""The gradient of a gated product's z, from a z that was kept: an operation of backward passes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.ops import allocate, call_cache
from kernels_dsl.ops.gemm import kernels as gemm_kernels
from kernels_dsl.ops.gemm.product import ForBackward
from kernels_dsl.ops.operation import Arguments, Operation
from kernels_dsl.ops.target import Target
from lowering.records import frozen

_MOST = 2**31 - 1
"""Elements of z: threads count them with 32 bits."""
_VECTOR_BYTES = 16

Plan = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@frozen
class GateGradientArguments(Arguments):
    """gradient (…, N / 2) of the result, z (…, N) as it was kept, dtype: of the gradient of z."""

    gradient: torch.Tensor
    z: torch.Tensor
    activation: str
    dtype: torch.dtype

    outputs = ()
    leading = "z"


def _build(_described: Any, call: GateGradientArguments, target: Target) -> Plan:
    z, dtype = call.z, call.dtype
    make = allocate.maker(tuple(z.shape), dtype, z.device)
    if z.numel() == 0:
        return lambda _gradient, _z: make()
    vector = _VECTOR_BYTES // max(z.element_size(), dtype.itemsize) // 2
    early = target.device.capability >= (9, 0)
    constexprs = {"activation": call.activation, "vector": vector, "early": early}
    launch: Callable[..., Any] | None = None

    def run(gradient: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        nonlocal launch
        d_z = make()
        if not gradient.is_contiguous() or gradient.data_ptr() % _VECTOR_BYTES:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        tensors = gradient.view(-1), z.view(-1), d_z.view(-1)
        if launch is None:
            launch, _ = gemm_kernels.launcher("gate_gradient", target, tensors, constexprs)
        launch(*tensors)
        return d_z

    return run


def _follow(plan: Plan, call: GateGradientArguments) -> torch.Tensor:
    return plan(call.gradient, call.z)


GATE_GRADIENT = Operation("gate_gradient", GateGradientArguments, lambda _call: None, _build, _follow)


def gate_gradient(
    gradient: torch.Tensor, z: torch.Tensor, activation: str, dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of z (…, N), of `dtype`, from that of the gated result, (…, N / 2) of any strides.

    z: dense, at an address that is a multiple of 16, as a forward pass allocates it. By one kernel, or by
    PyTorch's operations for what it cannot count.
    """
    if z.numel() > _MOST:
        return GATES[activation].backward(gradient.float(), z.float()).to(dtype)
    key = (z.shape, activation, dtype)
    plan = call_cache.find(GATE_GRADIENT.calls, key, (gradient, z))
    if plan is not None:
        found: torch.Tensor = plan(gradient, z)
        return found
    call = GateGradientArguments(gradient, z, activation, dtype)
    first: torch.Tensor = GATE_GRADIENT.first_below(call, key, (gradient, z))
    return first


class GatedForBackward(ForBackward):
    """The products of the backward pass of `gemm_gated`, and what comes before them."""

    gate_gradient = staticmethod(gate_gradient)
