"""Cases of warp-wide and memory instructions that were added after the last recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .case import BLOCKS, Case, elements

_KERNELS = "lowering.emulator.crosscheck.kernels:"


def _names(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{i}" for i in range(count)) + "}"


def _numbered(first: int, count: int) -> str:
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


def _narrow_mma(opcode: str, counts: tuple[int, int, int]) -> Case:
    """``mma.sync`` of integers: `counts` registers of A, B and C."""
    a, b, c = counts
    places = [_numbered(0, c), _numbered(c, a), _numbered(c + a, b), _numbered(c + a + b, c)]
    return _registers(opcode, f"{opcode} {', '.join(places)};", (*counts, c), _any_words)


def _double_mma(shape: str, counts: tuple[int, int, int]) -> Case:
    """``mma.sync`` of f64, whose operands travel as pairs of words."""
    opcode = f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64"
    lines, at = [], 2 * counts[2]
    for name, count in zip("abc", counts, strict=True):
        lines.append(f".reg .b64 {', '.join(f'{name}{i}' for i in range(count))};")
        for i in range(count):
            lines.append(f"mov.b64 {name}{i}, {{${at}, ${at + 1}}};")
            at += 2
    a, b, c = (_names(name, count) for name, count in zip("abc", counts, strict=True))
    lines.append(f"{opcode} {c}, {a}, {b}, {c};")
    lines += [f"mov.b64 {{${2 * i}, ${2 * i + 1}}}, c{i};" for i in range(counts[2])]
    words = tuple(2 * n for n in counts)
    return _registers(opcode, "{ " + " ".join(lines) + " }", (*words, words[2]), _normal_doubles)


def _any_words(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 2**32, (BLOCKS, 32, count), dtype=np.uint32)


def _normal_doubles(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal((BLOCKS, 32, count // 2)).view(np.uint32).reshape(BLOCKS, 32, count)


def _registers(
    opcode: str, text: str, counts: tuple[int, ...], draw: Callable[[np.random.Generator, int], np.ndarray]
) -> Case:
    def arguments(rng: np.random.Generator) -> list:
        parts = tuple(np.ascontiguousarray(draw(rng, n)).view(np.int32) for n in counts[:3])
        return [parts, np.zeros((BLOCKS, 32, counts[3]), np.int32)]

    constants = {"text": text, "counts": counts}
    name = f"added mma/{opcode[17:]}"
    return Case(name, _KERNELS + "registers", constants, arguments, 1, ((opcode, "bits", slice(None)),))


def _memory(name: str, text: str, count: int, image: str, same_address: bool) -> Case:
    """One text on 2048 bytes of shared memory a warp; the whole of it is compared afterwards."""
    words = 512

    def arguments(rng: np.random.Generator) -> list:
        per_word = 32 // {"f16": 16, "bf16": 16}.get(image, 32)
        if image in ("f16", "bf16", "tf32"):
            held = elements(rng, image, (BLOCKS, words * per_word), True)
            before = np.ascontiguousarray(held).view(np.int32).reshape(BLOCKS, words, 1)
        elif image == "f64":
            before = rng.standard_normal((BLOCKS, words // 2)).view(np.int32).reshape(BLOCKS, words, 1)
        else:
            before = rng.integers(0, 2**32, (BLOCKS, words, 1), dtype=np.uint32).view(np.int32)
        rows = np.stack([rng.permutation(words // 4)[:32] * 16 for _ in range(BLOCKS)]).astype(np.int32)
        addresses = np.zeros_like(rows) if same_address else rows
        registers = rng.integers(0, 2**32, (BLOCKS, 32, count), dtype=np.uint32).view(np.int32)
        return [before, addresses[..., None], registers, np.zeros((BLOCKS, words, 1), np.int32)]

    constants = {"text": text, "words": words, "count": count, "store": True}
    rows = ((name, "bits", slice(None)),)
    return Case(f"added {name}", _KERNELS + "through_shared", constants, arguments, 3, rows)


def _wmma(shape: str, kind: str, accumulator: str, counts: tuple[int, int, int], at: tuple[int, int]) -> Case:
    """A, B and C from shared memory, at bytes 0 and `at`; D over C."""
    bits = 64 if kind == "f64" else 32
    types = f"{accumulator}.{kind}.{kind}.{accumulator}" if kind != "f16" else f"{accumulator}.{accumulator}"
    a, b, c = (_names(name, count) for name, count in zip("abc", counts, strict=True))
    declared = ", ".join(f"{n}{i}" for n, count in zip("abc", counts, strict=True) for i in range(count))
    text = (
        f"{{ .reg .b{bits} {declared}; wmma.load.a.sync.aligned.row.{shape}.shared.{kind} {a}, [$0]; "
        f"wmma.load.b.sync.aligned.col.{shape}.shared.{kind} {b}, [$0+{at[0]}]; "
        f"wmma.load.c.sync.aligned.row.{shape}.shared.{accumulator} {c}, [$0+{at[1]}]; "
        f"wmma.mma.sync.aligned.row.col.{shape}.{types} {c}, {a}, {b}, {c}; "
        f"wmma.store.d.sync.aligned.row.{shape}.shared.{accumulator} [$0+{at[1]}], {c}; }}"
    )
    return _memory(f"wmma/{shape}.{kind}", text, 1, kind, same_address=True)


_EXCHANGE = """{ .reg .b64 a, b; .reg .b128 q; mov.b64 a, {$1, $2}; mov.b64 b, {$3, $4}; mov.b128 q, {a, b};
 atom.shared.exch.b128 q, [$0], q; }"""
_COMPARE = """{ .reg .b64 a, b, c; .reg .b128 q, r; .reg .pred p; ld.shared.v2.b64 {a, b}, [$0];
 setp.lt.s32 p, $1, 0; @p add.u64 a, a, 1; mov.b128 q, {a, b}; mov.b64 c, {$3, $4}; mov.b128 r, {c, c};
 atom.shared.cas.b128 q, [$0], q, r; }"""


def added_cases() -> Iterator[Case]:
    """Every case of this file."""
    for a, b in (("s4", "s4"), ("u4", "s4")):
        for shape, counts in (("m8n8k32", (1, 1, 2)), ("m16n8k32", (2, 1, 4)), ("m16n8k64", (4, 2, 4))):
            yield _narrow_mma(f"mma.sync.aligned.{shape}.row.col.s32.{a}.{b}.s32", counts)
    yield _narrow_mma("mma.sync.aligned.m8n8k16.row.col.s32.s8.u8.s32", (1, 1, 2))
    for operation in ("xor", "and"):
        for shape, counts in (("m8n8k128", (1, 1, 2)), ("m16n8k128", (2, 1, 4)), ("m16n8k256", (4, 2, 4))):
            yield _narrow_mma(f"mma.sync.aligned.{shape}.row.col.s32.b1.b1.s32.{operation}.popc", counts)
    for shape, counts in (("m8n8k4", (1, 1, 2)), ("m16n8k4", (2, 1, 4)), ("m16n8k8", (4, 2, 4)),
                          ("m16n8k16", (8, 4, 4))):  # fmt: skip
        yield _double_mma(shape, counts)
    yield _wmma("m16n16k16", "f16", "f32", (8, 8, 8), (512, 1024))
    yield _wmma("m16n16k16", "bf16", "f32", (4, 4, 8), (512, 1024))
    yield _wmma("m16n16k16", "s8", "s32", (2, 2, 8), (256, 512))
    yield _wmma("m16n16k8", "tf32", "f32", (4, 4, 8), (512, 1024))
    yield _wmma("m8n8k4", "f64", "f64", (1, 1, 2), (256, 512))
    yield _memory("atom/exch.b128", _EXCHANGE, 4, "", same_address=False)
    yield _memory("atom/cas.b128", _COMPARE, 4, "", same_address=False)
