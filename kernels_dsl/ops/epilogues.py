"""Names for users' own epilogue functions, so that they can pass through torch.compile and the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels_dsl.checks import options
from kernels_dsl.checks.functions import check_function, hash_of

_registered: dict[str, Callable[..., Any]] = {}


def register_epilogue(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` known as `name`, for `gemm(..., epilogue=name)`. Returns the function.

    Needed only under `torch.compile`, where an operator's arguments cannot be Python functions. Registering
    another function under a known name is a ValueError.
    """
    options.text("name", name)
    if not callable(function):
        raise TypeError(f"function is {options.shown(function)}, must be callable")
    hash_of("function", function)
    if _registered.setdefault(name, function) is not function:
        raise ValueError(f"name is {name!r}, must be one that no other epilogue has")
    return function


def resolve_epilogue(epilogue: str | Callable[..., Any], arguments: int) -> Callable[..., Any]:
    """The function that `epilogue` is or names. TypeError where a kernel cannot call it with an accumulator
    and so many arguments, or where it reads a tensor that it is not given."""
    function: Any = epilogue
    if isinstance(epilogue, str):
        if epilogue not in _registered:
            known = ", ".join(sorted(_registered)) or "none so far"
            raise ValueError(f"epilogue is {epilogue!r}, must be a function or a registered name ({known})")
        function = _registered[epilogue]
    if not callable(function):
        raise TypeError(f"epilogue is a {type(function).__name__}, must be a function or a registered name")
    check_function("epilogue", function, "epilogue_args", ("the accumulator",), arguments)
    return function


def name_for(function: Callable[..., Any]) -> str:
    """The name of a registered function; one that is not registered gets a name of its own."""
    for name, known in _registered.items():
        if known is function:
            return name
    name = f"{getattr(function, '__qualname__', type(function).__name__)}#{len(_registered)}"
    register_epilogue(name, function)
    return name
