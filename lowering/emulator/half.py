"""Arithmetic on f16, bf16 and their packed pairs: values widened, computed with enough bits, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .alu import fmax, fmax_nan, fmin, fmin_nan, high, low, pack16, saturate, sum_to_odd
from .semantics import numeric

Array = np.ndarray

# Sums, products and quotients of two 11-bit significands round correctly through float32's 24 bits; fma goes
# through float64 with the sum rounded to odd.
_BINARY: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "min": fmin, "max": fmax, "min.NaN": fmin_nan, "max.NaN": fmax_nan,
}  # fmt: skip
_UNARY: dict[str, Callable] = {"ex2": np.exp2, "tanh": np.tanh}


def arithmetic(name: str, kind: str, flags: str, *operands: Array) -> Array:
    """``name`` on f16, bf16 (uint16 arrays) or f16x2, bf16x2 (uint32 arrays); result as the operands.

    ``name``: add sub mul fma min max (``min.NaN``…) neg abs ex2 tanh. ``flags``, separated by blanks: ``sat``
    clamps to [0, 1]; ``relu`` replaces negative results by zero; ``ftz`` replaces subnormal f16 operands and
    results by zero of their sign.
    """
    if kind.endswith("x2"):
        scalar = kind[:-2]
        below = arithmetic(name, scalar, flags, *(low(a) for a in operands))
        above = arithmetic(name, scalar, flags, *(high(a) for a in operands))
        return pack16(below, above)
    flush = "ftz" in flags and kind == "f16"
    if flush:
        operands = tuple(_flush(bits) for bits in operands)
    if name == "neg":
        return operands[0] ^ np.uint16(0x8000)
    if name == "abs":
        return operands[0] & np.uint16(0x7FFF)
    values = [numeric.decode(bits, kind) for bits in operands]
    if name == "fma":
        wide = [v.astype(np.float64) for v in values]
        result = sum_to_odd(wide[0] * wide[1], wide[2])
    elif name in _UNARY:
        result = _UNARY[name](values[0].astype(np.float64))
    else:
        result = _BINARY[name](*values)
    if "sat" in flags:
        result = saturate(result)
    out = numeric.encode(result, kind, relu="relu" in flags)
    return _flush(out) if flush else out


def _flush(bits: Array) -> Array:
    """f16 patterns with subnormals replaced by zero of their sign."""
    return np.where((bits & np.uint16(0x7C00)) == 0, bits & np.uint16(0x8000), bits)


def compare_operand(kind: str, bits: Array) -> Array:
    """Values of f16 or bf16 bits as float32, for comparisons."""
    return numeric.decode(bits, kind)
