"""Operand formats and accumulation that `wgmma` and `mma.sync` share.

Accumulation model. An instruction computes D = C + A * B over its K elements. Here all products and C are
summed in float64 and rounded once to the accumulator's format, nearest even. The hardware aligns the products
of a group of K elements to the largest of them, truncates what falls below a few extra bits, and rounds
towards zero, so on random inputs the two differ in the last bits. Inputs whose sums are exactly representable
agree bit for bit. fp8 on sm_90 keeps only about 14 bits when it aligns, so its last bits differ by more (near
2^-13 of the largest partial sum); sums of small integers stay exact there too.
"""

from __future__ import annotations

import numpy as np

from . import numeric

OPERAND_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_STORAGE = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def storage_type(dtype: str) -> type:
    """Unsigned NumPy type of one operand element; ValueError names an unknown type."""
    if dtype not in OPERAND_BITS:
        raise ValueError(f"operand type was {dtype!r}; it must be one of {sorted(OPERAND_BITS)}")
    return _STORAGE[OPERAND_BITS[dtype]]


def operand_values(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Patterns of operand elements -> float64 (int64 for s8 and u8), exact; tf32 ignores its low 13 bits."""
    if dtype in ("s8", "u8"):
        return bits.view(np.int8 if dtype == "s8" else np.uint8).astype(np.int64)
    with np.errstate(invalid="ignore"):
        return numeric.decode(bits, dtype).astype(np.float64)


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, accumulator: str,
                 *, saturate: bool = False) -> np.ndarray:  # fmt: skip
    """c + a @ transposed b for one instruction.

    `a` (..., M, K), `b` (..., N, K): what `operand_values` gave, float64 or int64; `c`: (..., M, N) float32
    or int32 or None for zero; `accumulator`: f32, f16 or s32. Returns (..., M, N): float32 (f32, and f16
    values rounded to f16) or int32.
    `saturate` clamps s32 instead of wrapping.
    """
    if accumulator == "s32":
        total = a @ np.swapaxes(b, -1, -2)
        if c is not None:
            total = total + c.astype(np.int64)
        if saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        return total.astype(np.int32)
    if accumulator not in ("f32", "f16"):
        raise ValueError(f"accumulator type was {accumulator!r}; it must be f32, f16 or s32")
    with np.errstate(all="ignore"):
        total = a @ np.swapaxes(b, -1, -2)
        if c is not None:
            total = total + c
        rounded = total.astype(np.float32 if accumulator == "f32" else np.float16).astype(np.float32)
    return numeric.canonical(rounded)


def registers_to_values(registers: np.ndarray, dtype: str) -> np.ndarray:
    """uint32 registers (..., R) -> patterns (..., R * 32 / bits), lowest bits of a register first."""
    return np.ascontiguousarray(registers, dtype=np.uint32).view(storage_type(dtype))


def accumulator_elements(registers: np.ndarray, accumulator: str) -> np.ndarray:
    """uint32 accumulator registers (..., R) -> float32 (f32: R, f16: 2R values) or int32 (s32: R)."""
    registers = np.ascontiguousarray(registers, dtype=np.uint32)
    if accumulator == "f16":
        return numeric.f16_to_f32(registers.view(np.uint16))
    if accumulator not in ("f32", "s32"):
        raise ValueError(f"accumulator type was {accumulator!r}; it must be f32, f16 or s32")
    return registers.view(np.float32 if accumulator == "f32" else np.int32)


def accumulator_registers(elements: np.ndarray, accumulator: str) -> np.ndarray:
    """The inverse of `accumulator_elements`."""
    if accumulator == "f16":
        return np.ascontiguousarray(numeric.f32_to_f16(elements)).view(np.uint32)
    return np.ascontiguousarray(elements).view(np.uint32)
