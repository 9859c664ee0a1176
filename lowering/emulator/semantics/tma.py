"""TMA: the 128-byte tensor map descriptor, and which bytes a box copy touches.

The bit layout of the descriptor is not published. It was derived twice, and both agree: from what the CuTe
DSL's compiled host code stores when one property of a tensor map is varied at a time, and from the words that
ptxas rewrites for each field of `tensormap.replace`. In 64-bit words, least significant bit first:

| word | bits | meaning |
|---|---|---|
| 0 | 4-56 | global address (16-byte aligned) |
| 1 | 1 | set in every tiled descriptor |
| 1 | 4-6 | rank - 1 |
| 1 | 7-10 | element type |
| 1 | 11-12 | interleave: none, 16B, 32B |
| 1 | 13-14 | swizzle: none, 32B, 64B, 128B |
| 1 | 15 | out-of-bounds fill: zero, NaN |
| 1 | 16 | float32 is rounded to tf32 on load |
| 1 | 17-18 | L2 promotion: none, 64B, 128B, 256B |
| 1 | 21 | the tensor spans 128 KiB or more (a hint) |
| 1-3 | 32-63 of word 1, words 2, low half of 3 | strides of dimensions 1 to 4 over 16, low 32 bits each |
| 3 | 32-47 | bits 32-35 of those four strides |
| 4-6 | halves | extents - 1 of dimensions 0 to 4, 32 bits each |
| 6 | 32-46 | element strides - 1, 3 bits each |
| 6, 7 | 56-63 of word 6, 0-31 of word 7 | box extents - 1, 8 bits each |

A descriptor must also be one that the hardware takes: `_check`. What it does not take faults as an illegal
instruction on the GPU.

Words 8 to 15 are padding: the compiled host code leaves stack garbage there, so they are not looked at. Any
other bit that is set is an error, since its meaning is not known.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..spans import of_elements
from .swizzle import Swizzle, swizzle


class TensorMapError(ValueError):
    """A tensor map descriptor, or a copy through one, that is malformed or not modelled."""


class ElementType(enum.IntEnum):
    """Element types, numbered as in the descriptor; TF32 stands for float32 with the rounding bit."""

    U8 = 0
    U16 = 1
    U32 = 2
    S32 = 3
    U64 = 4
    S64 = 5
    F16 = 6
    F32 = 7
    F32_FTZ = 8
    F64 = 9
    BF16 = 10
    TF32 = 16 + 7
    TF32_FTZ = 16 + 8

    @property
    def bytes(self) -> int:
        return _ELEMENT_BYTES[self]


_ELEMENT_BYTES = {
    ElementType.U8: 1, ElementType.U16: 2, ElementType.F16: 2, ElementType.BF16: 2,
    ElementType.U32: 4, ElementType.S32: 4, ElementType.F32: 4, ElementType.F32_FTZ: 4,
    ElementType.TF32: 4, ElementType.TF32_FTZ: 4,
    ElementType.U64: 8, ElementType.S64: 8, ElementType.F64: 8,
}  # fmt: skip

# Bits of each word whose meaning is known; the rest must be zero.
_KNOWN_BITS = (
    0x01FFFFFFFFFFFFF0, 0xFFFFFFFF0027FFF2, 0xFFFFFFFFFFFFFFFF, 0x0000FFFFFFFFFFFF,
    0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0xFF007FFFFFFFFFFF, 0x00000000FFFFFFFF,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A decoded descriptor. Tuples have one entry a dimension, fastest dimension first.

    `strides` are in bytes, with the element size as the first. `l2_promotion` is in bytes (0: none) and has
    no effect on results. `nan_fill`: out-of-bounds elements of floating types read as NaN instead of zero.
    """

    address: int
    element: ElementType
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: Swizzle
    l2_promotion: int
    nan_fill: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.address, self.extents, self.strides, self.box)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def box_elements(self) -> tuple[int, ...]:
        """Elements that one copy moves along each dimension: ceil(box / element stride).

        The element stride of dimension 0 has no effect in this (non-interleaved) layout.
        """
        rest = (-(-b // s) for b, s in zip(self.box[1:], self.element_strides[1:], strict=True))
        return (self.box[0], *rest)

    @property
    def transaction_bytes(self) -> int:
        """Bytes that one copy counts towards its mbarrier: the full box, in bounds or not."""
        return math.prod(self.box_elements) * self.element.bytes

    @property
    def row_pitch(self) -> int:
        """Bytes between rows of the box in shared memory: the inner box, or the swizzle span if wider."""
        inner = self.box[0] * self.element.bytes
        return inner if self.swizzle == Swizzle.NONE else max(inner, self.swizzle.span)


class BoxMap(NamedTuple):
    """Bytes that one box copy touches; arrays hold one entry an element, dimension 0 fastest.

    `global_address`: int64 byte addresses; those where `valid` is False must not be dereferenced.
    `shared_address`: int64 byte addresses in the CTA's shared memory window, swizzled.
    `valid`: bool, whether the element is copied: it lies within the tensor, or a store reaches it.
    `element_bytes`: size of an element; `transaction_bytes`: what complete_tx counts.
    """

    global_address: np.ndarray
    shared_address: np.ndarray
    valid: np.ndarray
    element_bytes: int
    transaction_bytes: int


def decode_descriptor(raw: bytes | np.ndarray) -> TensorMap:
    """Decode the 128 bytes of a CUtensorMap (`bytes`, or a uint8 or uint64 array).

    Raises TensorMapError for bits of unknown meaning and for properties that are not modelled: interleaved
    layouts, sub-byte types, im2col.
    """
    data = raw if isinstance(raw, bytes) else np.ascontiguousarray(raw).tobytes()
    if len(data) < 64:
        raise TensorMapError(f"a tensor map descriptor has 128 bytes; got {len(data)}")
    words = tuple(int(w) for w in np.frombuffer(data, dtype="<u8", count=8))
    return _decode_words(words)


@functools.lru_cache(maxsize=256)
def _decode_words(words: tuple[int, ...]) -> TensorMap:
    for index, (word, known) in enumerate(zip(words, _KNOWN_BITS, strict=True)):
        if word & ~known:
            raise TensorMapError(
                f"tensor map descriptor: word {index} is {word:#018x}; bits {word & ~known:#x} have no known "
                "meaning (im2col, gather or a swizzle of another architecture?)"
            )
    flags = words[1]
    if not flags & 2:
        raise TensorMapError(
            f"not a tensor map descriptor: bit 1 of word 1 ({flags:#018x}) must be set; is the address right?"
        )
    rank = _bits(flags, 4, 3) + 1
    if rank > 5:
        raise TensorMapError(f"tensor map descriptor: rank {rank} is over 5")
    code = _bits(flags, 7, 4) + 16 * _bits(flags, 16, 1)
    try:
        element = ElementType(code)
    except ValueError:
        raise TensorMapError(
            f"tensor map descriptor: element type {code} is not modelled (sub-byte or unknown)"
        ) from None
    interleave = _bits(flags, 11, 2)
    if interleave:
        raise TensorMapError(f"tensor map descriptor: interleaved layout {interleave} is not modelled")
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
    strides = tuple((halves[3 + d] | _bits(words[3], 32 + 4 * d, 4) << 32) * 16 for d in range(4))
    boxes = (words[6] >> 56) | (words[7] << 8)
    tensor = TensorMap(
        address=words[0],
        element=element,
        extents=tuple(half + 1 for half in halves[8 : 8 + rank]),
        strides=(element.bytes, *strides[: rank - 1]),
        box=tuple(_bits(boxes, 8 * d, 8) + 1 for d in range(rank)),
        element_strides=tuple(_bits(words[6], 32 + 3 * d, 3) + 1 for d in range(rank)),
        swizzle=Swizzle(_bits(flags, 13, 2)),
        l2_promotion=(0, 64, 128, 256)[_bits(flags, 17, 2)],
        nan_fill=bool(_bits(flags, 15, 1)),
    )
    _check(tensor)
    return tensor


def _check(tensor: TensorMap) -> None:
    """TensorMapError for a tiled map that the hardware refuses.

    Source: the CUDA driver API's rules for cuTensorMapEncodeTiled. Its rules for the base address and the
    strides (multiples of 16 bytes) cannot be broken here: the descriptor does not hold their low bits.
    """
    inner = tensor.box[0] * tensor.element.bytes
    if inner % 16:
        raise TensorMapError(f"the box's inner extent of {inner} bytes is not a multiple of 16")
    if tensor.swizzle != Swizzle.NONE and inner > tensor.swizzle.span:
        raise TensorMapError(
            f"the box's inner extent of {inner} bytes is over the {tensor.swizzle.span} bytes of its swizzle"
        )
    if tensor.nan_fill:
        fill_value(tensor)


def _bits(word: int, start: int, count: int) -> int:
    return (word >> start) & ((1 << count) - 1)


def box_map(tensor: TensorMap, coords: Iterable[int], shared_address: int, *, store: bool = False) -> BoxMap:
    """Global and shared bytes that a tile-mode copy of one box touches.

    `coords`: signed element coordinates of the box's first element, fastest dimension first (as in the PTX
    operand `{c0, c1, ...}`), the first a multiple of 16 bytes: any other faults as an illegal instruction on
    an H200. `shared_address`: byte address of the box in the CTA's shared memory window. Loads fill elements
    that are not valid (`fill_value`).

    `store`: for stores and reductions, which skip elements that are not valid. As an H200 does it: their
    coordinates must not be negative (an illegal instruction), and dimension 0 is cut at 16 bytes, so where
    its extent is no multiple of that, they write the elements between.

    Raises TensorMapError for a wrong number of coordinates, for a box that is misaligned in global or in
    shared memory, and for a store that starts before the tensor.
    """
    coords = tuple(int(c) for c in coords)
    if len(coords) != tensor.rank:
        raise TensorMapError(f"a copy through a rank {tensor.rank} tensor map got {len(coords)} coordinates")
    offset = coords[0] * tensor.element.bytes
    if offset % 16:
        raise TensorMapError(
            f"a box that starts at element {coords[0]}, {offset} bytes into its row: needs a multiple of 16"
        )
    if store and min(coords) < 0:
        raise TensorMapError(f"a store that starts at {coords}: its coordinates must not be negative")
    if shared_address % 128:
        raise TensorMapError(f"shared memory address {shared_address:#x} of a box must be 128-byte aligned")
    sizes = tensor.box_elements
    relative_global, relative_shared = _relative(tensor)
    base = tensor.address + sum(c * s for c, s in zip(coords, tensor.strides, strict=True))
    valid = np.ones((1,) * tensor.rank, dtype=bool)
    for d in range(tensor.rank):
        step = tensor.element_strides[d] if d else 1
        position = coords[d] + np.arange(sizes[d]) * step
        end = tensor.extents[d]
        if store and d == 0:
            unit = max(16 // tensor.element.bytes, 1)
            end = -(-end // unit) * unit
        inside = (position >= 0) & (position < end)
        valid = valid & inside.reshape((-1,) + (1,) * d)
    shape = tuple(reversed(sizes))
    return BoxMap(
        global_address=base + relative_global,
        shared_address=swizzle(shared_address + relative_shared, tensor.swizzle),
        valid=np.broadcast_to(valid, shape).reshape(-1),
        element_bytes=tensor.element.bytes,
        transaction_bytes=tensor.transaction_bytes,
    )


@functools.lru_cache(maxsize=256)
def _relative(tensor: TensorMap) -> tuple[np.ndarray, np.ndarray]:
    """Byte offsets of each element in global and, before the swizzle, in shared memory."""
    sizes = tensor.box_elements
    index = np.indices(tuple(reversed(sizes)), dtype=np.int64).reshape(tensor.rank, -1)[::-1]
    offset = np.zeros(index.shape[1], dtype=np.int64)
    for d in range(tensor.rank):
        step = tensor.element_strides[d] if d else 1
        offset += index[d] * (step * tensor.strides[d])
    row = np.zeros(index.shape[1], dtype=np.int64)
    for d in reversed(range(1, tensor.rank)):
        row = row * sizes[d] + index[d]
    shared = row * tensor.row_pitch + index[0] * tensor.element.bytes
    offset.setflags(write=False)
    shared.setflags(write=False)
    return offset, shared


class WholeBox(NamedTuple):
    """A box within its tensor: ``row_bytes`` from each of ``rows``, and 16-byte chunks of shared memory.

    `rows`: int64 addresses. `chunks`: int64 numbers of the chunks, in the order of the rows' bytes.
    """

    rows: np.ndarray
    row_bytes: int
    chunks: np.ndarray


CHUNK = 16
"""Bytes that every swizzle keeps together; boxes start and end at multiples of it."""


def whole_box(tensor: TensorMap, coords: Iterable[int], shared_address: int) -> WholeBox | None:
    """The result of `box_map` for a box within its tensor; None for others, and for errors."""
    coords = tuple(coords)
    if len(coords) != tensor.rank or coords[0] * tensor.element.bytes % CHUNK or shared_address % 128:
        return None
    steps = (1, *tensor.element_strides[1:])
    ends = (c + (n - 1) * s for c, n, s in zip(coords, tensor.box_elements, steps, strict=True))
    if min(coords) < 0 or any(end >= size for end, size in zip(ends, tensor.extents, strict=True)):
        return None
    rows, row_bytes = rows_of(tensor)
    if row_bytes % CHUNK:
        return None
    base = tensor.address + sum(c * s for c, s in zip(coords, tensor.strides, strict=True))
    return WholeBox(base + rows, row_bytes, chunks_of(tensor, shared_address))


@functools.lru_cache(maxsize=256)
def rows_of(tensor: TensorMap) -> tuple[np.ndarray, int]:
    """Offsets of the runs of bytes of a box in global memory, and the bytes of each."""
    spans = of_elements(_relative(tensor)[0], tensor.element.bytes)
    return spans.starts, spans.size


@functools.lru_cache(maxsize=512)
def chunks_of(tensor: TensorMap, shared_address: int) -> np.ndarray:
    """Numbers of the chunks of shared memory that a box at this address fills."""
    first = _relative(tensor)[1][:: CHUNK // tensor.element.bytes]
    chunks = swizzle(shared_address + first, tensor.swizzle) // CHUNK
    chunks.setflags(write=False)
    return chunks


def fill_value(tensor: TensorMap) -> int:
    """Bit pattern that a load writes for an element outside the tensor (zero, or the type's NaN)."""
    if not tensor.nan_fill:
        return 0
    if tensor.element in (ElementType.F16, ElementType.BF16):
        return 0x7FFF
    if tensor.element == ElementType.F64:
        return 0x7FFFFFFFFFFFFFFF
    if tensor.element.bytes == 4 and tensor.element not in (ElementType.U32, ElementType.S32):
        return 0x7FFFFFFF
    raise TensorMapError(f"NaN fill of {tensor.element.name} elements has no meaning")


def converts(tensor: TensorMap) -> bool:
    """True if loads change values on their way."""
    return tensor.element in (ElementType.F32_FTZ, ElementType.TF32_FTZ, ElementType.TF32)


def convert_on_load(tensor: TensorMap, bits: np.ndarray) -> np.ndarray:
    """Values that a load writes for elements read; `bits` is an unsigned array of the element's width.

    Only the tf32 and ftz types change anything: float32 rounds to the nearest tf32 (ties to even; the low 13
    bits become zero; every NaN becomes 0x7FFFE000, all as an H200 does), and subnormals become zero of their
    sign.
    """
    out = bits
    if tensor.element in (ElementType.F32_FTZ, ElementType.TF32_FTZ):
        out = np.where((out & 0x7F800000) == 0, out & np.uint32(0x80000000), out)
    if tensor.element in (ElementType.TF32, ElementType.TF32_FTZ):
        magnitude = out & 0x7FFFFFFF
        rounded = (out + np.uint32(0xFFF) + ((out >> 13) & 1)) & np.uint32(0xFFFFE000)
        out = np.where(magnitude < 0x7F800000, rounded, out)
        out = np.where(magnitude > 0x7F800000, np.uint32(0x7FFFE000), out)
    return out.astype(bits.dtype, copy=False)


_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_VALUE_TYPE = {
    ElementType.S32: np.int32, ElementType.S64: np.int64, ElementType.F16: np.float16,
    ElementType.F32: np.float32, ElementType.F32_FTZ: np.float32, ElementType.F64: np.float64,
}  # fmt: skip


def storage_type(element: ElementType) -> type:
    """Unsigned NumPy type that holds the bits of one element."""
    return _UNSIGNED[element.bytes]


def reduce_elements(operation: str, element: ElementType, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Bits of `operation(old, new)` as `cp.reduce.async.bulk(.tensor)` computes them.

    `operation`: add, min, max, inc, dec, and, or, xor; `old` (global memory) and `new` (shared memory):
    unsigned arrays of `storage_type(element)`. Floating adds round to nearest even; min and max prefer a
    number to a NaN. Raises TensorMapError where the ISA has no such combination.
    """
    unsigned = storage_type(element)
    floating = element in (
        ElementType.F16, ElementType.BF16, ElementType.F32, ElementType.F32_FTZ, ElementType.F64,
    )  # fmt: skip
    allowed = {"add", "min", "max"} if floating else {"add", "min", "max", "inc", "dec", "and", "or", "xor"}
    if (element.bytes < 4 and not floating) or element > ElementType.BF16:
        allowed = set()
    if operation in ("inc", "dec") and element != ElementType.U32:
        allowed = allowed - {"inc", "dec"}
    if operation in ("min", "max") and element in (ElementType.F32, ElementType.F32_FTZ, ElementType.F64):
        allowed = allowed - {"min", "max"}
    if operation not in allowed:
        raise TensorMapError(f"bulk reduction {operation!r} of {element.name} elements does not exist")
    if operation in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation](old, new)
    if operation == "inc":
        return np.where(old >= new, 0, old + np.uint32(1)).astype(unsigned)
    if operation == "dec":
        return np.where((old == 0) | (old > new), new, old - np.uint32(1)).astype(unsigned)
    if element == ElementType.BF16:
        return _reduce_bf16(operation, old, new)
    value = _VALUE_TYPE.get(element, unsigned)
    a: np.ndarray = old.view(value)
    b: np.ndarray = new.view(value)
    with np.errstate(all="ignore"):
        if operation == "add":
            result = (a + b).astype(value)
        elif floating:
            result = np.fmin(a, b) if operation == "min" else np.fmax(a, b)
        else:
            result = np.minimum(a, b) if operation == "min" else np.maximum(a, b)
    return result.view(unsigned)


def _reduce_bf16(operation: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    a = (old.astype(np.uint32) << 16).view(np.float32)
    b = (new.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        if operation != "add":
            result = np.fmin(a, b) if operation == "min" else np.fmax(a, b)
            return (result.view(np.uint32) >> 16).astype(np.uint16)
        total = a.astype(np.float64) + b.astype(np.float64)
    return _round_bf16(total)


def _round_bf16(value: np.ndarray) -> np.ndarray:
    """float64 to bfloat16 bits, nearest even, with one rounding: float32 rounds to odd on the way."""
    from .numeric import f32_to_bf16, f64_to_f32_odd

    return f32_to_bf16(f64_to_f32_odd(value))
