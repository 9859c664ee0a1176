"""`wgmma.mma_async`: matrix descriptors, operand addresses in shared memory, fragments, products.

An instruction multiplies A (64, K) by B (N, K) transposed and adds to D (64, N). K is 32 bytes of elements:
16 of f16 or bf16, 8 of tf32, 32 of e4m3, e5m2, s8 or u8. A comes from shared memory or from registers, B from
shared memory; D lies in the registers of the 128 threads of the warpgroup.

Sources: PTX ISA, asynchronous warpgroup matrix instructions; checked against the layouts that CuTe's
warpgroup atoms report.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from .. import fast
from . import tensor_core
from .swizzle import Swizzle, swizzle


class MatrixDescriptorError(ValueError):
    """A shared-memory matrix descriptor that is malformed or not modelled."""


# The descriptor numbers its swizzles the other way round than the tensor map does.
_SWIZZLE_OF_CODE = (Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)
_KNOWN_BITS = 0xC00E3FFF3FFF3FFF


@dataclasses.dataclass(frozen=True)
class MatrixDescriptor:
    """A decoded descriptor. `start`, `leading` and `stride` are in bytes; `start` is a shared memory address.

    With `swizzle` NONE and K-major, `stride` separates groups of 8 rows and `leading` the two 16-byte halves
    of K. With a swizzle and K-major, `stride` separates groups of 8 rows and `leading` is unused. MN-major:
    with a swizzle, `stride` separates groups of 8 along K and `leading` spans of the swizzle along M or N;
    without,
    `stride` separates 16-byte pieces along M or N and `leading` groups of 8 along K.
    """

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: Swizzle


def decode_descriptor(descriptor: int) -> MatrixDescriptor:
    """Decode a 64-bit matrix descriptor.

    Bits, with the low 4 bits of each byte count left out: [0, 14) start address, [16, 30) leading byte
    offset, [32, 46) stride byte offset, [49, 52) base offset, [62, 64) swizzle. Raises MatrixDescriptorError
    for other bits and for a base offset (a tile that does not start on the repeat of its swizzle), which no
    known compiler emits and which is not modelled.
    """
    word = int(descriptor) & 0xFFFFFFFFFFFFFFFF
    if word & ~_KNOWN_BITS:
        raise MatrixDescriptorError(
            f"matrix descriptor {word:#018x}: bits {word & ~_KNOWN_BITS:#x} must be zero"
        )
    base_offset = (word >> 49) & 7
    if base_offset:
        raise MatrixDescriptorError(
            f"matrix descriptor {word:#018x}: base offset {base_offset} is not modelled"
        )
    return MatrixDescriptor(
        start=(word & 0x3FFF) << 4,
        leading=((word >> 16) & 0x3FFF) << 4,
        stride=((word >> 32) & 0x3FFF) << 4,
        base_offset=base_offset,
        swizzle=_SWIZZLE_OF_CODE[word >> 62],
    )


@dataclasses.dataclass(frozen=True)
class Shape:
    """The opcode's D (64, n) of `accumulator` += A (64, k) of `a` times B (n, k) of `b`."""

    n: int
    k: int
    accumulator: str
    a: str
    b: str
    saturate: bool = False

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers of D in each thread."""
        return self.n // 4 if self.accumulator == "f16" else self.n // 2


_OPCODE = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)")


def parse_opcode(opcode: str) -> Shape:
    """`wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16` -> Shape; ValueError for anything else."""
    match = _OPCODE.fullmatch(opcode)
    if not match:
        raise ValueError(f"opcode was {opcode!r}; it must be a dense wgmma.mma_async.sync.aligned.m64nNkK")
    shape = Shape(int(match[1]), int(match[2]), match[4], match[5], match[6], saturate=bool(match[3]))
    for dtype in (shape.a, shape.b):
        if tensor_core.storage_type(dtype)().nbytes * shape.k != 32:
            raise ValueError(f"opcode was {opcode!r}; k{shape.k} does not go with {dtype}")
    return shape


@functools.lru_cache(maxsize=256)
def operand_addresses(
    descriptor: MatrixDescriptor, rows: int, element_bytes: int, transposed: bool = False
) -> np.ndarray:
    """Shared memory byte address of each element of A (rows = 64) or B (rows = n): int64 (rows, 32 / size).

    `transposed` is the instruction's transpose immediate: False for K-major, True for M- or N-major (only
    16-bit elements have it). Raises MatrixDescriptorError for a transposed operand of another width.
    """
    if transposed and element_bytes != 2:
        raise MatrixDescriptorError(
            f"a transposed operand needs 16-bit elements, not {8 * element_bytes}-bit"
        )
    offsets = _offsets(
        descriptor.leading, descriptor.stride, descriptor.swizzle, rows, element_bytes, transposed
    )
    return swizzle(descriptor.start + offsets, descriptor.swizzle)


@functools.lru_cache(maxsize=256)
def operand_pieces(
    descriptor: MatrixDescriptor, rows: int, element_bytes: int, transposed: bool = False
) -> np.ndarray:
    """The 16-byte pieces of shared memory that an operand lies in, by number and in order.

    Sixteen bytes are the smallest piece that any layout keeps together.
    """
    return np.unique(operand_addresses(descriptor, rows, element_bytes, transposed) >> 4)


@functools.lru_cache(maxsize=256)
def _offsets(leading: int, stride: int, mode: Swizzle, rows: int, size: int, transposed: bool) -> np.ndarray:
    """Byte offsets before the swizzle."""
    row = np.arange(rows, dtype=np.int64)[:, None]
    k = np.arange(32 // size, dtype=np.int64)[None, :]
    if not transposed:
        k_byte = k * size
        if mode == Swizzle.NONE:
            out = (row % 8) * 16 + (row // 8) * stride + (k_byte // 16) * leading + k_byte % 16
        else:
            out = (row % 8) * mode.span + (row // 8) * stride + k_byte
    else:
        row_byte = row * size
        if mode == Swizzle.NONE:
            out = row_byte % 16 + (row_byte // 16) * stride + (k % 8) * 16 + (k // 8) * leading
        else:
            span = mode.span
            out = row_byte % span + (row_byte // span) * leading + (k % 8) * span + (k // 8) * stride
    out = np.ascontiguousarray(np.broadcast_to(out, (rows, 32 // size)))
    out.setflags(write=False)
    return out


def read_operand(
    shared: np.ndarray, descriptor: MatrixDescriptor, rows: int, dtype: str, transposed: bool = False
) -> np.ndarray:
    """Element patterns (rows, K) of an operand, in the unsigned type of `dtype`.

    `shared`: the CTA's shared memory as a uint8 array that starts at shared address 0. Raises
    MatrixDescriptorError where an element lies outside of it.
    """
    storage = np.dtype(tensor_core.storage_type(dtype))
    addresses = operand_addresses(descriptor, rows, storage.itemsize, transposed)
    if int(addresses.max()) + storage.itemsize > shared.size:
        raise MatrixDescriptorError(
            f"operand reaches shared address {int(addresses.max()):#x}; the CTA has {shared.size:#x} bytes"
        )
    whole = shared[: shared.size // storage.itemsize * storage.itemsize].view(storage)
    return whole[addresses // storage.itemsize]


@functools.lru_cache(maxsize=64)
def accumulator_coordinates(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of D, each int64 (128, n / 2): what element i of thread t holds.

    Elements are in the order of registers; an f16 accumulator has elements 2r (low half) and 2r + 1 in
    register r.
    """
    thread = np.arange(128)[:, None]
    i = np.arange(n // 2)[None, :]
    rows = (thread // 32) * 16 + (thread % 32) // 4 + 8 * (i // 2 % 2)
    columns = (i // 4) * 8 + (thread % 4) * 2 + i % 2
    return rows, columns


def accumulator_to_matrix(registers: np.ndarray, shape: Shape) -> np.ndarray:
    """Accumulator registers uint32 (128, R) -> D (64, n), float32 or int32."""
    e = tensor_core.accumulator_elements(registers, shape.accumulator)
    # (warp, group, quad, block, half, element) -> rows (warp, half, group), columns (block, quad, element)
    return e.reshape(4, 8, 4, shape.n // 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, shape.n)


def matrix_to_accumulator(matrix: np.ndarray, shape: Shape) -> np.ndarray:
    """D (64, n) -> accumulator registers uint32 (128, R): the inverse of `accumulator_to_matrix`."""
    e = matrix.reshape(4, 2, 8, shape.n // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(128, shape.n // 2)
    return tensor_core.accumulator_registers(e, shape.accumulator)


@functools.lru_cache(maxsize=8)
def a_coordinates(element_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of A in registers, each int64 (128, 128 / bits): what element i of thread t holds.

    Elements are in the order of the four registers, lowest bits first.
    """
    per_register = 32 // element_bits
    thread = np.arange(128)[:, None]
    i = np.arange(4 * per_register)[None, :]
    register, within = i // per_register, i % per_register
    rows = (thread // 32) * 16 + (thread % 32) // 4 + 8 * (register % 2)
    columns = (register // 2) * 4 * per_register + (thread % 4) * per_register + within
    return rows, columns


def a_from_registers(registers: np.ndarray, dtype: str) -> np.ndarray:
    """A registers uint32 (128, 4) -> element patterns (64, K)."""
    elements = tensor_core.registers_to_values(registers, dtype)
    bits = tensor_core.OPERAND_BITS[dtype]
    rows, columns = a_coordinates(bits)
    matrix = np.empty((64, 256 // bits), dtype=elements.dtype)
    matrix[rows, columns] = elements
    return matrix


def multiply(
    shape: Shape, a: np.ndarray, b: np.ndarray, d: np.ndarray | None,
    *, negate_a: bool = False, negate_b: bool = False, saturate: bool = False,
) -> np.ndarray:  # fmt: skip
    """The new accumulator registers, uint32 (128, R).

    `a`: element patterns (64, K); `b`: element patterns (n, K); `d`: accumulator registers uint32 (128, R),
    or None where scale-d is false. `negate_a`, `negate_b`: imm-scale-a or -b is -1. Rounding: see
    `tensor_core`.
    """
    c = None if d is None else accumulator_to_matrix(d, shape)
    left = tensor_core.operand_values(a, shape.a)
    right = tensor_core.operand_values(b, shape.b)
    if negate_a != negate_b:
        left = -left
    accumulation = tensor_core.ACCUMULATION.get(("wgmma", shape.a))
    result = tensor_core.multiply_add(
        left, right, c, shape.accumulator, saturate=saturate or shape.saturate, accumulation=accumulation
    )
    return matrix_to_accumulator(result, shape)


def accumulate(
    shape: Shape, a: np.ndarray, b: np.ndarray, blocks: list[np.ndarray], add: bool,
    *, negate_a: bool = False, negate_b: bool = False, saturate: bool = False,
) -> None:  # fmt: skip
    """The same in place: `blocks` are the accumulators of the four warps, uint32 (R, 32) each.

    `add`: scale-d, without which what they hold does not count.
    """
    model = tensor_core.ACCUMULATION.get(("wgmma", shape.a))
    compiled = fast.kernels()
    if compiled is not None and model is not None and shape.accumulator == "f32":
        left = tensor_core.operand_values(a, shape.a)
        right = tensor_core.operand_values(b, shape.b)
        compiled.warpgroup_product(
            -left if negate_a != negate_b else left, np.ascontiguousarray(right.T), tuple(blocks), add,
            (model.group, model.bits, model.fraction),
        )  # fmt: skip
        return
    d = np.concatenate([block.T for block in blocks]) if add else None
    result = multiply(shape, a, b, d, negate_a=negate_a, negate_b=negate_b, saturate=saturate)
    for i, block in enumerate(blocks):
        block[:] = result[32 * i : 32 * i + 32].T
