"""Checks of a function that a kernel is to trace, before anything is compiled."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def check_function(argument: str, function: Any, tensors: str, takes: Sequence[str], more: int) -> None:
    """TypeError where `function`, given as `argument`, is none, or reads a torch.Tensor that it is not given,
    or does not take what a kernel calls it with: values that are called `takes`, and `more` others.

    A kernel is compiled without the values of tensors; `tensors` is the argument that passes them.
    """
    if not callable(function):
        raise TypeError(f"{argument} is a {type(function).__name__}, must be a function")
    hash_of(argument, function)
    _check_arity(argument, function, tensors, takes, more)
    name = captured_tensor(function)
    if name is not None:
        raise TypeError(
            f"{argument} reads the torch.Tensor {name!r}, must get tensors as arguments: pass it in {tensors}"
        )


def hash_of(argument: str, value: Any) -> int:
    """Its hash; TypeError where it has none, and no kernel could be found by it again."""
    try:
        return hash(value)
    except TypeError:
        raise TypeError(f"{argument} is a {type(value).__name__}, must be hashable") from None


def _check_arity(argument: str, function: Any, tensors: str, takes: Sequence[str], more: int) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some that are written in C
        return
    try:
        signature.bind(*[None] * (len(takes) + more))
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(
            f"{argument} is {name}{signature}, must take {len(takes) + more} arguments: {', '.join(takes)} "
            f"and {more} of {tensors} ({error})"
        ) from None


def captured_tensor(function: Any) -> str | None:
    """The name of a torch.Tensor that a function, or one that it calls, closes over or reads as a global."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for name, held in _held(value):
            if isinstance(held, torch.Tensor):
                return name
            waiting.extend(held if isinstance(held, tuple) else (held,))
    return None


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function reaches beside its arguments; nothing for anything else."""
    if isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((f"args[{i}]", x) for i, x in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.FunctionType):
        # As it was written: the DSL replaces the code of what it has traced.
        code = getattr(value, "_original_code", None) or value.__code__
        for name, cell in zip(code.co_freevars, value.__closure__ or ()):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not bound yet
                continue
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval in value.__globals__:
                yield instruction.argval, value.__globals__[instruction.argval]
