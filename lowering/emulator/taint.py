"""Undefined values: which lanes of which registers hold data that nothing has written.

Registers that a kernel may read before it writes them are marked at its entry. Kernels load rows past the
edge of a problem, or the stage after the last, and throw the result away; that is not an error. So a load of
unwritten shared memory marks its registers, arithmetic passes the mark on, a store to shared memory marks the
bytes undefined, and the finding is made where such a value decides something: it goes to global memory, into
an address, a branch, an atomic, or an asynchronous operation's operand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .ptx import Address, Instruction, Reg, registers
from .reports import Kind

if TYPE_CHECKING:
    from .machine import Machine
    from .state import Cta, Warp

Array = np.ndarray


# Operations whose handlers mark their targets themselves; all others give defined values.
OWN_MARKS = frozenset({"ld", "ldu", "ldmatrix", "shfl", "mma"})


OF_BITS = frozenset({"and", "or", "xor", "lop3", "prmt", "bfi", "bfe", "shf", "shl", "shr"})
"""Arithmetic that puts bits of several sources together, or takes some out."""


class Mark(NamedTuple):
    """Lanes that are undefined, and where the first such value was read; None: a register at the entry."""

    lanes: Array
    origin: Instruction | None
    address: int
    cta: Cta


def at_entry(w: Warp) -> dict[int, Mark]:
    """Marks of the registers that nothing may have written where they are read."""
    return {register: Mark(w.live, None, 0, w.cta) for register in w.machine.program.unset}


def _join(marks: list[Mark]) -> Mark | None:
    if not marks:
        return None
    lanes = marks[0].lanes
    for mark in marks[1:]:
        lanes = lanes | mark.lanes
    return marks[0]._replace(lanes=lanes) if lanes.any() else None


def assign(w: Warp, target: int, mark: Mark | None, mask: Array | None) -> None:
    """A register is written in the lanes of ``mask`` (None: all) with a value marked ``mark``."""
    old = w.taint.get(target)
    if mask is not None and old is not None:
        kept = old.lanes & ~mask
        lanes = kept | (mark.lanes & mask) if mark is not None else kept
        mark = (mark or old)._replace(lanes=lanes)
    elif mask is not None and mark is not None:
        mark = mark._replace(lanes=mark.lanes & mask)
    if mark is None or not mark.lanes.any():
        w.taint.pop(target, None)
    else:
        w.taint[target] = mark


def arithmetic(w: Warp, targets: tuple[int, ...], sources: tuple[int, ...], mask: Array | None) -> None:
    """Pass marks on from the sources of an instruction to its targets; called by compiled steps."""
    mark = _join([w.taint[s] for s in sources if s in w.taint])
    for target in targets:
        assign(w, target, mark, mask)


def bits(w: Warp, targets: tuple[int, ...], sources: tuple[int, ...], mask: Array | None) -> None:
    """The same where targets hold bits of each source: compilers insert halves into registers never written.

    So a register of the entry counts where all sources are undefined; which bits are is not followed.
    """
    marks = [w.taint[s] for s in sources if s in w.taint]
    known = [mark for mark in marks if mark.origin is not None]
    if len(marks) == len(sources):
        lanes = np.logical_and.reduce([mark.lanes for mark in marks])
        known += [mark._replace(lanes=lanes) for mark in marks if mark.origin is None]
    mark = _join(known)
    for target in targets:
        assign(w, target, mark, mask)


def select(w: Warp, target: int, a: int, b: int, predicate: int, negated: bool, mask: Array | None) -> None:
    """``selp``: only the lanes of the operand that is chosen count. -1 stands for an immediate."""
    chosen = ~w.R[predicate] if negated else w.R[predicate]
    marks = []
    for register, where in ((a, chosen), (b, ~chosen)):
        mark = w.taint.get(register)
        if mark is not None and (mark.lanes & where).any():
            marks.append(mark._replace(lanes=mark.lanes & where))
    if predicate in w.taint:
        marks.append(w.taint[predicate])
    assign(w, target, _join(marks), mask)


def logical(
    w: Warp, target: int, a: tuple[int, bool], b: tuple[int, bool], both: bool, mask: Array | None
) -> None:
    """``and`` (``both``) or ``or`` of predicates, each with whether it is negated: one alone may decide."""
    marks = [w.taint[register] for register, _ in (a, b) if register in w.taint]
    decided = np.zeros(32, bool)
    for register, negated in (a, b):
        value = w.R[register] ^ negated
        defined = ~w.taint[register].lanes if register in w.taint else True
        decided = decided | ((~value if both else value) & defined)
    mark = _join(marks)
    assign(w, target, None if mark is None else mark._replace(lanes=mark.lanes & ~decided), mask)


def loaded(
    w: Warp, ins: Instruction, cta: Cta, targets: list[int], lanes: list[Array], address: int, mask: Array
) -> None:
    """Registers were loaded; ``lanes[i]`` of target i come from unwritten bytes."""
    for target, undefined in zip(targets, lanes):
        assign(w, target, Mark(undefined, ins, address, cta) if undefined.any() else None, mask)


def operation(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """Before an operation: report undefined values that decide something there."""
    to_memory = ins.root == "st" and not any(p.startswith(("shared", "local", "param")) for p in ins.parts)
    for position, operand in enumerate(ins.operands):
        why = ""
        if isinstance(operand, Address):
            why = "it is part of an address"
        elif to_memory or ins.root == "red" or (ins.root == "atom" and position > 0):
            why = "it is stored to memory"
        elif ins.root == "wgmma" and position == 1:
            why = "it is operand A of WGMMA"
        for register in registers(operand) if why else ():
            _used(m, w, ins, register, mask, why)


def guard(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """Before a branch or an operation with a predicate."""
    if isinstance(ins.pred, Reg):
        _used(m, w, ins, ins.pred.index, mask, "whether this runs depends on it")


def _used(m: Machine, w: Warp, ins: Instruction, register: int, mask: Array, why: str) -> None:
    mark = w.taint.get(register)
    if mark is None or not (mark.lanes & mask).any():
        return
    lanes = mark.lanes & mask
    if mark.origin is None:
        text = f"a value from a register that nothing has written; {why}"
        m.report(Kind.UNINITIALISED, text, w, ins, lanes=lanes)
        return
    origin = m.source(mark.origin) or f"PTX line {mark.origin.line}"
    text = f"a value read from shared memory that nothing has written, at {origin}; {why}"
    mark.cta.early_reads.setdefault(
        (ins.line, w.agent),
        (mark.address, lambda: m.report(Kind.UNINITIALISED, text, w, ins, address=mark.address, lanes=lanes)),
    )


def moved(w: Warp, target: int, source: object, from_lane: Array, mask: Array) -> None:
    """A shuffle: lane i of the target comes from lane ``from_lane[i]`` of the source."""
    mark = w.taint.get(source.index) if isinstance(source, Reg) else None
    assign(w, target, mark._replace(lanes=mark.lanes[from_lane]) if mark is not None else None, mask)


def matrix_product(w: Warp, d: list[int], a: list[int], b: list[int], c: list[int], wide: bool) -> None:
    """``mma.sync``: a row of D depends on that row of A, a column on that column of B.

    ``wide``: one element a register in D (f32, s32); otherwise two.
    """
    marks = [w.taint[r] for r in (*a, *b, *c) if r in w.taint]
    if not marks:
        for register in d:
            w.taint.pop(register, None)
        return
    lane = np.arange(32)
    rows, columns = np.zeros(16, bool), np.zeros(8, bool)
    for i, register in enumerate(a):
        if register in w.taint:
            rows[(lane // 4 + 8 * (i % 2))[w.taint[register].lanes]] = True
    for register in b:
        if register in w.taint:
            columns[(lane // 4)[w.taint[register].lanes]] = True
    for i, register in enumerate(d):
        row = lane // 4 + 8 * (i // 2 if wide else i)
        first = (lane % 4) * 2
        undefined = rows[row] | (columns[first + i % 2] if wide else columns[first] | columns[first + 1])
        if c[i] in w.taint:
            undefined = undefined | w.taint[c[i]].lanes
        assign(w, register, marks[0]._replace(lanes=undefined) if undefined.any() else None, None)


def undefined_lanes(w: Warp, sources: list[object], mask: Array) -> Array | None:
    """For a store to shared memory: bool (lanes of mask, sources), or None where all is defined."""
    if not any(isinstance(s, Reg) and s.index in w.taint for s in sources):
        return None
    nothing = np.zeros(32, bool)
    found = [
        w.taint[s.index].lanes if isinstance(s, Reg) and s.index in w.taint else nothing for s in sources
    ]
    return np.stack([f[mask] for f in found], axis=1)
