"""Guards around a user's function while it is traced: silent mistakes of the DSL's values become errors.

A traced vector is true like any Python object, so one branch would be compiled for all elements. An untyped
value (`ArithValue`) converts a Python number to its own type: an integer times 0.1 is an integer times 0.
`cutlass.select_` returns such values; in a user's function its result has its operands' type.
Compiles run one at a time, so nobody else sees the changes.

This module imports the compiler only where a function is traced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
_OPERATORS = [f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r")]
_OPERATORS += [f"__{name}__" for name in _COMPARISONS]


class NeedsValue(Exception):
    """An operation needs a value that a traced vector does not have."""


class FloatLost(Exception):
    """An integer without a type would round a float."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Refuses truth values and iterations of vectors and rounded floats; gives `cutlass.select_` types."""
    import cutlass
    import cutlass.cute as cute
    from cutlass._mlir_helpers.arith import ArithValue

    with contextlib.ExitStack() as changes:
        # Without __bool__ any object is true, without __iter__ an iteration never ends.
        for name in ("__bool__", "__iter__"):
            if not hasattr(cute.TensorSSA, name):
                changes.enter_context(_changed(cute.TensorSSA, name, _refuse))
        for name in _OPERATORS:
            changes.enter_context(_changed(ArithValue, name, _keeps_floats(getattr(ArithValue, name))))
        changes.enter_context(_changed(cutlass, "select_", _typed_select(cutlass.select_)))
        yield


@contextlib.contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute for the time of a block."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _refuse(*_: object) -> NoReturn:
    raise NeedsValue


def _keeps_floats(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of `ArithValue` that refuses a Python float where the value is an integer."""

    @functools.wraps(operator)
    def checked(self: Any, other: Any, **options: Any) -> Any:
        if isinstance(other, float) and not self.is_float:
            raise FloatLost(f"which would round {other} to an integer")
        return operator(self, other, **options)

    return checked


def _typed_select(select: Callable[..., Any]) -> Callable[..., Any]:
    """`cutlass.select_` with a result of its operands' type."""
    from cutlass import Numeric, as_numeric

    @functools.wraps(select)
    def typed(cond: Any, if_value: Any, else_value: Any) -> Any:
        result = select(cond, if_value, else_value)
        kinds = {type(value) for value in (if_value, else_value) if isinstance(value, Numeric)}
        return kinds.pop()(result) if len(kinds) == 1 else as_numeric(result)

    return typed
