"""Compiled kernels of the emulator's hottest loops, by numba where it is installed.

`kernels()` gives the module of compiled functions, or None: then the callers run their NumPy code, which is
the reference that the compiled functions agree with bit for bit. `KERNELS_DSL_EMULATE_FAST=0` switches the
compiled functions off, and so does `reference()` for a block.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

VARIABLE = "KERNELS_DSL_EMULATE_FAST"
_loaded: Any = None
_tried = False
_off = 0


def kernels() -> Any:
    """The module of compiled functions; None without numba, or where they are switched off."""
    if _off:
        return None
    return _loaded if _tried else _load()


def _load() -> Any:
    global _loaded, _tried
    if os.environ.get(VARIABLE, "1") != "0" and importlib.util.find_spec("numba") is not None:
        from . import compiled

        _loaded = compiled
    _tried = True
    return _loaded


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """Run the NumPy code in this block, in every thread."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1
