"""float32 arithmetic with the directed roundings of PTX (`rz`, `rm`, `rp`), each rounded once.

The exact result is held in float64, rounded to odd where it does not fit, so that the rounding that
follows sees whether anything lies beyond its last bit.
"""

from __future__ import annotations

import numpy as np

from . import numeric


def directed(operation: str, rounding: str, *operands: np.ndarray) -> np.ndarray:
    """`operation`: add, sub, mul, fma, div (a / b), rcp or sqrt of float32 arrays -> float32.

    A sum that is exactly zero is -0 where rounding down, unless both parts are +0. NaN results are canonical.
    Raises ValueError for another operation.
    """
    with np.errstate(all="ignore"):
        wide = [np.asarray(x, dtype=np.float32).astype(np.float64) for x in operands]
        if operation in ("add", "sub"):
            exact = _sum(wide[0], wide[1] if operation == "add" else -wide[1], rounding)
        elif operation == "mul":
            exact = wide[0] * wide[1]
        elif operation == "fma":
            exact = _sum(wide[0] * wide[1], wide[2], rounding)
        elif operation == "div":
            exact = _quotient(wide[0], wide[1])
        elif operation == "rcp":
            exact = _quotient(np.ones_like(wide[0]), wide[0])
        elif operation == "sqrt":
            exact = _root(wide[0])
        else:
            raise ValueError(f"operation was {operation!r}; it must be add, sub, mul, fma, div, rcp or sqrt")
        result = numeric.round_to(exact, numeric.F32, rounding).astype(np.float32)
    return numeric.canonical(result)


def _sum(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    total = numeric.sum_to_odd(a, b)
    if rounding != "rm":
        return total
    cancelled = (total == 0) & (np.signbit(a) != np.signbit(b))
    return np.where(cancelled, -0.0, total)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b of float32 values held in float64, rounded to odd."""
    quotient = a / b
    # quotient * b in two exact products: 29 and 24 bits of the quotient's 53 times the divisor's 24.
    high, low = _split(quotient)
    remainder = (a - high * b) - low * b
    return _towards(quotient, remainder * np.sign(b))


def _root(x: np.ndarray) -> np.ndarray:
    """Square root of float32 values held in float64, rounded to odd."""
    root = np.sqrt(x)
    high, low = _split(root)
    remainder = ((x - high * high) - 2 * high * low) - low * low
    return _towards(root, remainder)


def _split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 as a sum of its upper 26 bits and the rest."""
    bits = np.ascontiguousarray(values).view(np.int64) & ~np.int64((1 << 27) - 1)
    high = bits.view(np.float64)
    return high, values - high


def _towards(values: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    """`values` plus something tiny of the sign of `remainder`, rounded to odd."""
    usable = np.isfinite(values) & np.isfinite(remainder) & (values != 0)
    tiny = np.where(usable, np.sign(remainder) * np.abs(values) * 2.0**-80, 0.0)
    return np.where(usable, numeric.sum_to_odd(values, tiny), values)
