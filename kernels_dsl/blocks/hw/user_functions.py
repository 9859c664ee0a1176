"""Calls of users' functions while a kernel is traced: epilogues, score and mask functions.

Such a function runs once, on values that stand for what each thread will have. What needs a value itself,
such as a branch, has none to go by: it is an error, which names the function and its line. Without these
checks a traced vector is true as any Python object is, so that one branch would be compiled for all elements.

This module imports the compiler only where a function is traced.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_BRANCHES = ("DYNAMIC_TO_STATIC_BOOL", "Unsupported DSL type: vector")
"""Words of the DSL where it needs a truth: of a number, and of a vector in a function that it rewrites."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_OURS = frozenset({"kernels_dsl", "cutlass"})
"""Packages whose frames are not a user's."""


class UserFunctionError(TypeError):
    """A function that a caller gave for a kernel cannot be traced."""


class _NeedsValue(Exception):
    """Something asked for what a traced vector does not have."""


def call_epilogue(epilogue: Callable[..., Any], acc: Any, operands: tuple[Any, ...]) -> Any:
    """epilogue(acc, *operands) of a user's function. UserFunctionError where it is none of elements."""
    import cutlass.cute as cute

    if not isinstance(acc, cute.TensorSSA):  # a model of the kernels, on PyTorch's tensors
        return epilogue(acc, *operands)
    value = _called("epilogue", epilogue, (acc, *operands))
    if not isinstance(value, cute.TensorSSA):
        raise UserFunctionError(
            f"{_named('epilogue', epilogue)} returns {_shown(value)}, must return a value for each "
            "element of the accumulator (cute.full_like(acc, x) for a number x)"
        )
    if cute.size(value.shape) != cute.size(acc.shape):
        raise UserFunctionError(
            f"{_named('epilogue', epilogue)} returns values of shape {value.shape}, must be of the "
            f"accumulator's, {acc.shape}"
        )
    return value


def call_of_score(argument: str, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    """function(*values) of a user's `argument`, "score_mod" or "mask_mod". UserFunctionError where that is no
    number, or true or false."""
    from cutlass import Numeric

    value = _called(argument, function, values)
    if not isinstance(value, (Numeric, bool, int, float)):
        raise UserFunctionError(
            f"{_named(argument, function)} returns {_shown(value)}, must return "
            + ("a number" if argument == "score_mod" else "true or false")
        )
    return value


def _called(argument: str, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    try:
        with _values_refused():
            return function(*values)
    except UserFunctionError:
        raise
    except Exception as error:
        raise UserFunctionError(
            f"{_named(argument, function)} cannot be traced: {_reason(error)}, at {_place(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """The cause, and what to do instead."""
    text = _ESCAPES.sub("", str(error))
    if isinstance(error, _NeedsValue) or any(sign in text for sign in _BRANCHES):
        return (
            "it branches on a traced value (if, and, or, not, while, for, min, max …), must choose with "
            "cute.where(condition, x, y), of vectors, or cutlass.select_(condition, x, y), of numbers, and "
            "join conditions by & and |"
        )
    if type(error).__name__.startswith("DSL"):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"{lines[0] if lines else 'the DSL says no more'} (its arguments are traced values)"
    return (
        f"{type(error).__name__}: {error} (its arguments are traced values, must be used by operators, "
        "cute.where and cute.math, not by functions of torch, numpy or math)"
    )


def _place(error: BaseException) -> str:
    """The place in the user's code that an error came from; the call of it where that cannot be said."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").split(".")[0] not in _OURS:
            return f"{frame.f_code.co_filename}:{line}"
    return "its call"


def _named(argument: str, function: Callable[..., Any]) -> str:
    """The argument with its function's name and place."""
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{argument} {name}{where}"


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _refuse(*_: Any) -> NoReturn:
    raise _NeedsValue


@contextlib.contextmanager
def _values_refused() -> Iterator[None]:
    """Inside of it a traced vector has no truth, and nothing that Python could iterate over.

    The DSL's class has neither method: an object without the first is true, and one with elements but without
    the second never ends. Compiles run one at a time, so the class is changed for no one else.
    """
    import cutlass.cute as cute

    kind: Any = cute.TensorSSA
    added = [name for name in ("__bool__", "__iter__") if not hasattr(kind, name)]
    for name in added:
        setattr(kind, name, _refuse)
    try:
        yield
    finally:
        for name in added:
            delattr(kind, name)
