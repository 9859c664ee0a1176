"""Warps that compiled code has run since Python code last looked at their state.

Most of the time nobody does: the state stays in the warp's row of numbers, and comes to the Python object
when an attribute that depends on it is first read or written. Until then the object is of a class in which
these attributes are properties, so that no reader can see what they were before.
"""

from __future__ import annotations

from typing import Any

from .state import Warp

HELD = (
    "began", "cluster_target", "did", "fc", "frames", "gave_up", "known", "lane_touches", "lanes", "passed",
    "reached", "released", "suspended", "vc",
)  # fmt: skip
"""Attributes whose values compiled code changes, in the row or by what the row has for later."""


def _held(name: str) -> property:
    """A property that brings the warp's state back first."""

    def get(warp: Warp) -> Any:
        come_back(warp)
        return getattr(warp, name)

    def put(warp: Warp, value: Any) -> None:
        come_back(warp)
        setattr(warp, name, value)

    def delete(warp: Warp) -> None:
        come_back(warp)
        delattr(warp, name)

    return property(get, put, delete)


_Away: Any = type("_Away", (Warp,), {name: _held(name) for name in HELD})


def go(warp: Warp) -> None:
    """Compiled code has run a warp, whose state lies in its row now."""
    warp.__class__ = _Away


def come_back(warp: Warp) -> None:
    """Bring a warp's state back from its row."""
    warp.__class__ = Warp
    warp.machine.runner.pull(warp)
