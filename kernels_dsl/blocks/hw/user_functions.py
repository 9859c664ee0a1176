"""Calls of users' functions while a kernel is traced: epilogues, score and mask functions.

Such a function runs once, on values that stand for those of each thread. An operation that needs an actual
value, such as a branch, has none: it is an error that names the function and its line (`traced_values`).

This module imports the compiler only where a function is traced.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from typing import Any

_BRANCHES = ("DYNAMIC_TO_STATIC_BOOL", "Unsupported DSL type: vector")
"""Messages of the DSL for a missing truth value: of a number, and of a vector in a rewritten function."""
_ESCAPES = r"\x1b\[[0-9;]*m"
_OURS = frozenset({"kernels_dsl", "cutlass"})
"""Packages whose frames are not the user's."""


class UserFunctionError(TypeError):
    """A caller's function for a kernel cannot be traced."""


def call_epilogue(epilogue: Callable[..., Any], acc: Any, operands: tuple[Any, ...]) -> Any:
    """Calls a user's epilogue. UserFunctionError unless it returns a value for each element."""
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
    """Calls a user's function(*values), `argument` "mask_mod" or a function of scores. UserFunctionError
    unless it returns true or false, or a number."""
    from cutlass import Numeric

    value = _called(argument, function, values)
    if not isinstance(value, (Numeric, bool, int, float)):
        raise UserFunctionError(
            f"{_named(argument, function)} returns {_shown(value)}, must return "
            + ("true or false" if argument == "mask_mod" else "a number")
        )
    return value


def _called(argument: str, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    from kernels_dsl.blocks.hw.traced_values import guarded

    try:
        with guarded():
            return function(*values)
    except UserFunctionError:
        raise
    except Exception as error:
        raise UserFunctionError(
            f"{_named(argument, function)} cannot be traced: {_reason(error)}, at {_place(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """The cause of an error, and the remedy."""
    from kernels_dsl.blocks.hw.traced_values import FloatLost, NeedsValue

    text = re.sub(_ESCAPES, "", str(error))
    if isinstance(error, NeedsValue) or any(sign in text for sign in _BRANCHES):
        return (
            "it branches on a traced value (if, and, or, not, while, for, min, max …), must choose with "
            "cute.where(condition, x, y), of vectors, or cutlass.select_(condition, x, y), of numbers, and "
            "join conditions by & and |"
        )
    if isinstance(error, FloatLost):
        return (
            f"it combines an untyped integer with a float, {error}; must give the integer x a type by "
            "cutlass.Int32(x), or write cutlass.select_(condition, x, y) or cutlass.max(x, y) in full"
        )
    if type(error).__name__.startswith("DSL"):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"{lines[0] if lines else 'the DSL says no more'} (its arguments are traced values)"
    return (
        f"{type(error).__name__}: {error} (its arguments are traced values, must be used by operators, "
        "cute.where and cute.math, not by functions of torch, numpy or math)"
    )


def _place(error: BaseException) -> str:
    """The place in the user's code that raised an error; "its call" if it cannot be determined."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").split(".")[0] not in _OURS:
            return f"{frame.f_code.co_filename}:{line}"
    return "its call"


def _named(argument: str, function: Callable[..., Any]) -> str:
    """The argument with its function's name and place."""
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{argument} {name}{place}"


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
