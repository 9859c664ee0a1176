"""Operand formats and accumulation that `wgmma` and `mma.sync` share.

Two models of the accumulation D = C + A * B over an instruction's K elements:

- *nearest*: all products and C are summed in float64 and rounded once, nearest even.
- *aligned* (`Accumulation`): as published measurements of tensor cores describe them: the products of a
  group of K elements and the running sum are aligned to the largest exponent among them, what falls below a
  number of bits is cut off, and the sum is rounded towards zero; groups follow one another.

`ACCUMULATION` says which one an instruction uses. It was chosen with `crosscheck.calibrate` from the results
of an H200, which it reproduces bit for bit on random values. Another GPU may keep fewer bits: Ampere is said
to align groups of 8 with 24. `mma.sync` of fp8, which Hopper has for compatibility alone, is *nearest*.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from .. import fast
from . import numeric

OPERAND_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_STORAGE = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """The *aligned* model: `group` elements of K at a time, `bits` bits kept below the largest exponent.

    `fraction`: bits of the running sum's significand after its point, 23 for a whole float32.
    """

    group: int
    bits: int
    fraction: int = 23


# Which model an instruction uses, by ("wgmma" or "mma", type of A); *nearest* where there is no entry.
ACCUMULATION: dict[tuple[str, str], Accumulation] = {
    ("mma", "f16"): Accumulation(16, 25),
    ("mma", "bf16"): Accumulation(16, 25),
    ("mma", "tf32"): Accumulation(8, 25),
    ("wgmma", "f16"): Accumulation(16, 25),
    ("wgmma", "bf16"): Accumulation(16, 25),
    ("wgmma", "tf32"): Accumulation(8, 25),
    ("wgmma", "e4m3"): Accumulation(32, 13, 13),
    ("wgmma", "e5m2"): Accumulation(32, 13, 13),
}


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


@functools.lru_cache(maxsize=4)
def all_values(dtype: str) -> np.ndarray:
    """The float32 value of each pattern of f16 or bf16."""
    with np.errstate(invalid="ignore"):
        return numeric.decode(np.arange(1 << 16, dtype=np.uint16), dtype)


def multiply_add(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, accumulator: str,
    *, saturate: bool = False, accumulation: Accumulation | None = None,
) -> np.ndarray:  # fmt: skip
    """c + a @ transposed b for one instruction.

    `a` (..., M, K), `b` (..., N, K): what `operand_values` gave, float64 or int64; `c`: (..., M, N) float32
    or int32 or None for zero; `accumulator`: f32, f16 or s32. Returns (..., M, N): float32 (f32, and f16
    values rounded to f16) or int32. `saturate` clamps s32 instead of wrapping; `accumulation` None is
    *nearest*.
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
    compiled = fast.kernels()
    if compiled is not None and accumulation is not None and accumulator == "f32" and a.ndim == b.ndim == 2:
        with np.errstate(invalid="ignore"):
            start = np.zeros((len(a), len(b))) if c is None else c.astype(np.float64)
        right = np.ascontiguousarray(b.T)
        left = np.ascontiguousarray(a)
        return compiled.product(
            left, right, start, accumulation.group, accumulation.bits, accumulation.fraction
        )
    with np.errstate(all="ignore"):
        total = a @ np.swapaxes(b, -1, -2)
        if c is not None:
            total = total + c
        if accumulation is not None:
            total = np.where(np.isfinite(total), _aligned(a, b, c, accumulation), total)
        rounded = total.astype(np.float32 if accumulator == "f32" else np.float16).astype(np.float32)
    return numeric.canonical(rounded)


def _exponents(values: np.ndarray) -> np.ndarray:
    """floor(log2 |x|); far below every other for zeros."""
    _, exponent = np.frexp(values)
    return np.where(values == 0, -2000, exponent - 1)


def _aligned(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, model: Accumulation) -> np.ndarray:
    """The *aligned* model's sum in float64, with the significand of a float32."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2])
    total = np.zeros(shape) if c is None else np.broadcast_to(c.astype(np.float64), shape)
    form = dataclasses.replace(numeric.F32, mantissa_bits=model.fraction)
    a_exponent, b_exponent = _exponents(a), _exponents(b)
    for start in range(0, a.shape[-1], model.group):
        part = slice(start, start + model.group)
        products = a[..., :, None, part] * b[..., None, :, part]
        # The hardware does not normalise a product before it aligns it: its exponent is the factors' sum.
        exponents = a_exponent[..., :, None, part] + b_exponent[..., None, :, part]
        largest = np.maximum(np.maximum(exponents.max(axis=-1), _exponents(total)), -1000)
        shift = model.bits - largest
        kept = np.trunc(np.ldexp(products, shift[..., None])).sum(axis=-1) + np.trunc(np.ldexp(total, shift))
        total = numeric.round_to(np.ldexp(kept, -shift), form, "rz")
    return total


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
