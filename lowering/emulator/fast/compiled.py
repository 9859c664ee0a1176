"""The compiled functions. Each does what a NumPy function of the emulator does, bit for bit.

All of them are in one file, because numba's cache on disk looks at the source file of a function alone.
"""

from __future__ import annotations

import numpy as np

from .jit import jit

_FAR_BELOW = -2000  # the exponent of zero
_LOWEST = 400  # POWERS[i] is 2 ** (i - _LOWEST); shifts of finite operands lie far inside
_POWERS = np.ldexp(1.0, np.arange(-_LOWEST, _LOWEST))
_LARGEST = float.fromhex("0x1.fffffep127")
_SUBNORMAL = float.fromhex("0x1p-126")
_NAN = np.uint32(0x7FFFFFFF)


@jit
def _exponents(values, out):  # type: ignore[no-untyped-def]
    """floor(log2 |x|) of normal float64 values, from their bits; far below every other for zeros.

    Returns whether all are finite.
    """
    bits = values.view(np.int64)
    finite = True
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            field = (bits[i, j] >> 52) & 0x7FF
            out[i, j] = field - 1023 if field else _FAR_BELOW
            finite &= field != 0x7FF
    return finite


@jit
def aligned(a, b, c, group, bits, fraction):  # type: ignore[no-untyped-def]
    """c + a @ b as `tensor_core._aligned` sums it, in float64, or the plain sum where it is not finite.

    a (M, K), b (K, N), c (M, N), all contiguous float64 that came from float32 or narrower formats.
    """
    rows, depth = a.shape
    columns = b.shape[1]
    a_exponent = np.empty((rows, depth), np.int32)
    b_exponent = np.empty((depth, columns), np.int32)
    c_exponent = np.empty((rows, columns), np.int32)
    finite = _exponents(a, a_exponent) & _exponents(b, b_exponent) & _exponents(c, c_exponent)
    largest = np.empty(columns, np.int32)
    scale = np.empty(columns, np.float64)
    back = np.empty(columns, np.float64)
    kept = np.empty(columns, np.float64)
    keep_bits = ~((np.int64(1) << (52 - fraction)) - 1)
    total = c.copy()
    total_bits = total.view(np.int64)
    quantum = _POWERS[126 + fraction + _LOWEST]
    finest = _POWERS[-126 - fraction + _LOWEST]
    for start in range(0, depth, group):
        if start:
            _exponents(total, c_exponent)
        stop = min(start + group, depth)
        for i in range(rows):
            for j in range(columns):
                largest[j] = c_exponent[i, j]
            for k in range(start, stop):
                e = a_exponent[i, k]
                for j in range(columns):
                    largest[j] = max(largest[j], e + b_exponent[k, j])
            for j in range(columns):
                # Only zeros are that small, and infinities that large: any scale does.
                shift = min(max(bits - largest[j], 1 - _LOWEST), _LOWEST - 1)
                scale[j] = _POWERS[shift + _LOWEST]
                back[j] = _POWERS[_LOWEST - shift]
                kept[j] = 0.0
            for k in range(start, stop):
                x = a[i, k]
                for j in range(columns):
                    kept[j] += np.trunc(x * b[k, j] * scale[j])
            for j in range(columns):
                total[i, j] = (kept[j] + np.trunc(total[i, j] * scale[j])) * back[j]
            for j in range(columns):
                value = total[i, j]
                if abs(value) < _SUBNORMAL:
                    total[i, j] = np.trunc(value * quantum) * finest
                else:
                    total_bits[i, j] &= keep_bits
                    if value > _LARGEST:
                        total[i, j] = _LARGEST
                    elif value < -_LARGEST:
                        total[i, j] = -_LARGEST
    if finite:
        return total
    for i in range(rows):
        for j in range(columns):
            plain = c[i, j]
            for k in range(depth):
                plain += a[i, k] * b[k, j]
            if not np.isfinite(plain):
                total[i, j] = plain
    return total


@jit
def _canonical(values):  # type: ignore[no-untyped-def]
    """float64 -> float32 patterns, every NaN the canonical one."""
    out = values.astype(np.float32)
    words = out.view(np.uint32)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            if np.isnan(out[i, j]):
                words[i, j] = _NAN
    return out


@jit
def product(a, b, c, group, bits, fraction):  # type: ignore[no-untyped-def]
    """`aligned` as float32."""
    return _canonical(aligned(a, b, c, group, bits, fraction))
