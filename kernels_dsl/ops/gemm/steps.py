"""The steps from a call's arguments to what a product's kernel takes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.layout import MatrixLayout, padded_strides
from kernels_dsl.config.gemm import MAXIMUM, NUMBER
from kernels_dsl.ops import allocate
from kernels_dsl.ops.gemm.arguments import OperandSpec
from kernels_dsl.ops.launch import address_of
from kernels_dsl.ops.target import Target

Operands = tuple[Any, ...] | None  # None where the epilogue has none
Step = Callable[[torch.Tensor], torch.Tensor]


def restrided(strides: tuple[int, ...] | None) -> Step | None:
    """The step to a view with these strides; None for nothing."""
    if strides is None:
        return None
    return lambda tensor: tensor.as_strided(tensor.shape, strides)


def preparation(
    tensor: torch.Tensor, layout: MatrixLayout, copy: str | None, batch: int | None
) -> Step | None:
    """The step that prepares a or b for the launch; None for nothing."""
    shared = tensor.dim() == 3 and batch != 1 and (tensor.shape[0] == 1 or tensor.stride(0) == 0)
    # One matrix for all batches: its copy is one matrix too, and a batch of 1 has no stride to rely on.
    drop_batch = shared and (copy is not None or tensor.shape[0] == 1)
    if copy is None:
        strides = layout.strides if layout.strides is None or not drop_batch else layout.strides[1:]
        view = restrided(strides)
        if not drop_batch:
            return view
        return (lambda x: x[0]) if view is None else (lambda x: view(x[0]))
    shape = tuple(tensor.shape[1:] if drop_batch else tensor.shape)
    strides = padded_strides(shape, copy, tensor.element_size())
    make = allocate.pitched_maker(shape, strides, tensor.dtype, tensor.device)

    def copied(x: torch.Tensor) -> torch.Tensor:
        return make().copy_(x[0] if drop_batch else x)

    return copied


def operand_maker(
    specs: tuple[OperandSpec, ...], order: tuple[str, ...], target: Target
) -> Callable[[tuple[Any, ...]], Operands] | None:
    """`operands(values)`: what a kernel takes of values in `order`, behind which come those of
    `epilogue_args`; None where it takes none."""
    if not specs:
        return None
    order = (*order, "epilogue_args")
    places = [order.index(spec.source) + spec.index for spec in specs]
    steps = [_operand_step(spec, target) for spec in specs]
    if not any(steps):
        if len(places) > 1:
            return operator.itemgetter(*places)  # the quickest way to pick values of a tuple
        return lambda values: (values[places[0]],)
    both = list(zip(places, steps))
    return lambda values: tuple([values[at] if step is None else step(values[at]) for at, step in both])


def _operand_step(spec: OperandSpec, target: Target) -> Callable[[Any], Any] | None:
    """The step from an argument to the operand; None for nothing."""
    if not spec.modes:
        return float if spec.source == "epilogue_args" else None  # an int would be another signature
    if spec.modes in (NUMBER, MAXIMUM):
        return address_of(target)
    return None if spec.expand is None else operator.methodcaller("expand", spec.expand)
