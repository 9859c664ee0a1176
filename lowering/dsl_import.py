"""Importing the compiler without what it drags along, and mended for Python 3.10."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_origin


@contextmanager
def without_jax() -> Iterator[None]:
    """The first import of ``cutlass`` within this block does not import jax.

    The DSL's ``__init__`` imports jax wherever it is installed, for an integration that nothing here needs;
    a first call would wait for it. It takes an ImportError for "not installed". What is already imported
    stays as it is, and ``import cutlass.jax`` afterwards loads the integration as if nothing had been.
    """
    if "jax" in sys.modules or "cutlass" in sys.modules:
        yield
        _take_generics()
        return
    sys.modules["jax"] = None  # type: ignore[assignment]  # what Python itself writes for "do not import"
    try:
        yield
    finally:
        del sys.modules["jax"]
        for name in list(sys.modules):
            if name == "cutlass.jax" or name.startswith("cutlass.jax."):
                del sys.modules[name]
    _take_generics()


def _take_generics() -> None:
    """Let the DSL check arguments that are annotated with generic types, on Python 3.10.

    It asks ``isinstance(kind, type) and isinstance(argument, kind)``. Where ``tuple[int, int]`` passes for a
    type, the second of these is a TypeError: there the DSL's module gets an ``isinstance`` that
    looks at ``tuple``.
    """
    module: Any = sys.modules.get("cutlass.cutlass_dsl.cutlass")
    if sys.version_info < (3, 11) and module is not None:
        module.isinstance = _isinstance


def _isinstance(value: object, kind: Any) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:
        origin = get_origin(kind)
        if origin is None:
            raise
        return isinstance(value, origin)
