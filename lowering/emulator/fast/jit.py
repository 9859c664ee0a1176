"""Compilation of functions."""

from __future__ import annotations

from collections.abc import Callable


def jit(function: Callable) -> Callable:
    """Compile at the first call, and keep the machine code on disk where numba finds a folder to write to.

    That is `__pycache__` beside the source, else the user's cache folder, or `NUMBA_CACHE_DIR`. Several
    processes may write there at a time. Where there is none, each process compiles for itself.
    """
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)
