"""Arithmetic that a NumPy operator does not give directly, on arrays of one value a lane.

Integers are unsigned arrays of the register's width unless a name says signed; floats are float32 or
float64 arrays; half formats travel as bits. Semantics are those of the PTX ISA's instruction chapters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I16, I32, I64 = np.int16, np.int32, np.int64
F32, F64 = np.float32, np.float64
Array = np.ndarray


def div_signed(a: Array, b: Array) -> Array:
    """Quotient rounded towards zero; all ones where the divisor is zero."""
    # Magnitudes are taken as unsigned, which holds that of the smallest number too.
    unsigned = np.dtype(f"u{a.itemsize}")
    zero = b == 0
    magnitude_a = np.where(a < 0, -a, a).view(unsigned)
    magnitude_b = np.where(zero, b.dtype.type(1), np.where(b < 0, -b, b)).view(unsigned)
    quotient = (magnitude_a // magnitude_b).view(a.dtype)
    return np.where(zero, b.dtype.type(-1), np.where((a < 0) != (b < 0), -quotient, quotient))


def rem_signed(a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; the dividend where the divisor is zero."""
    return np.where(b == 0, a, a - div_signed(a, b) * b)


def div_unsigned(a: Array, b: Array) -> Array:
    """Quotient; all ones where the divisor is zero."""
    zero = b == 0
    return np.where(zero, ~a.dtype.type(0), a // np.where(zero, b.dtype.type(1), b))


def rem_unsigned(a: Array, b: Array) -> Array:
    """Remainder; the dividend where the divisor is zero."""
    zero = b == 0
    return np.where(zero, a, a % np.where(zero, b.dtype.type(1), b))


def mul_hi_u64(a: Array, b: Array) -> Array:
    """High 64 bits of the unsigned 128-bit product."""
    mask, half = U64(0xFFFFFFFF), U64(32)
    a0, a1, b0, b1 = a & mask, a >> half, b & mask, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    carry = (middle & mask) + a0 * b1
    return a1 * b1 + (middle >> half) + (carry >> half)


def mul_hi_s64(a: Array, b: Array) -> Array:
    """High 64 bits of the signed 128-bit product (uint64 views in and out)."""
    high = mul_hi_u64(a, b)
    high = high - np.where(a.view(I64) < 0, b, U64(0))
    return high - np.where(b.view(I64) < 0, a, U64(0))


def add_sat_s32(a: Array, b: Array, sign: int = 1) -> Array:
    """Signed 32-bit a + sign*b, saturated."""
    return np.clip(a.astype(I64) + sign * b.astype(I64), -(1 << 31), (1 << 31) - 1).astype(I32)


def popc(a: Array) -> Array:
    """Number of one bits, uint32."""
    bits = np.unpackbits(np.ascontiguousarray(a).view(U8).reshape(len(a), -1), axis=1)
    return bits.sum(axis=1, dtype=U32)


def clz(a: Array) -> Array:
    """Number of leading zero bits, uint32."""
    wide = a.itemsize * 8
    bits = np.unpackbits(np.ascontiguousarray(a).view(U8).reshape(len(a), -1), axis=1, bitorder="little")
    return np.where(bits.any(axis=1), bits[:, ::-1].argmax(axis=1), wide).astype(U32)


def brev(a: Array) -> Array:
    """Bits in reverse order."""
    bits = np.unpackbits(np.ascontiguousarray(a).view(U8).reshape(len(a), -1), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").reshape(-1).view(a.dtype)


def bfind(a: Array, shiftamt: bool) -> Array:
    """Position of the most significant one bit (or the shift that brings it to the top); all ones for 0."""
    zeros = clz(a)
    wide = U32(a.itemsize * 8 - 1)
    return np.where(a == 0, U32(0xFFFFFFFF), zeros if shiftamt else wide - zeros)


def magnitude(a: Array) -> Array:
    """The value itself, or its complement where its top bit is set: what a signed bfind looks at."""
    return np.where(a >> a.dtype.type(8 * a.itemsize - 1) != 0, ~a, a)


def bfe(a: Array, start: Array, length: Array, signed: bool) -> Array:
    """Bit field extract (bfe): ``length`` bits from ``start``, zero or sign extended."""
    bits = a.itemsize * 8
    pos, count = (start & U32(0xFF)).astype(I64), (length & U32(0xFF)).astype(I64)
    if not signed:
        mask = np.where(
            count >= bits, ~a.dtype.type(0), (a.dtype.type(1) << count.astype(a.dtype)) - a.dtype.type(1)
        )
        return np.where(pos >= bits, a.dtype.type(0), a >> pos.astype(a.dtype)) & mask
    signed_type = I32 if bits == 32 else I64
    top = np.minimum(pos + count - 1, bits - 1)
    sign = np.where(count > 0, (a >> np.maximum(top, 0).astype(a.dtype)) & a.dtype.type(1), a.dtype.type(0))
    value = np.where(pos >= bits, a.dtype.type(0), a >> pos.astype(a.dtype))
    width = np.clip(np.minimum(count, bits - pos), 0, bits)
    mask = np.where(
        width >= bits, ~a.dtype.type(0), (a.dtype.type(1) << width.astype(a.dtype)) - a.dtype.type(1)
    )
    fill = np.where(sign != 0, ~mask, a.dtype.type(0))
    return ((value & mask) | fill).view(signed_type)


def bfi(a: Array, b: Array, start: Array, length: Array) -> Array:
    """Bit field insert: the low ``length`` bits of a into b at ``start``."""
    bits, one = b.itemsize * 8, b.dtype.type(1)
    pos, count = (start & U32(0xFF)).astype(b.dtype), (length & U32(0xFF)).astype(b.dtype)
    mask = np.where(count >= bits, ~b.dtype.type(0), (one << count) - one)
    mask = np.where(pos >= bits, b.dtype.type(0), mask << pos)
    return (b & ~mask) | (np.where(pos >= bits, b.dtype.type(0), a << pos) & mask)


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Any logical function of three inputs, given as an 8-bit table (a = 0xF0, b = 0xCC, c = 0xAA)."""
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """Byte permute, default mode: each selector nibble picks one of 8 bytes, bit 3 replicates its sign."""
    source = np.stack([(w >> U32(8 * i)) & U32(0xFF) for w in (a, b) for i in range(4)])
    lanes = np.arange(len(a))
    out = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> U32(4 * i)) & U32(0xF)
        byte = source[nibble & U32(7), lanes]
        byte = np.where(nibble & U32(8), np.where(byte & U32(0x80), U32(0xFF), U32(0)), byte)
        out |= byte << U32(8 * i)
    return out


def shf(a: Array, b: Array, shift: Array, left: bool, wrap: bool) -> Array:
    """Funnel shift of the 64-bit b:a, left (high half) or right (low half); the amount wraps or clamps."""
    amount = (shift & U32(31) if wrap else np.minimum(shift, U32(32))).astype(U64)
    both = (b.astype(U64) << U64(32)) | a.astype(U64)
    if left:
        return ((both << amount) >> U64(32)).astype(U32)
    return (both >> amount).astype(U32)


def ftz(a: Array) -> Array:
    """Subnormal float32 values replaced by zero of the same sign."""
    bits = a.view(U32)
    return np.where((bits & U32(0x7F800000)) == 0, bits & U32(0x80000000), bits).view(F32)


def saturate(a: Array) -> Array:
    """Clamped to [0, 1]; NaN and -0 give +0."""
    return np.where(a > 0, np.minimum(a, a.dtype.type(1)), a.dtype.type(0))


def sum_to_odd(p: Array, c: Array) -> Array:
    """float64 p + c rounded to odd, so that a later rounding to a narrow format is the only one."""
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = s.view(I64)
    fix = (error != 0) & ((bits & 1) == 0) & np.isfinite(s)
    return np.where(fix, np.where((error > 0) == (s > 0), bits + 1, bits - 1), bits).view(F64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """float32 a*b + c with one rounding: the product is exact in float64, the sum rounded to odd there."""
    p = a.astype(F64) * b.astype(F64)
    c64 = c.astype(F64)
    s = p + c64
    t = s - p
    error = (p - (s - t)) + (c64 - t)
    if np.all((error == 0) | ~np.isfinite(s)):
        return s.astype(F32)
    return sum_to_odd(p, c64).astype(F32)


def fmin(a: Array, b: Array) -> Array:
    """Minimum; the other operand where one is NaN; -0 below +0."""
    return np.where((a == b) & np.signbit(a), a, np.fmin(a, b))


def fmax(a: Array, b: Array) -> Array:
    """Maximum; the other operand where one is NaN; +0 above -0."""
    return np.where((a == b) & ~np.signbit(a), a, np.fmax(a, b))


def fmin_nan(a: Array, b: Array) -> Array:
    """Minimum; NaN where either operand is NaN."""
    return np.where((a == b) & np.signbit(a), a, np.minimum(a, b))


def fmax_nan(a: Array, b: Array) -> Array:
    """Maximum; NaN where either operand is NaN."""
    return np.where((a == b) & ~np.signbit(a), a, np.maximum(a, b))


def via64(function: Callable[[Array], Array], a: Array) -> Array:
    """An approximate float32 function: evaluated in float64 and rounded once.

    The GPU's approximations differ from this by a few units in the last place.
    """
    return function(a.astype(F64)).astype(F32)


def rsqrt(a: Array) -> Array:
    """1 / sqrt(a)."""
    return 1.0 / np.sqrt(a)


def low(a: Array) -> Array:
    """Low 16 bits of uint32."""
    return a.astype(U16)


def high(a: Array) -> Array:
    """High 16 bits of uint32."""
    return (a >> U32(16)).astype(U16)


def pack16(lo: Array, hi: Array) -> Array:
    """Two uint16 arrays as one uint32 array."""
    return lo.astype(U32) | (hi.astype(U32) << U32(16))


def pack32(lo: Array, hi: Array) -> Array:
    """Two uint32 arrays as one uint64 array."""
    return lo.astype(U64) | (hi.astype(U64) << U64(32))


def is_of(what: str, a: Array) -> Array:
    """``testp``: finite, infinite, number, notanumber, normal (zero too) or subnormal."""
    if what in ("number", "notanumber"):
        return np.isnan(a) == (what == "notanumber")
    if what in ("finite", "infinite"):
        return np.isinf(a) if what == "infinite" else np.isfinite(a)
    tiny = (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny)
    return {"subnormal": tiny, "normal": np.isfinite(a) & ~tiny}[what]


def compare(op: str, a: Array, b: Array) -> Array:
    """Float comparison of setp: ordered names are false on NaN, names ending in u are true on NaN."""
    nan = np.isnan(a) | np.isnan(b)
    if op == "num":
        return ~nan
    if op == "nan":
        return nan
    base = op[:-1] if op.endswith("u") else op
    plain = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }[base](a, b)
    return plain | nan if op.endswith("u") else plain & ~nan
