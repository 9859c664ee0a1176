"""Importing the compiler: one thread at a time, without what it drags along, and mended for Python 3.10."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_origin

from lowering.garbage import no_look_for_garbage

_importing = threading.RLock()


@contextmanager
def without_jax() -> Iterator[None]:
    """The first import of ``cutlass`` within this block does not import jax, and is no other thread's too.

    The DSL's modules import each other in circles: of two threads that import it at once, one finds modules
    that the other has only begun. Whatever may be the first to import it does so in this block.

    The DSL's ``__init__`` imports jax wherever it is installed, for an integration that nothing here needs;
    a first call would wait for it. It takes an ImportError for "not installed". What is already imported
    stays as it is, and ``import cutlass.jax`` afterwards loads the integration as if nothing had been.
    """
    with _importing:
        if "jax" in sys.modules or "cutlass" in sys.modules:
            yield
        else:
            with _no_jax(), no_look_for_garbage():
                yield
        _take_generics()


@contextmanager
def _no_jax() -> Iterator[None]:
    """`import jax` is an ImportError within this block, and afterwards as if it had not been."""
    sys.modules["jax"] = None  # type: ignore[assignment]  # what Python itself writes for "do not import"
    try:
        yield
    finally:
        del sys.modules["jax"]
        for name in list(sys.modules):
            if name == "cutlass.jax" or name.startswith("cutlass.jax."):
                del sys.modules[name]


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
