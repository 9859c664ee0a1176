"""Importing the compiler without what it drags along."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_jax() -> Iterator[None]:
    """The first import of ``cutlass`` within this block does not import jax.

    The DSL's ``__init__`` imports jax wherever it is installed, for an integration that nothing here needs;
    a first call would wait for it. It takes an ImportError for "not installed". What is already imported
    stays as it is, and ``import cutlass.jax`` afterwards loads the integration as if nothing had been.
    """
    if "jax" in sys.modules or "cutlass" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]  # what Python itself writes for "do not import"
    try:
        yield
    finally:
        del sys.modules["jax"]
        for name in list(sys.modules):
            if name == "cutlass.jax" or name.startswith("cutlass.jax."):
                del sys.modules[name]
