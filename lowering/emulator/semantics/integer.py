"""Integer instructions of PTX that treat a register as several small numbers, on uint32 arrays."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def parts(a: Array, bits: int, signed: bool) -> list[Array]:
    """The 8- or 16-bit numbers in each uint32, lowest first, as int64 arrays."""
    kind = f"{'i' if signed else 'u'}{bits // 8}"
    pieces = np.ascontiguousarray(a, dtype=np.uint32).view(kind).reshape(len(a), -1)
    return [pieces[:, i].astype(np.int64) for i in range(pieces.shape[1])]


def join(pieces: list[Array], bits: int) -> Array:
    """The inverse of `parts`; of each number the low `bits` are kept."""
    out = np.zeros(len(pieces[0]), np.int64)
    for i, piece in enumerate(pieces):
        out |= (piece & ((1 << bits) - 1)) << (bits * i)
    return out.astype(np.uint32)


def dot4(a: Array, b: Array, c: Array, signed_a: bool, signed_b: bool) -> Array:
    """`dp4a`: c plus the products of four bytes of a and four of b, modulo 2**32."""
    pairs = zip(parts(a, 8, signed_a), parts(b, 8, signed_b), strict=True)
    return (sum(x * y for x, y in pairs) + c.astype(np.int64)).astype(np.uint32)


def dot2(a: Array, b: Array, c: Array, signed_a: bool, signed_b: bool, high: bool) -> Array:
    """`dp2a`: c plus the products of the halves of a and the low (or high) two bytes of b, modulo 2**32."""
    pairs = zip(parts(a, 16, signed_a), parts(b, 8, signed_b)[2 * high : 2 * high + 2], strict=True)
    return (sum(x * y for x, y in pairs) + c.astype(np.int64)).astype(np.uint32)


def add_carry(a: Array, b: Array, carry: Array | None = None) -> tuple[Array, Array]:
    """a + b + carry of unsigned arrays, and the carry out of the highest bit."""
    total = a + b
    out = total < a
    if carry is not None:
        more = total + carry.astype(a.dtype)
        total, out = more, out | (more < total)
    return total, out


def subtract_borrow(a: Array, b: Array, borrow: Array | None = None) -> tuple[Array, Array]:
    """a - b - borrow of unsigned arrays, and the borrow into the highest bit."""
    difference, out = a - b, a < b
    if borrow is not None:
        less = difference - borrow.astype(a.dtype)
        difference, out = less, out | (less > difference)
    return difference, out


# The default selectors that a mode of prmt stands for, by the low two bits of its operand c.
_SELECTORS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}  # fmt: skip
PRMT_MODES = tuple(_SELECTORS)


def prmt_selector(mode: str, c: Array) -> Array:
    """The selector of the default mode that does what `mode` does."""
    return np.array(_SELECTORS[mode], np.uint32)[c & np.uint32(3)]


def packed(operation: str, a: Array, b: Array, signed: bool, relu: bool) -> Array:
    """`add`, `min` or `max` of two 16-bit halves each; `relu` replaces negative results by zero."""
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[operation]
    pieces = [function(x, y) for x, y in zip(parts(a, 16, signed), parts(b, 16, signed), strict=True)]
    return join([np.maximum(x, 0) for x in pieces] if relu else pieces, 16)


def multiply24(a: Array, b: Array, signed: bool, high: bool) -> Array:
    """Bits 47 to 16 (`high`) or 31 to 0 of the product of the low 24 bits of a and b, as int64."""
    x, y = ((v.astype(np.int64) & 0xFFFFFF) for v in (a, b))
    if signed:
        x, y = ((v ^ 0x800000) - 0x800000 for v in (x, y))
    product = (x * y >> (16 if high else 0)) & 0xFFFFFFFF
    return (product ^ 0x80000000) - 0x80000000 if signed else product


def absolute_difference(a: Array, b: Array) -> Array:
    """|a - b| modulo the width of the two arrays' type, unsigned."""
    unsigned = np.dtype(f"u{a.itemsize}")
    return np.where(a > b, a.view(unsigned) - b.view(unsigned), b.view(unsigned) - a.view(unsigned))


def clamp32(value: Array) -> Array:
    """int64 clamped to the range of s32."""
    return np.clip(value, -(1 << 31), (1 << 31) - 1)


def extend(a: Array, bits: Array, signed: bool, clamp: bool) -> Array:
    """`szext`: the low `bits` bits of a, sign or zero extended; `bits` clamped to 32 or modulo 32."""
    count = (np.minimum(bits, 32) if clamp else bits & np.uint32(31)).astype(np.int64)
    mask = (np.int64(1) << count) - 1
    value = a.astype(np.int64) & mask
    if signed:
        negative = (count > 0) & ((value >> np.maximum(count - 1, 0)) & 1 == 1)
        value = np.where(negative, value | ~mask, value)
    return value.astype(np.uint32)


def bit_mask(start: Array, count: Array, clamp: bool) -> Array:
    """`bmsk`: `count` ones from bit `start`; both are clamped to 32, or taken modulo 32."""
    ends = [(np.minimum(v, 32) if clamp else v & np.uint32(31)).astype(np.int64) for v in (start, count)]
    return (((np.int64(1) << ends[1]) - 1) << ends[0]).astype(np.uint32)


def nth_set(mask: Array, base: Array, offset: Array) -> Array:
    """`fns`: position of the |offset|-th one bit from `base` on, upwards or downwards; all ones if none."""
    out = np.full(len(mask), 0xFFFFFFFF, np.uint32)
    for lane in range(len(mask)):
        word, start, steps = int(mask[lane]), int(base[lane]), int(offset[lane])
        if steps == 0:
            places = [start] if start < 32 else []
        else:
            places = list(range(start, 32)) if steps > 0 else list(range(start, -1, -1)) if start < 32 else []
        found = [place for place in places if word >> place & 1]
        wanted = max(abs(steps) - 1, 0)
        if wanted < len(found):
            out[lane] = found[wanted]
    return out


def pack_saturated(a: Array, b: Array, c: Array | None, bits: int, signed: bool) -> Array:
    """`cvt.pack.sat`: s32 b and a, each clamped to `bits` bits, b lowest; above them the low bits of c."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    below, above = (np.clip(v.astype(np.int64), low, high) & ((1 << bits) - 1) for v in (b, a))
    rest = np.int64(0) if c is None else c.astype(np.int64) << 2 * bits
    return (below | above << bits | rest).astype(np.uint32)
