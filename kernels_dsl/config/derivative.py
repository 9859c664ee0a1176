"""Derivatives of score functions that are arithmetic in the score, by dual numbers.

`score_mod(score, b, h, i, j, *aux)` is called with a score that carries its derivative, which +, -, * and /
hand on. A function that does more with its score, such as `cute.math.exp`, gets an object that it cannot use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lowering.records import frozen


class Dual:
    """A number and its derivative by the score."""

    def __init__(self, value: Any, slope: Any) -> None:
        self.value, self.slope = value, slope

    def __add__(self, other: Any) -> Dual:
        x = _dual(other)
        return Dual(self.value + x.value, self.slope + x.slope)

    def __sub__(self, other: Any) -> Dual:
        x = _dual(other)
        return Dual(self.value - x.value, self.slope - x.slope)

    def __rsub__(self, other: Any) -> Dual:
        return _dual(other) - self

    def __mul__(self, other: Any) -> Dual:
        if not isinstance(other, Dual):
            return Dual(self.value * other, self.slope * other)
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __truediv__(self, other: Any) -> Dual:
        if not isinstance(other, Dual):
            return Dual(self.value / other, self.slope / other)
        quotient = self.value / other.value
        return Dual(quotient, (self.slope - quotient * other.slope) / other.value)

    def __rtruediv__(self, other: Any) -> Dual:
        return _dual(other) / self

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.slope)

    __radd__, __rmul__ = __add__, __mul__


def _dual(x: Any) -> Dual:
    return x if isinstance(x, Dual) else Dual(x, 0.0)


@frozen
class Derived:
    """The `score_mod_bwd` of a function: gradient * (its derivative by the score)."""

    score_mod: Callable[..., Any]

    def __call__(self, gradient: Any, score: Any, *others: Any) -> Any:
        found = self.score_mod(Dual(score, 1.0), *others)
        return gradient * _dual(found).slope


class _Unknown:
    """A number, or a tensor of numbers, that nothing is known of."""

    def __getitem__(self, _: Any) -> _Unknown:
        return self

    def _number(self, other: Any = 0.0) -> Any:
        return self if isinstance(other, (_Unknown, int, float)) else NotImplemented

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _number
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = _number


@functools.lru_cache(maxsize=1024)
def derived(score_mod: Callable[..., Any], aux: int) -> Derived | None:
    """`score_mod_bwd` of a function with `aux` arguments more; None where it does more than +, -, * and /."""
    unknown = _Unknown()
    found = Derived(score_mod)
    try:
        found(unknown, unknown, *[unknown] * (4 + aux))
    except Exception:  # whatever a user's function raises for what it does not expect
        return None
    return found
