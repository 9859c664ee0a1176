"""Handlers: ld, st, atom, red, ldmatrix, stmatrix in every state space."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import access, alu, ordering, taint
from .machine import Machine
from .ptx import TYPE_BYTES, Address, Instruction, Vector
from .reports import Kind
from .semantics import numeric
from .state import OFFSET_MASK, Warp
from .translate import WINDOWS

Array = np.ndarray
_SPACES = ("global", "shared", "local", "param", "const")


def space_of(ins: Instruction) -> str:
    """State space of a load or store: one of the names, or "generic"."""
    for part in ins.parts[1:]:
        if part.split("::")[0] in _SPACES:
            return part.split("::")[0]
    return "generic"


def _element(ins: Instruction) -> str:
    return next(p for p in reversed(ins.parts) if p in TYPE_BYTES)


def resolve(w: Warp, ins: Instruction, operand: Address, mask: Array) -> tuple[str, Array]:
    """State space and addresses (one for each lane of ``mask``) of a memory operand."""
    space = space_of(ins)
    addresses = w.address(operand)[mask]
    if space != "generic":
        return ("global" if space == "const" else space), addresses
    window = addresses >> 60
    names = {v >> 60: k for k, v in WINDOWS.items()}
    if not (window == window[0]).all():
        raise access.stop(ins, "lanes access different state spaces through generic addresses")
    return names.get(int(window[0]), "global"), addresses & ((1 << 60) - 1)


def load_bytes(
    m: Machine, w: Warp, ins: Instruction, space: str, addresses: Array, size: int, mask: Array
) -> Array:
    """uint8 (n, size) from ``space``."""
    if space == "shared":
        return access.load_shared(m, w, ins, addresses, size, mask)
    if space == "global":
        return access.load_global(m, w, ins, addresses, size)
    index = addresses[:, None] + np.arange(size)
    if space == "param":
        return m.params[index]
    if w.local is None or (index < 0).any() or (index >= m.local_bytes).any():
        m.report(Kind.OUT_OF_BOUNDS, "local memory", w, ins, address=int(addresses[0]), space="local")
        return np.zeros((len(addresses), size), np.uint8)
    return w.local[np.flatnonzero(mask)[:, None], index]


def store_bytes(
    m: Machine, w: Warp, ins: Instruction, space: str, addresses: Array, data: Array, mask: Array
) -> None:
    """Store uint8 (n, size) to ``space``."""
    if space == "shared":
        access.store_shared(m, w, ins, addresses, data, mask)
    elif space == "global":
        access.store_global(m, w, ins, addresses, data)
    else:
        index = addresses[:, None] + np.arange(data.shape[1])
        if w.local is None or (index < 0).any() or (index >= m.local_bytes).any():
            m.report(Kind.OUT_OF_BOUNDS, "local memory", w, ins, address=int(addresses[0]), space="local")
            return
        w.local[np.flatnonzero(mask)[:, None], index] = data


def load(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``ld``: any width, vectors included."""
    kind = _element(ins)
    unit = TYPE_BYTES[kind]
    targets = ins.operands[0].items if isinstance(ins.operands[0], Vector) else (ins.operands[0],)
    space, addresses = resolve(w, ins, ins.operands[1], mask)
    if space == "global":
        ordering.load(m, w, ins, addresses, unit * len(targets), mask)
    elif space == "shared":
        ordering.shared_load(m, w, ins, addresses)
    raw = load_bytes(m, w, ins, space, addresses, unit * len(targets), mask)
    unwritten = access.undefined_bytes(m, w, addresses, raw.shape[1]) if space == "shared" else None
    if unwritten is not None or w.taint:
        _mark_loaded(w, ins, targets, unwritten, addresses, unit, mask)
    for i, target in enumerate(targets):
        piece = np.ascontiguousarray(raw[:, i * unit : (i + 1) * unit])
        if unit == 16:
            full: Array = np.zeros((32, 2), np.uint64)
            full[mask] = piece.view(np.uint64)
            w.R[target.index] = np.where(mask[:, None], full, w.R[target.index])
            continue
        values = piece.view(f"{'i' if kind[0] == 's' else 'u'}{unit}")[:, 0]
        full = np.zeros(32, values.dtype)
        full[mask] = values
        w.set(target, full, mask)


