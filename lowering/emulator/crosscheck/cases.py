"""Cases to compare: each names a kernel, its seeded inputs, and how close the results must be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from ..semantics import numeric
from . import added_ops, ops
from .added_cases import added_cases
from .case import BLOCKS as BLOCKS
from .case import Case as Case
from .case import elements

LANES = 1024  # elements of each scalar instruction
_PACKAGE = "lowering.emulator.crosscheck."


@dataclasses.dataclass(frozen=True)
class TmaCase:
    """One TMA copy. `extents`, `pitches` (elements), `box`, `at`: fastest dimension first; `swizzle`: 0 to 3.

    `offset`: byte offset of the box in a 1024-byte aligned buffer; `operation`: load, store, or a reduction.
    """

    kind: str
    extents: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    at: tuple[int, ...]
    offset: int = 0
    operation: str = "load"

    @property
    def element_bytes(self) -> int:
        return {"bf16": 2, "f16": 2, "u8": 1, "e4m3": 1}.get(self.kind, 4)

    @property
    def box_bytes(self) -> int:
        return math.prod(self.box) * self.element_bytes

    @property
    def row_pitch(self) -> int:
        """Bytes between rows of the box in shared memory: a swizzle wider than the box pads its rows."""
        return max(self.box[0] * self.element_bytes, 16 << self.swizzle if self.swizzle else 0)

    @property
    def words(self) -> int:
        """32-bit words of the shared memory image: the box, and 512 bytes beyond that must not change."""
        return -(-(self.offset + math.prod(self.box[1:]) * self.row_pitch + 512) // 512) * 128

    @property
    def memory_words(self) -> int:
        """32-bit words of the memory under the tensor."""
        last = sum((e - 1) * p for e, p in zip(self.extents, self.pitches, strict=True))
        return -(-(last + 1) * self.element_bytes // 4)


@dataclasses.dataclass(frozen=True)
class WgmmaCase:
    """D (64, n) = A (64, depth) B (n, depth). `kinds`: types of A, B, D; `layouts`: of A and B in memory."""

    kinds: tuple[str, str, str]
    n: int
    depth: int
    layouts: tuple[str, str]


def _words(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32)


def _mixed_floats(rng: np.random.Generator, count: int) -> np.ndarray:
    """float32 of all magnitudes, many ordinary ones, and the special values."""
    bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    ordinary = (rng.standard_normal(count) * np.exp2(rng.integers(-12, 13, count))).astype(np.float32)
    values = np.where(rng.random(count) < 0.5, bits, ordinary.view(np.uint32)).astype(np.uint32)
    special = np.array(
        [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF,
         0x3F800000, 0xBF800000, 0x477FE000, 0x477FF000, 0x43E00000, 0x4F000000, 0x3F000000, 0x3FC00000],
        dtype=np.uint32,
    )  # fmt: skip
    values[: special.size] = special
    return rng.permutation(values)


def _random_words(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 2**32, count, dtype=np.uint32)


def _moderate_floats(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.abs(rng.uniform(0.01, 3.0, count)).astype(np.float32).view(np.uint32)


def _halves(rng: np.random.Generator, count: int) -> np.ndarray:
    """Packed pairs: half random patterns, half ordinary bf16-sized patterns around one."""
    random = rng.integers(0, 65536, (count, 2))
    near = rng.integers(0x3800, 0x4400, (count, 2)) | rng.integers(0, 2, (count, 2)) << 15
    pairs = np.where(rng.random((count, 1)) < 0.5, random, near).astype(np.uint32)
    return pairs[:, 0] | pairs[:, 1] << 16


def _nonzero_words(rng: np.random.Generator, count: int) -> np.ndarray:
    wide = rng.integers(1, 2**32, count, dtype=np.uint32)
    return np.maximum(wide >> rng.integers(0, 32, count).astype(np.uint32), 1)


_GROUPS = {
    "conversions": (ops.CONVERSIONS, _mixed_floats), "float": (ops.FLOAT, _mixed_floats),
    "approximate": (ops.APPROXIMATE, _mixed_floats), "absolute": (ops.ABSOLUTE, _moderate_floats),
    "packed": (ops.PACKED, _halves), "integer": (ops.INTEGER, _nonzero_words), "warp": (ops.WARP,
    _random_words), "carries": (added_ops.CARRIES, _random_words), "added": (added_ops.ADDED, _mixed_floats),
    "double": (added_ops.DOUBLE, _random_words),
}  # fmt: skip


def _rule(op: ops.Op) -> str:
    if op.as_type == "b32" or "~" in op.as_type:
        return op.as_type.replace("b32", "bits")
    return f"{op.as_type}:{op.ulp}" if op.ulp else f"{op.as_type}="


def elementwise_case(group: str, members: tuple[ops.Op, ...]) -> Case:
    """One launch of a kernel that runs each of `members` on the same LANES inputs."""
    source = _GROUPS[group][1]

    def arguments(rng: np.random.Generator) -> list:
        inputs = tuple(_words(source(rng, LANES)) for _ in range(4))
        return [inputs, np.zeros(len(members) * LANES, np.int32)]

    rows = tuple(
        (f"{group}/{op.label}", _rule(op), slice(i * LANES, (i + 1) * LANES)) for i, op in enumerate(members)
    )
    texts = tuple(op.text for op in members)
    return Case(
        f"elementwise/{group}", _PACKAGE + "kernels:elementwise", {"texts": texts}, arguments, 1, rows
    )


def elementwise_groups() -> Iterator[tuple[str, tuple[ops.Op, ...]]]:
    """Name and members of each group of scalar instructions."""
    for group, (members, _) in _GROUPS.items():
        yield group, tuple(members)


def _mma_case(k: int, a: str, b: str, accumulator: str) -> Case:
    bits = {"tf32": 32, "f16": 16, "bf16": 16}.get(a, 8)
    a_count = k * bits // 64
    counts = (a_count, a_count // 2, *[2 if accumulator == "f16" else 4] * 2)
    at = iter(range(sum(counts)))
    lists = [", ".join(f"${next(at)}" for _ in range(n)) for n in (counts[3], *counts[:3])]
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{accumulator}.{a}.{b}.{accumulator}"
    text = f"{opcode} {{{lists[0]}}}, {{{lists[1]}}}, {{{lists[2]}}}, {{{lists[3]}}};"

    def arguments(rng: np.random.Generator) -> list:
        parts = []
        for kind, count in ((a, counts[0]), (b, counts[1]), (accumulator, counts[2])):
            per_word = 1 if kind in ("f32", "s32") else 32 // {"tf32": 32, "f16": 16, "bf16": 16}.get(kind, 8)
            shape = (BLOCKS // 2, 32, count * per_word)
            if kind == "s32":
                halves = [rng.integers(-1000, 1000, shape).astype(np.int32) for _ in range(2)]
            else:
                halves = [elements(rng, kind, shape, integers) for integers in (True, False)]
            parts.append(_words(np.concatenate(halves)))
        return [tuple(parts), np.zeros((BLOCKS, 32, counts[3]), np.int32)]

    half = BLOCKS // 2 * 32 * counts[3]
    rows = (
        (f"{opcode} integers", "bits", slice(0, half)),
        (f"{opcode} random", "bits", slice(half, 2 * half)),
    )
    constants = {"text": text, "counts": counts}
    return Case(f"mma/{opcode[17:]}", _PACKAGE + "kernels:registers", constants, arguments, 1, rows)


def _shared_case(opcode: str, count: int, store: bool) -> Case:
    registers = ", ".join(f"${i + store}" for i in range(count))
    text = f"{opcode} [$0], {{{registers}}};" if store else f"{opcode} {{{registers}}}, [${count}];"
    words = 512

    def arguments(rng: np.random.Generator) -> list:
        image = rng.integers(0, 2**32, (BLOCKS, words, 1), dtype=np.uint32)
        rows = np.stack([rng.permutation(words // 4)[:32] * 16 for _ in range(BLOCKS)])
        held = rng.integers(0, 2**32, (BLOCKS, 32, count), dtype=np.uint32)
        out = np.zeros((BLOCKS, words, 1) if store else (BLOCKS, 32, count), np.int32)
        return [_words(image), _words(rows.astype(np.int32)[..., None]), _words(held), out]

    constants = {"text": text, "words": words, "count": count, "store": store}
    rows = ((opcode, "bits", slice(None)),)
    return Case(f"shared/{opcode}", _PACKAGE + "kernels:through_shared", constants, arguments, 3, rows)


def _wgmma_case(case: WgmmaCase, integers: bool) -> Case:
    a, b, accumulator = case.kinds
    words = 64 * case.n // (2 if accumulator == "f16" else 1)

    def arguments(rng: np.random.Generator) -> list:
        image_a = elements(rng, a, (64 * case.depth,), integers)
        image_b = elements(rng, b, (case.n * case.depth,), integers)
        result = {"f16": np.float16, "f32": np.float32, "s32": np.int32}[accumulator]
        return [_words(image_a), _words(image_b), np.zeros(64 * case.n, result)]

    what = "integers" if integers else "random"
    name = f"wgmma/{'.'.join(case.kinds)} n{case.n} k{case.depth} {case.layouts[0]} {case.layouts[1]} {what}"
    rows = ((name, "bits", slice(0, words)),)
    return Case(name, _PACKAGE + "async_kernels:wgmma", {"case": case}, arguments, 2, rows)


def _tma_case(case: TmaCase) -> Case:
    def arguments(rng: np.random.Generator) -> list:
        floating = case.kind in ("f32", "tf32", "bf16", "f16")
        if floating:
            per_word = 4 // case.element_bytes
            kind = "f32" if case.kind == "tf32" else case.kind
            memory, image = (
                _words(numeric.encode(rng.standard_normal(n * per_word).astype(np.float32), kind))
                for n in (case.memory_words, case.words)
            )
        else:
            memory, image = (_words(_random_words(rng, n)) for n in (case.memory_words, case.words))
        # A store may write up to 16 bytes beyond the end of the last row.
        memory = np.concatenate([memory, np.zeros(4, np.int32)])
        return [memory, image, np.zeros(case.words, np.int32)]

    name = (
        f"tma/{case.operation} {case.kind} {case.extents} box {case.box} at {case.at}"
        f" swizzle {case.swizzle} offset {case.offset}"
    )
    result = 2 if case.operation == "load" else 0
    rows = ((name, "bits", slice(None) if result else slice(0, case.memory_words)),)
    return Case(name, _PACKAGE + "async_kernels:tma", {"case": case}, arguments, result, rows)


_LAYOUTS_16 = ("K_INTER", "K_SW32", "K_SW64", "K_SW128", "MN_INTER", "MN_SW32", "MN_SW64", "MN_SW128")


def _wgmma_cases() -> Iterator[WgmmaCase]:
    for layout in _LAYOUTS_16:
        yield WgmmaCase(("bf16", "bf16", "f32"), 64, 64, (layout, "K_SW128"))
        yield WgmmaCase(("f16", "f16", "f32"), 128, 64, ("K_SW128", layout))
    yield WgmmaCase(("f16", "f16", "f16"), 64, 64, ("K_SW128", "K_SW128"))
    yield WgmmaCase(("bf16", "bf16", "f32"), 8, 64, ("K_SW64", "K_SW64"))
    yield WgmmaCase(("bf16", "bf16", "f32"), 256, 64, ("K_SW128", "MN_SW128"))
    for kinds in (("e4m3", "e4m3", "f32"), ("e4m3", "e5m2", "f32"), ("e5m2", "e5m2", "f32")):
        for layout in ("K_INTER", "K_SW32", "K_SW64", "K_SW128"):
            yield WgmmaCase(kinds, 64, 128, (layout, "K_SW128"))
    yield WgmmaCase(("s8", "s8", "s32"), 64, 128, ("K_SW128", "K_SW64"))


def _tma_cases() -> Iterator[TmaCase]:
    plane, pitches = (100, 30), (1, 104)
    for swizzle in range(4):
        box = (8 << swizzle, 16) if swizzle else (64, 16)
        for at in ((0, 0), (-8, -3), (96 if swizzle < 3 else 64, 20)):
            yield TmaCase("bf16", plane, pitches, box, swizzle, at)
        yield TmaCase("bf16", plane, pitches, box, swizzle, (8, 2), offset=128 * 3)
        for operation in ("store", "add"):
            yield TmaCase("bf16", plane, pitches, box, swizzle, (64, 20), operation=operation)
    for inner, swizzle in ((16, 3), (32, 3), (8, 2), (8, 1)):
        yield TmaCase("bf16", plane, pitches, (inner, 16), swizzle, (8, 2), operation="store")
    for kind in ("f32", "tf32", "s32", "u8", "e4m3", "f16"):
        wide = 1 if kind in ("u8", "e4m3") else 4
        extents, step = (96, 5, 4), (1, 128, 128 * 6)
        yield TmaCase(kind, extents, step, (32 // wide * 2, 4, 2), 0, (80 if wide == 1 else 88, -1, 3))
    for operation in ("add", "min", "max", "and", "or", "xor"):
        yield TmaCase("s32", (40, 9), (1, 44), (32, 8), 3, (20, 4), operation=operation)
    yield TmaCase("f16", (64, 8), (1, 64), (64, 8), 3, (0, 0), operation="max")
    yield TmaCase("f32", (64, 8), (1, 64), (32, 8), 3, (0, 0), operation="add")
    yield TmaCase("f16", (48, 3, 3, 3, 3), (1, 48, 144, 432, 1296), (16, 2, 2, 2, 2), 1, (40, 2, -1, 1, 2))
    yield TmaCase("u8", (4096,), (1,), (256,), 0, (3904,))


def all_cases() -> Iterator[Case]:
    """Every case, in the order in which they run."""
    for group, members in elementwise_groups():
        yield elementwise_case(group, members)
    for k, a, b, accumulator in (
        (16, "f16", "f16", "f32"), (8, "f16", "f16", "f32"), (16, "f16", "f16", "f16"),
        (16, "bf16", "bf16", "f32"), (8, "bf16", "bf16", "f32"),
        (8, "tf32", "tf32", "f32"), (4, "tf32", "tf32", "f32"),
        (32, "e4m3", "e4m3", "f32"), (32, "e4m3", "e5m2", "f32"), (32, "e5m2", "e5m2", "f32"),
        (32, "s8", "s8", "s32"), (16, "u8", "s8", "s32"),
    ):  # fmt: skip
        yield _mma_case(k, a, b, accumulator)
    for count in (1, 2, 4):
        for transposed in ("", ".trans"):
            yield _shared_case(f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16", count, False)
            yield _shared_case(f"stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16", count, True)
    for wgmma in _wgmma_cases():
        for integers in (True, False):
            yield _wgmma_case(wgmma, integers)
    for tma in _tma_cases():
        yield _tma_case(tma)
    yield from added_cases()
