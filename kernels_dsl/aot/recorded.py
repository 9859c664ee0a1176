"""Calls that are recorded in place of run: the kernels that they would launch, with the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import lowering
from lowering import recording


class Kernel(NamedTuple):
    """A kernel: `function.compile(*args, arch=..., **constants)` compiles it, without a GPU."""

    name: str
    function: lowering.JitFunction
    args: tuple[Any, ...]
    constants: dict[str, Any]


def recorded(arch: str, call: Callable[[], object]) -> list[recording.RecordedCall]:
    """The launches that a call on CPU tensors would make if they were on a GPU of `arch`."""
    with torch.no_grad(), recording.record(arch) as calls:
        call()
    return calls


def kernel_of(name: str, call: recording.RecordedCall) -> Kernel:
    """A recorded call's kernel, with tensors that take no memory."""
    return Kernel(name, call.function, _without_memory(call.args), call.constants)


def _without_memory(value: Any) -> Any:
    """A tensor, or those in a tuple, on the meta device, at an aligned address; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return tuple(map(_without_memory, value)) if type(value) is tuple else value
