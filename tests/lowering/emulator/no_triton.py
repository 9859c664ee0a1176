"""Stand-ins for Triton, a gigabyte that quack imports for kernels that nothing here calls."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

_NAMES = ("triton", "triton.runtime", "triton.runtime.cache", "triton.language")


class _Anything(types.ModuleType):
    """A module that has every name."""

    FileCacheManager = object
    constexpr = object

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: args[0] if args and callable(args[0]) else None


def without_triton() -> None:
    """Put stand-ins in the place of Triton, if it is not installed, for the rest of the process."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    importlib.import_module("torch._inductor.compile_fx")  # which asks for more of it
    for name in _NAMES:
        made = sys.modules[name] = _Anything(name)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, made)
