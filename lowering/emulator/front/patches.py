"""Attributes and environment variables that are replaced for a while, and put back in reverse order."""

from __future__ import annotations

import os
from typing import Any

_ABSENT = object()


class Patches:
    """Record of what was replaced, so that `undo` restores it."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module, class or object."""
        self._replaced.append((target, name, vars(target).get(name, _ABSENT)))
        setattr(target, name, value)

    def environment(self, name: str, value: str) -> None:
        """Set an environment variable."""
        self._replaced.append((os.environ, name, os.environ.get(name, _ABSENT)))
        os.environ[name] = value

    def undo(self) -> None:
        """Put everything back."""
        while self._replaced:
            target, name, old = self._replaced.pop()
            if target is os.environ:
                if old is _ABSENT:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = old
            elif old is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, old)
