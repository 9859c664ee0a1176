"""Directed roundings of float32 arithmetic against rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from lowering.emulator.semantics.arithmetic import directed

TOP = Fraction(2) ** 128


def _neighbours(value: Fraction) -> tuple[float, float]:
    """The float32 values just below and above (equal where exact)."""
    quantum = Fraction(1, 2**149)
    while abs(value) >= quantum * 2**24:
        quantum *= 2
    down = (value / quantum).__floor__()
    low = down * quantum
    high = low if low == value else low + quantum
    return tuple(math.copysign(math.inf, x) if abs(x) >= TOP else float(x) for x in (low, high))


def _expected(value: Fraction, rounding: str) -> float:
    low, high = _neighbours(value)
    limit = float(np.finfo(np.float32).max)
    if rounding == "rm" or (rounding == "rz" and value > 0):
        return min(low, limit)
    return max(high, -limit)


def _operands(seed, count):
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-60, 60, count))
    values = (rng.standard_normal(count) * scale).astype(np.float32)
    values[::7] = rng.integers(1, 100, values[::7].size)
    return values


@pytest.mark.parametrize("rounding", ["rz", "rm", "rp"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma", "div", "rcp"])
def test_against_rationals(operation, rounding, seed):
    a, b, c = (_operands(seed + i, 1500) for i in range(3))
    b[::5] = a[::5] * np.float32(1.5)
    exact = {
        "add": lambda x, y, z: x + y, "sub": lambda x, y, z: x - y, "mul": lambda x, y, z: x * y,
        "fma": lambda x, y, z: x * y + z, "div": lambda x, y, z: x / y, "rcp": lambda x, y, z: 1 / x,
    }[operation]  # fmt: skip
    count = {"fma": 3, "rcp": 1}.get(operation, 2)
    got = directed(operation, rounding, *(a, b, c)[:count])
    for x, y, z, result in zip(a, b, c, got, strict=True):
        value = exact(Fraction(float(x)), Fraction(float(y)), Fraction(float(z)))
        if value:
            assert float(result) == _expected(value, rounding), (x, y, z)


@pytest.mark.parametrize("rounding", ["rz", "rm", "rp"])
def test_square_root(rounding, seed):
    x = np.abs(_operands(seed, 2000))
    got = directed("sqrt", rounding, x)
    for value, result in zip(x, got, strict=True):
        square, exact = Fraction(float(result)) ** 2, Fraction(float(value))
        assert square <= exact if rounding in ("rz", "rm") else square >= exact
        step = Fraction(float(np.spacing(result)))
        beyond = Fraction(float(result)) + (step if rounding in ("rz", "rm") else -step)
        assert beyond**2 > exact if rounding in ("rz", "rm") else beyond**2 < exact


def test_zeros_and_special_values():
    one, zero = np.float32([1.0]), np.float32([0.0])
    assert np.signbit(directed("sub", "rm", one, one))[0]
    assert not np.signbit(directed("sub", "rp", one, one))[0]
    assert not np.signbit(directed("add", "rm", zero, zero))[0]
    assert directed("div", "rz", one, zero)[0] == np.inf
    assert directed("mul", "rz", np.float32([3e38]), np.float32([3e38]))[0] == np.finfo(np.float32).max
    nan = directed("add", "rz", np.float32([np.inf]), np.float32([-np.inf]))
    assert nan.view(np.uint32)[0] == 0x7FFFFFFF
    with pytest.raises(ValueError, match="operation was"):
        directed("pow", "rz", one, one)
