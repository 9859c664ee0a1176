"""Checks of options that are Python values. Each returns the value, or raises an error that names it.

A tensor is never a number here: to look at its value would wait for the GPU. A bool is none either, and
nothing but a bool is a bool, so that no option is taken for another. torch.compile's symbolic numbers count
as what they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch

LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""Of float32, which kernels take numbers as."""


def boolean(name: str, value: Any) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(f"{name} is {shown(value)}, must be True or False")
    return bool(value)


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """`value`, which must be an integer from `least` to `most`, where these are given."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} is {shown(value)}, must be an int")
        value = int(value)
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name} is {value}, must be {_range(least, most)}")
    return value


def number(name: str, value: Any) -> float:
    """`value`, which must be a number. It may be infinite or NaN, but not what float32 makes infinite."""
    value = _number(name, value)
    if not -LARGEST <= value <= LARGEST and value not in (math.inf, -math.inf) and value == value:
        raise ValueError(f"{name} is {value}, must be finite in float32, or infinite itself")
    return value


def _number(name: str, value: Any) -> Any:
    if type(value) is float or type(value) is int:
        return value
    symbolic = isinstance(value, (torch.SymFloat, torch.SymInt))
    if isinstance(value, bool) or not (symbolic or isinstance(value, Real)):
        raise TypeError(f"{name} is {shown(value)}, must be a Python number")
    return value if symbolic else float(value)


def real(name: str, value: Any, least: float | None = None, above: float | None = None) -> float:
    """`value`, which must be a number that is finite in float32, and where these are given, at least `least`
    and greater than `above`."""
    value = _number(name, value)
    low = (least is not None and value < least) or (above is not None and value <= above)
    if low or not -LARGEST <= value <= LARGEST:
        wanted = [] if least is None else [f"at least {least:g}"]
        wanted += [] if above is None else [f"greater than {above:g}"]
        raise ValueError(f"{name} is {value}, must be {' and '.join([*wanted, 'finite in float32'])}")
    return value


def text(name: str, value: Any) -> str:
    """`value`, which must be a string that is not empty."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}, must be a str")
    if not value:
        raise ValueError(f"{name} is {value!r}, must not be empty")
    return value


def one_of(name: str, value: Any, allowed: Sequence[str | None]) -> Any:
    """`value`, which must be one of the strings `allowed`, or None where that is among them."""
    known = value is None or isinstance(value, str)
    if not known or value not in allowed:
        raise (ValueError if known else TypeError)(f"{name} is {shown(value)}, must be {_listed(allowed)}")
    return value


def instance(name: str, value: Any, *kinds: type) -> Any:
    """`value`, which must be of one of the types `kinds`."""
    if not isinstance(value, kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise TypeError(f"{name} is {shown(value)}, must be {names}")
    return value


def shown(value: Any) -> str:
    """A value as an error shows it: short ones as they are, of others the type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value) if len(repr(value)) <= 60 else f"a {type(value).__name__}"
    if isinstance(value, torch.dtype):
        return str(value)
    return f"a {type(value).__name__}"


def _listed(allowed: Sequence[str | None]) -> str:
    *others, last = map(repr, allowed)
    return f"{', '.join(others)} or {last}" if others else last


def _range(least: int | None, most: int | None) -> str:
    if least is None:
        return f"at most {most}"
    return f"at least {least}" if most is None else f"from {least} to {most}"
