"""Compilation of functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def jit(function: Callable) -> Callable:
    """Compile at the first call, and keep the machine code on disk where numba finds a folder to write to.

    That is `__pycache__` beside the source, else the user's cache folder, or `NUMBA_CACHE_DIR`. Several
    processes may write there at a time. Where there is none, each process compiles for itself.
    """
    import numba

    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)
    _depend_on_all(compiled)
    return compiled


def _depend_on_all(compiled: Callable) -> None:
    """Let what is kept count only while every file of this folder is as it was.

    numba looks at the file of the function alone, and functions here call those of other files.
    """
    kept = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if kept is not None:
        files = sorted(Path(__file__).parent.glob("*.py"))
        kept._source_stamp = [(path.name, path.stat().st_mtime, path.stat().st_size) for path in files]
