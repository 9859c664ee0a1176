"""Marks that tell torch.compile about this library's functions, without importing torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_result(function: _Function) -> _Function:
    """Mark a function for torch.compile to call while it traces, as `torch.compiler.assume_constant_result`.

    PyTorch's own decorator sets this attribute too, after it has imported all of the compiler, sympy and
    torch.distributed: one to three seconds in a process that may never compile. A test compares the two.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