def _mark_loaded(
    w: Warp,
    ins: Instruction,
    targets: tuple,
    unwritten: tuple | None,
    addresses: Array,
    unit: int,
    mask: Array,
) -> None:
    lanes = []
    for i in range(len(targets)):
        full = np.zeros(32, bool)
        if unwritten is not None:
            full[mask] = unwritten[0][:, i * unit : (i + 1) * unit].any(axis=1)
        lanes.append(full)
    first = int(addresses[np.argmax(unwritten[0].any(axis=1))]) & OFFSET_MASK if unwritten is not None else 0
    cta = unwritten[1] if unwritten is not None else w.cta
    taint.loaded(w, ins, cta, [getattr(t, "index", -1) for t in targets], lanes, first, mask)


def store(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``st``: any width, vectors included."""
    kind = _element(ins)
    unit = TYPE_BYTES[kind]
    sources = ins.operands[1].items if isinstance(ins.operands[1], Vector) else (ins.operands[1],)
    space, addresses = resolve(w, ins, ins.operands[0], mask)
    pieces = []
    for source in sources:
        if unit == 16:
            pieces.append(w.R[source.index][mask].view(np.uint8).reshape(-1, 16))
            continue
        bits = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}[unit]
        pieces.append(
            np.ascontiguousarray(_bits_of(w, source, kind, bits)[mask]).view(np.uint8).reshape(-1, unit)
        )
    data = np.concatenate(pieces, axis=1)
    if space == "global":
        ordering.store(m, w, ins, addresses, data, mask)
    store_bytes(m, w, ins, space, addresses, data, mask)
    if space == "shared":
        ordering.shared_store(m, w, ins, addresses)
    if w.taint and space == "shared":
        undefined = taint.undefined_lanes(w, list(sources), mask)
        if undefined is not None:
            access.mark_undefined(m, w, addresses, np.repeat(undefined, unit, axis=1))


def _bits_of(w: Warp, source: object, kind: str, bits: str) -> Array:
    float_bits = getattr(source, "float_bits", 0)
    if kind == "f64" and float_bits == 0 and hasattr(source, "float_bits"):
        return np.full(32, float(source.value)).view(np.uint64)  # type: ignore[attr-defined]
    return w.value(source, bits)


def integer_operation(name: str, kind: str) -> Callable[[Array, Array], Array]:
    """The operation ``name`` of atomics and reductions on unsigned arrays that hold values of ``kind``."""
    signed = {"s32": np.int32, "s64": np.int64}.get(kind)

    def extreme(function: Callable) -> Callable[[Array, Array], Array]:
        if signed is None:
            return function
        return lambda a, b: function(a.view(signed), b.view(signed)).view(a.dtype)

    table: dict[str, Callable[[Array, Array], Array]] = {
        "add": lambda a, b: a + b,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda a, b: b,
        "min": extreme(np.minimum),
        "max": extreme(np.maximum),
        "inc": lambda a, b: np.where(a >= b, a.dtype.type(0), a + a.dtype.type(1)),
        "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - a.dtype.type(1)),
    }
    return table[name]


def _float_op(name: str, kind: str) -> Callable[[Array, Array], Array]:
    if kind.endswith("x2"):
        one = _float_op(name, kind[:-2])
        return lambda a, b: alu.pack16(one(alu.low(a), alu.low(b)), one(alu.high(a), alu.high(b)))
    table: dict[str, Callable] = {"add": np.add, "min": alu.fmin, "max": alu.fmax}
    function = table[name]
    if kind == "f64":
        return lambda a, b: function(a.view(np.float64), b.view(np.float64)).view(a.dtype)
    return lambda a, b: numeric.encode(function(numeric.decode(a, kind), numeric.decode(b, kind)), kind)


def atomic(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``atom`` and ``red``: lanes in order, one after the other."""
    reduction = ins.root == "red"
    target = None if reduction else ins.operands[0]
    where = ins.operands[0 if reduction else 1]
    values = ins.operands[(1 if reduction else 2) :]
    kind = _element(ins)
    space, addresses = resolve(w, ins, where, mask)
    if kind == "b128":
        _atomic_128(m, w, ins, space, addresses, mask)
        return
    names = ("add", "and", "or", "xor", "exch", "min", "max", "inc", "dec", "cas")
    name = next(p for p in ins.parts if p in names)
    unit = TYPE_BYTES[kind]
    bits = {2: "b16", 4: "b32", 8: "b64"}[unit]
    vector = isinstance(values[0], Vector)
    operands = [[_bits_of(w, v, kind, bits)[mask] for v in (o.items if vector else (o,))] for o in values]
    parts = len(operands[0])
    if space == "global":
        ordering.atomic(m, w, ins, addresses, parts * unit)
    old = np.zeros((parts, len(addresses)), f"u{unit}")
    function = (
        None if name == "cas" else _float_op(name, kind) if "f" in kind else integer_operation(name, kind)
    )
    lanes = np.flatnonzero(mask)
    for i in range(len(addresses)):
        one = np.zeros(32, bool)
        one[lanes[i]] = True
        for part in range(parts):
            at = addresses[i : i + 1] + part * unit
            before = np.ascontiguousarray(load_bytes(m, w, ins, space, at, unit, one)).view(f"u{unit}")[:, 0]
            if function is None:
                new = np.where(before == operands[0][part][i], operands[1][part][i], before)
            else:
                new = function(before, operands[0][part][i : i + 1])
            raw = np.ascontiguousarray(new.astype(f"u{unit}")).view(np.uint8).reshape(1, -1)
            store_bytes(m, w, ins, space, at, raw, one)
            old[part, i] = before[0]
    if space == "shared":
        ordering.shared_atomic(m, w, ins, addresses)
    if target is not None:
        for part, register in enumerate(target.items if isinstance(target, Vector) else (target,)):
            full = np.zeros(32, f"u{unit}")
            full[mask] = old[part]
            w.set(register, full, mask)


def _atomic_128(m: Machine, w: Warp, ins: Instruction, space: str, addresses: Array, mask: Array) -> None:
    """``atom.exch.b128`` and ``atom.cas.b128``."""
    name = next((p for p in ins.parts if p in ("exch", "cas")), "")
    if not name:
        raise access.stop(ins, "only exch and cas have 128 bits")
    if (addresses % 16).any():
        at = int(addresses[addresses % 16 != 0][0])
        m.report(Kind.MISALIGNED, "an atomic of 16 bytes", w, ins, address=at, space=space, lanes=mask)
    values = [w.R[operand.index] for operand in ins.operands[2:]]
    if space == "global":
        ordering.atomic(m, w, ins, addresses, 16)
    old: Array = w.R[ins.operands[0].index].copy()
    for lane, address in zip(np.flatnonzero(mask), addresses, strict=True):
        one, place = np.arange(32) == lane, np.array([address])
        before = np.ascontiguousarray(load_bytes(m, w, ins, space, place, 16, one)).view(np.uint64)[0]
        matches = name == "exch" or bool((before == values[0][lane]).all())
        new = np.ascontiguousarray(values[-1][lane] if matches else before)
        store_bytes(m, w, ins, space, place, new.view(np.uint8).reshape(1, 16), one)
        old[lane] = before
    w.R[ins.operands[0].index] = old
    if space == "shared":
        ordering.shared_atomic(m, w, ins, addresses)


HANDLERS: dict[str, Callable] = {"ld": load, "ldu": load, "st": store, "atom": atomic, "red": atomic}
