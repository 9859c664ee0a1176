"""Handlers of ``wmma``, and of the ``mma.sync`` kinds with f64, 4-bit and 1-bit operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import access, loads, matrix, ordering, taint
from .machine import Machine
from .ptx import Instruction, Vector
from .reports import Kind
from .semantics import fragments
from .state import Warp

Array = np.ndarray
_parse = functools.lru_cache(maxsize=256)(fragments.parse)


def _registers(w: Warp, operand: Any, kind: str) -> Array:
    """Patterns of the elements (32, E) in the registers of an operand."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    bits = "b64" if kind == "f64" else "b32"
    return fragments.split(np.stack([w.value(item, bits) for item in items], axis=1), kind)


def _assign(w: Warp, operand: Any, registers: Array, mask: Array) -> None:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    for i, item in enumerate(items):
        w.set(item, np.ascontiguousarray(registers[:, i]), mask)


def _size(p: fragments.Product, which: str) -> tuple[int, int]:
    return {"a": (p.m, p.k), "b": (p.k, p.n), "c": (p.m, p.n)}[which]


def _whole_warp(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    if not mask.all():
        m.report(Kind.BARRIER_DIVERGENCE, f"{ins.root} needs all 32 lanes", w, ins, lanes=mask)


def _places(p: fragments.Product, which: str, wmma: bool) -> tuple[Array, Array]:
    if not wmma:
        return fragments.mma_places(p, which)
    kind = {"a": p.a, "b": p.b, "c": p.c}[which]
    return fragments.wmma_places((p.m, p.n, p.k), which, kind)


def multiply(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``wmma.mma`` and ``mma.sync``; the dense f16, bf16, tf32, fp8 and int8 kinds are `matrix`'s."""
    wmma = ins.root == "wmma"
    if not wmma and not (ins.has("m8n8k16") or {"f64", "s4", "u4", "b1"} & set(ins.parts)):
        return matrix.mma_sync(m, w, ins, mask)
    _whole_warp(m, w, ins, mask)
    try:
        p = _parse(ins.parts)
    except ValueError as error:
        raise access.stop(ins, str(error)) from None
    target, *sources = ins.operands
    numbers, undefined = [], []
    for which, kind, operand in zip("abc", (p.a, p.b, p.c), sources, strict=True):
        places = _places(p, which, wmma)
        held = _registers(w, operand, kind)
        if held.shape != places[0].shape:
            raise access.stop(
                ins, f"operand {which} has {held.shape[1]} elements a lane, not {places[0].shape[1]}"
            )
        numbers.append(fragments.gather(fragments.values(held, kind), places, _size(p, which)))
        if w.taint:
            undefined.append(fragments.gather(_marked(w, operand, held.shape), places, _size(p, which)))
    rows, columns = _places(p, "c", wmma)
    if w.taint:
        of_a, of_b = np.any(undefined[0], axis=1, keepdims=True), np.any(undefined[1], axis=0, keepdims=True)
        spread = of_a | of_b | undefined[2]
        _mark(w, ins, target, spread[rows, columns], mask)
    result = fragments.product(p, *numbers)[rows, columns]
    _assign(w, target, fragments.join(fragments.patterns(result, p.d), p.d), mask)
    if m.stats is not None:
        m.stats.add(ins, "matrix_flops", 2 * p.m * p.n * p.k)
    return None


def _marked(w: Warp, operand: Any, shape: tuple[int, ...]) -> Array:
    """Elements in registers that hold undefined values."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    out = np.zeros((32, len(items)), bool)
    for i, item in enumerate(items):
        mark = w.taint.get(getattr(item, "index", -1))
        if mark is not None:
            out[:, i] = mark.lanes
    return np.repeat(out, shape[1] // len(items), axis=1)


def _mark(w: Warp, ins: Instruction, target: Any, elements: Array, mask: Array) -> None:
    items = target.items if isinstance(target, Vector) else (target,)
    lanes: Array = np.bitwise_or.reduce(elements.reshape(32, len(items), -1), axis=2)
    origin = next(iter(w.taint.values()))
    for i, item in enumerate(items):
        mark = origin._replace(lanes=lanes[:, i]) if lanes[:, i].any() else None
        taint.assign(w, getattr(item, "index", -1), mark, mask)


def _tile(w: Warp, ins: Instruction, which: str, stride_at: int) -> tuple[Array, int, str]:
    """Element offsets (32, E) of a tile in memory, bits of an element, and its type."""
    kind = next((p for p in reversed(ins.parts) if p in fragments.BITS), "")
    try:
        shape = fragments.shape_of(ins.parts)
        rows, columns = fragments.wmma_places(shape, which, kind)
    except ValueError as error:
        raise access.stop(ins, str(error)) from None
    m, n, k = shape
    height, width = {"a": (m, k), "b": (k, n), "c": (m, n)}[which]
    row_major = ins.has("row")
    stride = width if row_major else height
    if len(ins.operands) > stride_at:
        stride = int(w.value(ins.operands[stride_at], "s32")[0])
    offsets = rows * stride + columns if row_major else columns * stride + rows
    bits = fragments.BITS[kind]
    if bits < 8 and row_major == (which == "b"):
        raise access.stop(ins, f"{kind} needs A in rows and B in columns")
    return offsets, bits, kind


def load(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``wmma.load.a``, ``.b``, ``.c``."""
    _whole_warp(m, w, ins, mask)
    offsets, bits, _ = _tile(w, ins, ins.parts[2], 2)
    space, base = loads.resolve(w, ins, ins.operands[1], mask)
    step = max(1, 32 // bits if bits < 8 else 1)  # narrow elements are read a register at a time
    size, pieces = max(bits // 8, 4 if bits < 8 else 1), []
    for i in range(0, offsets.shape[1], step):
        addresses = base + offsets[mask, i] * bits // 8
        if space == "global":
            ordering.load(m, w, ins, addresses, size, mask)
        raw: Array = np.zeros((32, size), np.uint8)
        raw[mask] = loads.load_bytes(m, w, ins, space, addresses, size, mask)
        pieces.append(raw)
    words = np.ascontiguousarray(np.concatenate(pieces, axis=1)).view(np.uint64 if bits == 64 else np.uint32)
    _assign(w, ins.operands[0], words, mask)


def store(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``wmma.store.d``: the element of each place is stored by the first lane that has it."""
    _whole_warp(m, w, ins, mask)
    offsets, bits, kind = _tile(w, ins, "c", 2)
    space, base = loads.resolve(w, ins, ins.operands[0], mask)
    held = _registers(w, ins.operands[1], kind)
    for i in range(offsets.shape[1]):
        addresses = base + offsets[mask, i] * bits // 8
        data = np.ascontiguousarray(held[mask, i]).view(np.uint8).reshape(-1, bits // 8)
        if space == "global":
            ordering.store(m, w, ins, addresses, data, mask)
        loads.store_bytes(m, w, ins, space, addresses, data, mask)


HANDLERS: dict[str, Callable] = {
    "mma.sync": multiply, "wmma.mma": multiply, "wmma.load": load, "wmma.store.d": store,
}  # fmt: skip
