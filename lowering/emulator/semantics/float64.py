"""float64 arithmetic with one rounding, in every rounding direction."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from . import numeric

Array = np.ndarray


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float64 arrays, rounded once to nearest even."""
    a, b, c = np.broadcast_arrays(a, b, c)
    with np.errstate(all="ignore"):
        product = a * b
        out = product + c
        exponents = [np.frexp(np.where(x == 0, 1.0, x))[1] for x in (a, b, c)]
        easy = np.isfinite(out)
        for e in exponents:
            easy &= np.abs(e) < 400
        # Dekker's product and Boldo and Melquiond's sum, exact where no exponent is near its limits.
        (ah, al), (bh, bl) = _halves(np.where(easy, a, 1.0)), _halves(np.where(easy, b, 1.0))
        p = np.where(easy, product, 1.0)
        low = al * bl - (((p - ah * bh) - al * bh) - ah * bl)
        high_sum, low_sum = _two_sum(np.where(easy, c, 0.0), low)
        high, rest = _two_sum(p, high_sum)
        sums = high + numeric.sum_to_odd(low_sum, rest)
    out = np.where(easy & (out != 0), sums, out)
    for at in np.argwhere(np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (~easy | (out == 0))):
        where = tuple(at)
        out[where] = _exact("fma", "rn", [float(x[where]) for x in (a, b, c)], float(out[where]))
    return _nan_of(out, a, b, c)


def directed(operation: str, rounding: str, *operands: Array) -> Array:
    """add, sub, mul, fma, div, rcp or sqrt rounded `rz`, `rm` or `rp`."""
    arrays = np.broadcast_arrays(*operands)
    ones = np.ones_like(arrays[0])
    with np.errstate(all="ignore"):
        table: dict[str, Callable] = {
            "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
            "div": lambda a, b: a / b, "rcp": lambda a: ones / a, "sqrt": np.sqrt, "fma": fma,
        }  # fmt: skip
        nearest = table[operation](*arrays)
    out = nearest.copy()
    for at in np.argwhere(np.logical_and.reduce([np.isfinite(x) for x in arrays])):
        where = tuple(at)
        out[where] = _exact(operation, rounding, [float(x[where]) for x in arrays], float(nearest[where]))
    return _nan_of(out, *arrays)


def _nan_of(out: Array, *operands: Array) -> Array:
    """`out` with NaNs as an H200 has them: the first operand that is one, made quiet; else -NaN."""
    lost = np.isnan(out)
    if not lost.any():
        return out
    bits = np.full(out.shape, 0xFFF8000000000000, np.uint64)
    for x in reversed(operands):
        patterns = np.ascontiguousarray(x).view(np.uint64) | np.uint64(1 << 51)
        bits = np.where(np.isnan(x), patterns, bits)
    return np.where(lost, bits, out.view(np.uint64)).view(np.float64)


def _halves(x: Array) -> tuple[Array, Array]:
    """x as the sum of two numbers of 26 bits."""
    scaled = 134217729.0 * x
    high = scaled - (scaled - x)
    return high, x - high


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _exact(operation: str, rounding: str, values: list[float], nearest: float) -> float:
    """One result of finite operands; `nearest`, what float64 gives, stands where nothing is to round."""
    parts = [Fraction(v) for v in values]
    if operation == "sqrt":
        if math.isnan(nearest) or nearest == 0:
            return nearest
        error = parts[0] - Fraction(nearest) ** 2
        return _step(nearest, error, rounding)
    if operation in ("div", "rcp"):
        divisor = parts[-1]
        if divisor == 0 or math.isnan(nearest):
            return nearest
        value = parts[0] / divisor if operation == "div" else 1 / divisor
    elif operation == "mul":
        value = parts[0] * parts[1]
    elif operation == "fma":
        value = parts[0] * parts[1] + parts[2]
    else:
        value = parts[0] + parts[1] if operation == "add" else parts[0] - parts[1]
    if value == 0:
        return _zero(operation, rounding, values, nearest)
    try:
        rounded = float(value)
    except OverflowError:
        rounded = math.inf if value > 0 else -math.inf
    if rounded == 0:
        rounded = math.copysign(0.0, value)
    if rounding == "rn":
        return rounded
    if math.isinf(rounded):
        away = rounding == ("rp" if value > 0 else "rm")
        return rounded if away else math.copysign(1.7976931348623157e308, rounded)
    return _step(rounded, value - Fraction(rounded), rounding)


def _zero(operation: str, rounding: str, values: list[float], nearest: float) -> float:
    """A sum that cancels is -0 only where rounding down; other zeros keep their sign."""
    if operation not in ("add", "sub", "fma"):
        return nearest
    first = values[0] * values[1] if operation == "fma" else values[0]
    if operation == "fma" and first == 0 and values[0] != 0 and values[1] != 0:
        first = math.copysign(0.0, values[0]) * math.copysign(1.0, values[1])
    last = -values[-1] if operation == "sub" else values[-1]
    if math.copysign(1.0, first) == math.copysign(1.0, last):
        return math.copysign(0.0, first)
    return -0.0 if rounding == "rm" else 0.0


def _step(value: float, error: Fraction, rounding: str) -> float:
    """`value`, or its neighbour where the exact result (value + error) lies on the other side of it."""
    if error == 0:
        return value
    down = rounding == "rm" or (rounding == "rz" and (value > 0 or (value == 0 and error > 0)))
    if down and error < 0:
        return math.nextafter(value, -math.inf)
    if not down and error > 0:
        return math.nextafter(value, math.inf)
    return value
