"""Names for score and mask functions, which an operator's schema takes in place of Python functions.

A name says what a function does: it ends in a hash of its source, its closure and what it calls, so that one
name never stands for two functions, also in what torch.compile keeps on disk.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

from kernels_dsl.ops.tracing import constant_result
from kernels_dsl.sparse.torch_masks import traceable
from lowering.constants import Canonicalizer
from lowering.records import frozen

_BY_NAME: dict[str, Callable[..., Any]] = {}


@frozen
class KernelFunction:
    """A score or mask function with its name; made by `kernel_function`, taken in its place anywhere."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def kernel_function(function: Callable[..., Any]) -> KernelFunction:
    """`function`, a `score_mod` or `mask_mod`, in a form that torch.compile can tell from others.

    torch.compile recognises a function by its code alone, which says nothing of what it closes over, nor of
    defaults. So those that have either, and callable objects, must be passed through this, outside of what
    is compiled: `mask_mod = kernel_function(make_mask(3))`. Others work as they are.

    TypeError for a function that closes over something that is no constant (a tensor, a list): pass tensors
    as `aux`.
    """
    if isinstance(function, KernelFunction):
        return function
    if not callable(function):
        raise TypeError(f"function is a {type(function).__name__}, must be callable")
    function = traceable(function) or function
    return KernelFunction(_keep(function), function)


def unwrapped(function: Any) -> Any:
    """The function itself."""
    return function.function if isinstance(function, KernelFunction) else function


@constant_result
def name_of(argument: str, function: Any, compiling: bool) -> str | None:
    """The name of what was passed as `argument`; `compiling`: by code that torch.compile traces. None for a
    function that is as good as none.

    TypeError where torch.compile would take another function for this one.
    """
    plain = isinstance(function, types.FunctionType)
    bound = plain and (function.__closure__ or function.__defaults__ or function.__kwdefaults__)
    if compiling and (bound or not plain):
        reason = "closes over values or has defaults" if plain else f"is a {type(function).__name__}"
        raise TypeError(
            f"{argument} {reason}, must be passed through kernels_dsl.kernel_function, outside of what is "
            "compiled, under torch.compile"
        )
    function = traceable(function)
    return None if function is None else _keep(function)


def function_of(name: str | None) -> Callable[..., Any] | None:
    """The function of a name. RuntimeError where this process has not got it."""
    if name is None:
        return None
    function = _BY_NAME.get(name)
    if function is None:
        found = _import(name)
        if found is None or _keep(found) != name:
            raise RuntimeError(
                f"{name!r} names a score or mask function that this process does not have: call "
                "kernels_dsl.kernel_function on it first, with the same source and closure"
            )
        function = _BY_NAME[name]
    return function


def _keep(function: Callable[..., Any]) -> str:
    """Stores `function`; its name."""
    text = Canonicalizer().text("function", function)
    qualname = getattr(function, "__qualname__", type(function).__name__)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = f"{getattr(function, '__module__', '')}:{qualname}:{digest}"
    if name not in _BY_NAME:
        _BY_NAME[name] = _copy(function) if isinstance(function, types.FunctionType) else function
    return name


def _copy(function: types.FunctionType) -> types.FunctionType:
    """The same function as another object: tracing rewrites the code of a function, which torch.compile
    looks at to see whether it must compile again."""
    code = getattr(function, "_original_code", function.__code__)
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy


def _import(name: str) -> Any:
    """The object that `name` finds in its module; None where there is no such thing."""
    module, qualname, _ = name.split(":", 2)
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found
