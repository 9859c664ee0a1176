"""From a function of the lowering layer to a bare launch, compiled at the first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch

import lowering
from kernels_dsl.ops.target import Target

KernelArgument: TypeAlias = torch.Tensor | lowering.Address | float | tuple[Any, ...] | None


def launcher_of(
    function: lowering.JitFunction, target: Target, args: tuple[Any, ...], constexprs: dict[str, Any]
) -> tuple[Callable[..., Any], lowering.CompiledKernel | None]:
    """The callable that launches `function` on runtime arguments like `args`, compiled if need be.

    On a GPU this is the bare launch, without the key look-up of the lowering layer: the caller keeps it for
    calls of the same signature. Under the emulator it is the emulated call. The second value is the compiled
    kernel, None under the emulator. CaptureError where this would be a kernel's first launch, in a capture;
    TypeError where a user's function cannot be traced.
    """
    if target.emulated:
        from lowering.kept import emulated_launch

        return _users_errors()(emulated_launch(function, args, constexprs)), None
    with _users_errors():
        compiled = function.compile(*args, **constexprs)
    if not compiled.launched and torch.cuda.is_current_stream_capturing():
        raise lowering.CaptureError(
            f"{function.name!r} is called for the first time inside a CUDA graph capture, where its code "
            "cannot be loaded: make this call once before the capture (a warm-up)"
        )
    compiled.launched = True
    return compiled.launch, compiled


@contextmanager
def _users_errors() -> Iterator[None]:
    """Raises an error in a user's function as one of its own, not of the compile that traced it."""
    try:
        yield
    except lowering.CompileError as error:
        from kernels_dsl.blocks.hw.user_functions import UserFunctionError

        if isinstance(error.__cause__, UserFunctionError):
            raise error.__cause__ from error.__cause__.__cause__
        raise


def address_of(target: Target) -> Callable[[torch.Tensor], int]:
    """The function that gives a kernel the address of a tensor. The emulator must know which memory is behind
    a number."""
    return lowering.Address if target.emulated else torch.Tensor.data_ptr


class Launch:
    """Launches `function` on `target`; compiles it at the first call, for arguments of one signature."""

    def __init__(self, function: lowering.JitFunction, target: Target, constexprs: dict[str, Any]) -> None:
        self.function = function
        self.target = target
        self.constexprs = constexprs
        self._kernel: Callable[..., Any] | None = None

    def __call__(self, *args: KernelArgument) -> None:
        if self._kernel is None:
            index = self.target.index
            several = index >= 0 and torch.cuda.device_count() > 1
            with torch.cuda.device(index) if several else nullcontext():
                self._kernel, _ = launcher_of(self.function, self.target, args, self.constexprs)
        self._kernel(*args)  # on the tensors' device, whichever is the current one

    def direct(self) -> Callable[..., Any] | None:
        """The bare launch for calls like the first one; None before it, and in the emulator, which looks at
        each call."""
        return None if self.target.emulated else self._kernel
