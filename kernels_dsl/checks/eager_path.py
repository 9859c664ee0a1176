"""Tensors that kernels can have as they are, calls that can go past PyTorch's dispatcher, and what of them a
plan depends on.

A kernel gets an address, sizes and strides, so a tensor must be what lies in its memory: dense, of no class
of its own, and none that PyTorch negates or conjugates only when it is read. Every operation asks here.
Inputs that are such views are written out (`written_out`), outputs refused (`check_output`), anything else is
no tensor for a kernel (`check_tensor`) or goes to the dispatcher, which does what is right for it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
_FIRST_CAPABILITY = (8, 0)
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_forward_ad = torch.autograd.forward_ad


def runs_kernels(device: torch.device) -> bool:
    """True if kernels make lists on `device`; elsewhere, and where a call is traced, PyTorch does."""
    if device.type != "cuda" or _is_compiling() or _dispatch_modes():
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def check_tensor(name: str, value: object) -> torch.Tensor:
    """`value`; TypeError where it is no dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, must be a torch.Tensor")
    if value.layout != _STRIDED:
        raise TypeError(f"{name} has layout {value.layout}, must be strided (dense)")
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor, must be a dense one")
    return value


def check_memory(named: Mapping[str, Any]) -> None:
    """TypeError for the first tensor, of a call past the dispatcher, whose class sees operators itself: what
    it stands for is not what its memory holds. The dispatcher asks such a class, but not of all arguments."""
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and type(value) not in PLAIN_TYPES and _intercepts(type(value)):
            raise TypeError(f"{name} is a {type(value).__name__}, must be a torch.Tensor of no such class")


def _intercepts(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def written_out(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """The values with negated views as tensors of memory; None where there are none.

    For calls that nothing watches: the dispatcher does the same for those that go through it. Conjugated
    tensors are complex, which no kernel takes.
    """
    if not any(isinstance(value, torch.Tensor) and value.is_neg() for value in values):
        return None
    return tuple([_in_memory(x) if isinstance(x, torch.Tensor) and x.is_neg() else x for x in values])


def _in_memory(negated: torch.Tensor) -> torch.Tensor:
    """A negated view as a tensor of its own elements."""
    if negated.dtype.itemsize == 1 and negated.is_floating_point():  # for which PyTorch has no negation
        return (torch._neg_view(negated).view(torch.uint8) ^ 0x80).view(negated.dtype)
    if negated.dtype == torch.bool:
        raise TypeError("a tensor of torch.bool is a negated view, must be one of numbers")
    return negated.resolve_neg()


def check_output(name: str, value: object) -> torch.Tensor:
    """`value`, which a kernel is to write; TypeError where it is no dense tensor, ValueError where it is not
    what lies in its memory. For a call that something watches the dispatcher copies what is not."""
    tensor = check_tensor(name, value)
    if not watched() and (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()):
        raise ValueError(f"{name} is a view that torch negates lazily, must be a tensor as it is in memory")
    return tensor


def signature(value: Any) -> Any:
    """The part of an argument that a plan depends on: a tensor's layout, and of anything else its type."""
    if value is None:
        return None
    kind = type(value)  # asked first, since isinstance, which asks Tensor's metaclass, takes much longer
    if kind in PLAIN_TYPES or (isinstance(value, torch.Tensor) and not _intercepts(kind)):
        if value.layout is not _STRIDED:
            return kind
        try:
            return value.dtype, value.shape, value.stride(), value.data_ptr() & 15, value.get_device()
        except RuntimeError:  # nested tensors have no shape
            if not value.is_nested:
                raise
    return kind


def plain(values: tuple[Any, ...]) -> bool:
    """True if all tensors among the values can go past the dispatcher."""
    grad = _grad_enabled()
    for value in values:
        if value is None:
            continue
        if type(value) in PLAIN_TYPES:
            if (grad and value.requires_grad) or value.is_neg() or value._is_zerotensor():
                return False
        elif isinstance(value, torch.Tensor):
            return False
    return True


def sharded(values: Iterable[Any]) -> bool:
    """True if one of the values is a DTensor, without importing the class."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in values)


def prepare_sharded(values: Iterable[Any]) -> None:
    """Registers the operators' sharding strategies where one of the values is a DTensor."""
    if not _is_compiling() and sharded(values):
        importlib.import_module("kernels_dsl.distributed.register")


def needs_dispatcher(values: tuple[Any, ...]) -> bool:
    """True if torch.compile, a mode, a transform, autograd or a subclass must see a call as an operator."""
    return watched() or not plain(values)


def only_recorded(values: tuple[Any, ...]) -> bool:
    """Tests that autograd must see the call, and nothing else that the dispatcher calls."""
    if watched() or not asks_gradients(values):
        return False
    with torch.no_grad():
        return plain(values)


def watched() -> bool:
    """The same, but for what the tensors of a call say."""
    return bool(
        _is_compiling()
        or _dispatch_modes()
        or _functorch_level() is not None
        or _forward_ad._current_level >= 0
    )


def asks_gradients(values: Iterable[Any]) -> bool:
    """True if the call of an operator with these arguments would be differentiated."""
    return _grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    )


def refuse_written(values: Iterable[Any], **written: torch.Tensor | None) -> None:
    """ValueError where gradients are asked for and one of the named outputs is given."""
    names = [name for name, tensor in written.items() if tensor is not None]
    if names and asks_gradients((*values, *written.values())):
        raise ValueError(
            f"{names[0]} is given and a tensor requires grad, must not: use torch.no_grad(), or no {names[0]}"
        )


def refuse_forward_mode(operation: str, named: Mapping[str, Any]) -> None:
    """NotImplementedError where an argument has a tangent, of torch.func.jvp or of a dual tensor.

    PyTorch takes an operator without a forward-mode derivative for a constant.
    """
    if torch.compiler.is_compiling() or _forward_ad._current_level < 0:
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
    return _forward_ad.unpack_dual(tensor).tangent is not None
