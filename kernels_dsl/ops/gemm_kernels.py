"""The compiled kernels behind `gemm`, by family, named only: the compiler is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lowering
from kernels_dsl.ops.target import Target

_FOLDER = "kernels_dsl.kernels.gemm"
FUNCTIONS = {
    "sm90": lowering.jit(f"{_FOLDER}.entry_sm90:gemm_sm90_entry", name="gemm_sm90"),
    "sm80": lowering.jit(f"{_FOLDER}.entry_sm80:gemm_sm80_entry", name="gemm_sm80"),
    "splitk_reduce": lowering.jit(f"{_FOLDER}.entry_splitk:splitk_reduce_entry", name="splitk_reduce"),
}


def launcher(
    name: str, target: Target, args: tuple[Any, ...], constexprs: dict[str, Any]
) -> Callable[..., Any]:
    """The callable that launches kernel `name` on runtime arguments like `args`, compiled if need be.

    `name` is a key of `FUNCTIONS`. On a GPU this is the bare launch, without the key look-up of the lowering
    layer: the caller keeps it for calls of the same signature. Under the emulator it is the emulated call.
    """
    function = FUNCTIONS[name]
    if target.emulated:
        return lambda *values: function(*values, **constexprs)
    compiled = function.compile(*args, **constexprs)
    if not compiled.launched and torch.cuda.is_current_stream_capturing():
        raise lowering.CaptureError(
            f"{function.name!r} is called for the first time inside a CUDA graph capture, where its code "
            "cannot be loaded: call gemm once with these arguments before the capture (a warm-up)"
        )
    compiled.launched = True
    return compiled.launch
