"""JIT compilation, caching, launching, inspecting and emulating CuTe DSL kernels.

`jit` is the entry; it knows no particular kernel. Importing this package imports neither the compiler nor
torch::

    from lowering import jit

    @jit
    def scale(x: cute.Tensor, y: cute.Tensor, factor: Float32, stream, threads: cutlass.Constexpr):
        scale_kernel(x, y, factor).launch(grid=..., block=(threads, 1, 1), stream=stream)

    scale(x, y, 2.0, threads=128)
"""

from __future__ import annotations

import importlib
from typing import Any

from lowering import arch, cache
from lowering.address import Address
from lowering.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CaptureError,
    CompileError,
    CompileRefused,
    DamagedEntry,
    LinkError,
    LoweringError,
    Untrusted,
)
from lowering.function import JitFunction, jit
from lowering.launch import CompiledKernel

_LAZY = ("bundle", "emulator", "inspect", "recording")

__all__ = [
    "Address",
    "ArgumentTypeError",
    "ArgumentValueError",
    "CaptureError",
    "CompileError",
    "CompileRefused",
    "CompiledKernel",
    "DamagedEntry",
    "JitFunction",
    "LinkError",
    "LoweringError",
    "Untrusted",
    "arch",
    "cache",
    "jit",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"lowering.{name}")
    raise AttributeError(f"module 'lowering' has no attribute {name!r}")
