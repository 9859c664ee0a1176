"""Modules of torch that a test dropped: the second import of one registers operators twice, which raises."""

from __future__ import annotations

import sys
import types


def dropped_modules() -> set[str]:
    """The submodules that torch has as attributes while `sys.modules` lacks them."""
    torch = sys.modules.get("torch")
    if torch is None:
        return set()
    parts = (part.__name__ for part in vars(torch).values() if isinstance(part, types.ModuleType))
    return {name for name in parts if name.startswith("torch.")} - set(sys.modules)
