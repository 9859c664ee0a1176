"""Products of `wmma`, and of the `mma.sync` kinds with f64, 4-bit and 1-bit operands.

Fragments of `mma.sync` lie as the PTX ISA draws them. Those of `wmma` are opaque in PTX; here element e of a
matrix is with lane e / (elements a lane), in rows of A, C and D and columns of B. Where a fragment has more
room than elements they are there again, as on the GPU.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from . import float64, mma, tensor_core

Array = np.ndarray
BITS = {**tensor_core.OPERAND_BITS, "s4": 4, "u4": 4, "b1": 1, "f64": 64, "f32": 32, "s32": 32}


@dataclasses.dataclass(frozen=True)
class Product:
    """D (m, n) = A (m, k) B (k, n) + C, as the opcode says; `operation`: of b1, "xor" or "and"."""

    m: int
    n: int
    k: int
    d: str
    a: str
    b: str
    c: str
    saturate: bool = False
    operation: str = ""


_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_MMA = {
    "f64": ((8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)),
    "s8": ((8, 8, 16),), "u8": ((8, 8, 16),),
    "s4": ((8, 8, 32), (16, 8, 32), (16, 8, 64)), "u4": ((8, 8, 32), (16, 8, 32), (16, 8, 64)),
    "b1": ((8, 8, 128), (16, 8, 128), (16, 8, 256)),
}  # fmt: skip
_WIDE = ((16, 16, 16), (8, 32, 16), (32, 8, 16))
_WMMA = {
    "f16": _WIDE, "bf16": _WIDE, "s8": _WIDE, "u8": _WIDE, "tf32": ((16, 16, 8),), "f64": ((8, 8, 4),),
    "s4": ((8, 8, 32),), "u4": ((8, 8, 32),), "b1": ((8, 8, 128),),
}  # fmt: skip


def shape_of(parts: tuple[str, ...]) -> tuple[int, int, int]:
    """m, n and k of an opcode; ValueError where it names none."""
    for part in parts:
        match = _SHAPE.fullmatch(part)
        if match:
            return int(match[1]), int(match[2]), int(match[3])
    raise ValueError("the opcode names no shape mXnYkZ")


def parse(parts: tuple[str, ...]) -> Product:
    """The product of an `mma.sync` or `wmma.mma` opcode; ValueError for one that is not modelled."""
    shape = shape_of(parts)
    at = parts.index(next(p for p in parts if _SHAPE.fullmatch(p)))
    kinds = [p for p in parts[at + 1 :] if p in BITS]
    if len(kinds) == 2:  # wmma of f16 names D and C alone
        kinds = [kinds[0], "f16", "f16", kinds[1]]
    if len(kinds) != 4:
        raise ValueError(f"the opcode names {len(kinds)} types")
    allowed = _WMMA if parts[0] == "wmma" else _MMA
    integers = {"s8", "u8", "s4", "u4"}
    same = kinds[1] == kinds[2] or (set(kinds[1:3]) <= integers and kinds[1][1:] == kinds[2][1:])
    wanted = {"f64": {"f64"}, "f16": {"f16", "f32"}, "bf16": {"f32"}, "tf32": {"f32"}}.get(kinds[1], {"s32"})
    if shape not in allowed.get(kinds[1], ()) or not same or not {kinds[0], kinds[3]} <= wanted:
        raise ValueError(f"shape {shape} with types {', '.join(kinds)} is not modelled")
    if any(p in ("rz", "rm", "rp") for p in parts):
        raise ValueError("rounding other than .rn is not modelled")
    operation = next((p for p in parts if p in ("xor", "and")), "xor" if kinds[1] == "b1" else "")
    d, a, b, c = kinds
    return Product(*shape, d, a, b, c, "satfinite" in parts, operation)


def product(p: Product, a: Array, b: Array, c: Array) -> Array:
    """C + A B of values (m, k), (k, n), (m, n): float64, int64, or 0 and 1 for b1."""
    if p.a == "f64":
        out = c
        for step in range(p.k):  # one rounding for each element of K, in order
            out = float64.fma(a[:, step : step + 1], b[step : step + 1, :], out)
        return out
    if p.a == "b1":
        both = a[:, :, None] ^ b[None] if p.operation == "xor" else a[:, :, None] & b[None]
        return (c + both.sum(axis=1)).astype(np.int32)
    kind = ("mma", p.a)
    accumulation = tensor_core.ACCUMULATION.get(kind)
    return tensor_core.multiply_add(
        a, np.swapaxes(b, -1, -2), c, p.d, saturate=p.saturate, accumulation=accumulation
    )


def split(registers: Array, kind: str) -> Array:
    """Registers (32, R) of uint32, or uint64 for f64, -> patterns of elements (32, E), lowest bits first."""
    bits = BITS[kind]
    if bits == 64:
        return registers
    if bits >= 8:
        return np.ascontiguousarray(registers, np.uint32).view(f"u{bits // 8}")
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    pieces = (registers[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return pieces.reshape(len(registers), -1).astype(np.uint8)


def join(elements: Array, kind: str) -> Array:
    """The inverse of `split`."""
    bits = BITS[kind]
    if bits == 64:
        return elements
    if bits >= 8:
        return np.ascontiguousarray(elements).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    pieces = elements.astype(np.uint32).reshape(len(elements), -1, len(shifts))
    return np.bitwise_or.reduce(pieces << shifts, axis=2)


def values(patterns: Array, kind: str) -> Array:
    """Patterns -> float64, float32 (f32), int64 (integers) or 0 and 1 (b1)."""
    if kind == "f64":
        return patterns.view(np.float64)
    if kind in ("f32", "s32"):
        return patterns.view(np.float32 if kind == "f32" else np.int32)
    if kind in ("s4", "u4", "b1"):
        wide = patterns.astype(np.int64)
        return (wide ^ 8) - 8 if kind == "s4" else wide
    return tensor_core.operand_values(patterns, kind)


def patterns(numbers: Array, kind: str) -> Array:
    """The inverse of `values` for results."""
    if kind == "f16":
        return tensor_core.numeric.f32_to_f16(numbers.astype(np.float32))
    return np.ascontiguousarray(numbers).view({"f64": np.uint64}.get(kind, np.uint32))


def mma_places(p: Product, which: str) -> tuple[Array, Array]:
    """Rows and columns (32, E) of the elements that a lane of `mma.sync` holds of A, B (k, n), or C and D."""
    bits = min(BITS[p.a], 32)
    lane = np.arange(32)[:, None]
    if which == "c":
        rows, columns = mma.accumulator_coordinates()
        return (rows, columns) if p.m == 16 else (rows[:, :2], columns[:, :2])
    if which == "b":
        return mma.b_coordinates(p.k, bits)
    if p.m == 16:
        return mma.a_coordinates(p.k, bits)
    column, row = mma.b_coordinates(p.k, bits)  # of 8 rows: as B's columns
    return np.broadcast_to(lane // 4, row.shape), column


def wmma_places(shape: tuple[int, int, int], which: str, kind: str) -> tuple[Array, Array]:
    """Rows and columns (32, E) of a `wmma` fragment: `which` is a, b or c (D too)."""
    m, n, k = shape
    rows, columns = {"a": (m, k), "b": (k, n), "c": (m, n)}[which]
    count = rows * columns
    per_lane = 16 if kind == "f16" and which != "c" else count // 32
    index = np.arange(32 * per_lane).reshape(32, per_lane) % count
    if which == "b":
        return index % rows, index // rows
    return index // columns, index % columns


def gather(elements: Array, places: tuple[Array, Array], size: tuple[int, int]) -> Array:
    """The matrix of elements (32, E)."""
    matrix = np.zeros(size, elements.dtype)
    matrix[places] = elements
    return matrix
