"""Refusals of derivatives that do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad


def asks_gradients(values: Iterable[Any]) -> bool:
    """Whether the call of an operator with these arguments would be differentiated."""
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    )


def refuse_written(values: Iterable[Any], **written: torch.Tensor | None) -> None:
    """ValueError where gradients are asked for and one of the named outputs is given."""
    given = [name for name, tensor in written.items() if tensor is not None]
    if given and asks_gradients((*values, *written.values())):
        raise ValueError(
            f"{given[0]} is given and a tensor requires grad, must not: use torch.no_grad(), or no {given[0]}"
        )


def refuse_forward_mode(operation: str, named: Mapping[str, Any]) -> None:
    """NotImplementedError where an argument has a tangent, of torch.func.jvp or of a dual tensor.

    PyTorch takes an operator without a forward-mode derivative for a constant.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and _has_tangent(value):
            raise NotImplementedError(
                f"{name} has a tangent, must have none: {operation} has no forward-mode derivative"
            )


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Also where it cannot be told: in a transform that torch.func.jvp has around it."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor):
        level = functorch.peek_interpreter_stack()
        if level is None or level.key() != functorch.TransformType.Jvp:
            return True
    return forward_ad.unpack_dual(tensor).tangent is not None
