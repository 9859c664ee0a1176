"""File locks, where the system has them: `fcntl` is None on Windows.

Without them this project can be imported, and kernels are compiled for the emulator; none is kept on disk.
"""

from __future__ import annotations

import importlib
from typing import Any


def _found() -> Any:
    try:
        return importlib.import_module("fcntl")
    except ImportError:
        return None


fcntl: Any = _found()
