"""`mma.sync.aligned.m16n8kK`: fragments and products.

A warp multiplies A (16, K) by B (K, 8) and adds C (16, 8). The K of one register pair is 16 bytes: K is 8 or
16 for f16 and bf16, 4 or 8 for tf32, 16 or 32 for e4m3, e5m2, s8 and u8. Registers are uint32 arrays (...,
32, R): lanes, then registers; leading axes are warps.

Source: PTX ISA, matrix fragments for mma.m16n8k*; checked against the layouts that CuTe's warp atoms report.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from .. import fast
from . import tensor_core

LANES = 32


@dataclasses.dataclass(frozen=True)
class Shape:
    """The opcode's D (16, 8) of type `d` = A (16, k) of `a` times B (k, 8) of `b`, plus C of `c`."""

    k: int
    d: str
    a: str
    b: str
    c: str
    saturate: bool = False

    @property
    def a_registers(self) -> int:
        """32-bit registers of A a lane: 2 or 4."""
        return self.k * tensor_core.OPERAND_BITS[self.a] // 64

    @property
    def b_registers(self) -> int:
        """32-bit registers of B a lane: 1 or 2."""
        return self.a_registers // 2

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers of C or D a lane: 4 for f32 and s32, 2 for f16."""
        return 2 if self.d == "f16" else 4


_OPCODE = re.compile(
    r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(\.satfinite)?(?:\.kind::f8f6f4)?\.(\w+)\.(\w+)\.(\w+)\.(\w+)"
)


def parse_opcode(opcode: str) -> Shape:
    """`mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32` -> Shape; ValueError for anything else."""
    match = _OPCODE.fullmatch(opcode)
    if not match:
        raise ValueError(f"opcode was {opcode!r}; it must be a dense mma.sync.aligned.m16n8kK.row.col")
    shape = Shape(int(match[1]), match[3], match[4], match[5], match[6], saturate=bool(match[2]))
    for dtype in (shape.a, shape.b):
        if np.dtype(tensor_core.storage_type(dtype)).itemsize * shape.k not in (16, 32):
            raise ValueError(f"opcode was {opcode!r}; k{shape.k} does not go with {dtype}")
    return shape


@functools.lru_cache(maxsize=16)
def a_coordinates(k: int, element_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of A, each int64 (32, elements): what element i of a lane holds, lowest bits first."""
    per_register = 32 // element_bits
    lane = np.arange(32)[:, None]
    register, within = np.divmod(np.arange(k // 2)[None, :], per_register)
    rows = lane // 4 + 8 * (register % 2)
    columns = (register // 2) * 4 * per_register + (lane % 4) * per_register + within
    return np.broadcast_to(rows, columns.shape), columns


@functools.lru_cache(maxsize=16)
def b_coordinates(k: int, element_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(k, n) coordinates of B, each int64 (32, elements): what element i of a lane holds."""
    per_register = 32 // element_bits
    lane = np.arange(32)[:, None]
    register, within = np.divmod(np.arange(k // 4)[None, :], per_register)
    k_index = register * 4 * per_register + (lane % 4) * per_register + within
    return k_index, np.broadcast_to(lane // 4, k_index.shape)


@functools.lru_cache(maxsize=1)
def accumulator_coordinates() -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of C and D, each int64 (32, 4): what element i of a lane holds."""
    lane = np.arange(32)[:, None]
    i = np.arange(4)[None, :]
    return lane // 4 + 8 * (i // 2), (lane % 4) * 2 + i % 2


def multiply(shape: Shape, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D's registers, uint32 (..., 32, R). `a`, `b`, `c`: registers, uint32 (..., 32, R), same leading axes.

    Rounding: see `tensor_core`.
    """
    bits = tensor_core.OPERAND_BITS[shape.a]
    left = _matrix(tensor_core.registers_to_values(a, shape.a), a_coordinates(shape.k, bits), (16, shape.k))
    right = _matrix(tensor_core.registers_to_values(b, shape.b), b_coordinates(shape.k, bits), (shape.k, 8))
    addend = _matrix(tensor_core.accumulator_elements(c, shape.c), accumulator_coordinates(), (16, 8))
    result = tensor_core.multiply_add(
        tensor_core.operand_values(left, shape.a),
        np.swapaxes(tensor_core.operand_values(right, shape.b), -1, -2),
        addend,
        shape.d,
        saturate=shape.saturate,
        accumulation=tensor_core.ACCUMULATION.get(("mma", shape.a)),
    )
    rows, columns = accumulator_coordinates()
    return tensor_core.accumulator_registers(result[..., rows, columns], shape.d)


def product(shape: Shape, a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """The same of one warp, register by register: uint32 (32,) each."""
    compiled = fast.kernels()
    model = tensor_core.ACCUMULATION.get(("mma", shape.a))
    if compiled is None or model is None or shape.d != "f32" or shape.a not in ("f16", "bf16", "tf32"):
        result = multiply(shape, *(np.stack(registers, axis=1) for registers in (a, b, c)))
        return list(np.ascontiguousarray(result.T))
    words = np.concatenate((*a, *b, *c, *c)).reshape(-1, LANES)  # the last four become D
    count = len(words)
    plan = np.array([[*range(count - 4, count), *range(count - 4)]])
    wide = shape.a == "tf32"
    values = tensor_core.all_values("f16" if wide else shape.a)
    compiled.products(
        words.reshape(-1), plan * 32, values, shape.k, wide, model.group, model.bits, model.fraction
    )
    return list(words[-4:])


def _matrix(
    elements: np.ndarray, coordinates: tuple[np.ndarray, np.ndarray], size: tuple[int, int]
) -> np.ndarray:
    matrix = np.empty((*elements.shape[:-2], *size), dtype=elements.dtype)
    matrix[..., coordinates[0], coordinates[1]] = elements
    return matrix
