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
