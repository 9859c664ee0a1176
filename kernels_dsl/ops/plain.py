"""Which tensors can go past PyTorch's dispatcher, and what of them a plan depends on."""

from __future__ import annotations

from typing import Any

import torch

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_forward_ad = torch.autograd.forward_ad


def signature(value: Any) -> Any:
    """What of an argument a plan depends on: a tensor's layout, and of anything else its type."""
    if value is None:
        return None
    kind = type(value)  # asked first, since isinstance, which asks Tensor's metaclass, takes much longer
    if (kind in PLAIN_TYPES or isinstance(value, torch.Tensor)) and value.layout is _STRIDED:
        return value.dtype, value.shape, value.stride(), value.data_ptr() & 15, value.get_device()
    return kind


def plain(values: tuple[Any, ...]) -> bool:
    """Whether all tensors among the values can go past the dispatcher."""
    grad = _grad_enabled()
    for value in values:
        if value is None:
            continue
        if type(value) in PLAIN_TYPES:
            if (grad and value.requires_grad) or value.is_neg():
                return False
        elif isinstance(value, torch.Tensor):
            return False
    return True


def needs_dispatcher(values: tuple[Any, ...]) -> bool:
    """Whether torch.compile, a mode, a transform, autograd or a subclass must see a call as an operator."""
    return watched() or not plain(values)


def watched() -> bool:
    """The same, but for what the tensors of a call say."""
    return bool(
        _is_compiling()
        or _dispatch_modes()
        or _functorch_level() is not None
        or _forward_ad._current_level >= 0
    )
