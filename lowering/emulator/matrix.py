"""Handlers of the tensor cores: ``wgmma``, ``mma.sync``, ``ldmatrix``, ``stmatrix``, ``movmatrix``.

A WGMMA group runs at an event between its commit and its wait and reads its operands then. Its accumulators
are arrays that are filled at that event, so whatever a register was moved to gets the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_

import numpy as np

from . import access, fast, suspects, taint
from .fast.registers import Registers
from .machine import Machine
from .ptx import Imm, Instruction, Vector, registers
from .reports import EmulatorError, Kind
from .semantics import ldmatrix, mma, tensor_core, wgmma
from .shadow import Pieces
from .state import OFFSET_MASK, SHARED_BASE, Warp, Warpgroup
from .warp_ops import check_members

Array = np.ndarray
_parse_wgmma = functools.lru_cache(maxsize=256)(wgmma.parse_opcode)
_decode_descriptor = functools.lru_cache(maxsize=1024)(wgmma.decode_descriptor)
_parse_mma = functools.lru_cache(maxsize=256)(mma.parse_opcode)


class _Accumulators:
    """One warp's accumulators that a WGMMA computes, pending until group number ``group`` is waited for.

    ``values`` is uint32 (registers, 32), and ``rows`` are what the registers hold. A WGMMA that goes on from
    pending accumulators computes in place.
    """

    __slots__ = ("group", "rows", "values")

    def __init__(self, count: int) -> None:
        self.values = np.empty((count, 32), np.uint32)
        self.rows = list(self.values)
        self.group = 0


@dataclass
class _Part:
    """Contribution of one warp to a WGMMA.

    ``old``: accumulators to start from where these are others than those that it computes. ``a``: registers.
    """

    old: list[Array] | None
    new: Array
    a: Array | None
    vc: Array
    fc: Array


@dataclass
class _Operation:
    """A WGMMA of a warpgroup: complete when all four warps have issued it."""

    ins: Instruction
    shape: wgmma.Shape
    a: wgmma.MatrixDescriptor | None
    b: wgmma.MatrixDescriptor
    words: tuple
    immediates: tuple[int, ...]
    parts: dict[int, _Part] = field(default_factory=dict)


@dataclass
class _Group:
    """A commit group: operations, and how many warps have committed it."""

    operations: list[_Operation] = field(default_factory=list)
    committed: int = 0
    issued: int = 0


def wgmma_fence(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``wgmma.fence``: orders earlier register writes before later WGMMAs."""
    w.wgmma_fenced = True
    w.dirty.clear()
    w.read.clear()


def wgmma_async(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``wgmma.mma_async``: one warp's quarter of the operation joins the others."""
    _warpgroup(w, ins)
    if not mask.all():
        m.report(Kind.BARRIER_DIVERGENCE, "wgmma needs all threads of the warpgroup", w, ins, lanes=mask)
    operands = ins.operands
    _check_fence(m, w, ins)
    scale = bool(w.value(operands[3], "pred" if hasattr(operands[3], "cls") else "b32")[0])
    b_word = int(w.value(operands[2], "b64")[0])
    a_word = None if isinstance(operands[1], Vector) else int(w.value(operands[1], "b64")[0])
    issue(m, w, ins, (a_word, b_word, scale))


def issue(m: Machine, w: Warp, ins: Instruction, words: tuple[int | None, int, bool]) -> None:
    """One warp's quarter of a WGMMA with these descriptors, ``None`` for an A in registers, and scale-d."""
    group = _warpgroup(w, ins)
    shape = _parse_wgmma(ins.opcode)
    operands, from_registers = ins.operands, words[0] is None
    sequence = w.state["wgmma_sequence"] = w.state.get("wgmma_sequence", -1) + 1
    if sequence >= len(group.operations):
        group.operations.append(_decoded(m, w, ins, shape, words))
    operation = group.operations[sequence]
    if operation.ins is not ins or operation.words != words:
        m.report(
            Kind.BARRIER_DIVERGENCE,
            "the warps of a warpgroup issue different wgmma operations or descriptors",
            w,
            ins,
        )
    commits = w.state.get("wgmma_commits", 0)
    block, old = _accumulators(w, operands[0].indices, words[2])
    block.group = commits + 1
    a_registers = np.stack([w.R[i] for i in operands[1].indices], axis=1) if from_registers else None
    operation.parts[w.number % 4] = _Part(old, block.values, a_registers, w.vc, w.fc)
    if from_registers:
        for i in operands[1].indices:
            w.pending_a[i] = commits + 1
    _group_of(group, commits).issued += 1
    if len(operation.parts) == 4:
        _group_of(group, commits).operations.append(operation)
        _check_operands(m, w, ins, operation, group, commits + 1)
    if m.stats is not None:
        m.stats.add(ins, "matrix_flops", 2 * 16 * shape.n * shape.k)


def _decoded(
    m: Machine, w: Warp, ins: Instruction, shape: wgmma.Shape, words: tuple[int | None, int, bool]
) -> _Operation:
    """The operation that the first warp of four begins."""
    immediates = tuple(o.value for o in ins.operands[4:] if isinstance(o, Imm))
    try:
        a = None if words[0] is None else _decode_descriptor(words[0])
        b = _decode_descriptor(words[1])
    except wgmma.MatrixDescriptorError as error:
        m.report(Kind.DESCRIPTOR, str(error), w, ins)
        raise EmulatorError(str(error), tuple(m.log.reports)) from None
    return _Operation(ins, shape, a, b, words, immediates)


def _accumulators(w: Warp, indices: list[int], scale: bool) -> tuple[_Accumulators, list[Array] | None]:
    """The block that a WGMMA computes into, and accumulators that it starts from, where others."""
    block = w.pending.get(id(w.R[indices[0]]))
    if scale and block is not None and len(block.rows) == len(indices):
        registers = w.R
        if isinstance(registers, Registers):
            same = registers.holds(indices, block.rows)
        else:
            same = all(map(is_, map(registers.__getitem__, indices), block.rows))
        if same:
            return block, None
    held = map(w.R.__getitem__, indices)
    # What is not pending is kept as it is now: compiled code may change it.
    old = [row if id(row) in w.pending else row.copy() for row in held] if scale else None
    block = _Accumulators(len(indices))
    w.pending.update(dict.fromkeys(map(id, block.rows), block))
    w.accumulating.append(block)
    for i, value in zip(indices, block.rows, strict=True):
        w.R[i] = value
    return block, old


def _warpgroup(w: Warp, ins: Instruction) -> Warpgroup:
    if w.group is None:
        raise access.stop(ins, f"warp {w.number} is not in a whole warpgroup of four warps")
    return w.group


def _group_of(group: Warpgroup, number: int) -> _Group:
    while len(group.groups) <= number:
        group.groups.append(_Group())  # type: ignore[arg-type]
    return group.groups[number]  # type: ignore[return-value]


def _check_fence(m: Machine, w: Warp, ins: Instruction) -> None:
    if w.wgmma_fenced and not w.dirty and not w.read:
        return
    accumulators = set(registers(ins.operands[0]))
    read = accumulators & w.read
    used = accumulators | (set(registers(ins.operands[1])) if isinstance(ins.operands[1], Vector) else set())
    changed = sorted(used & w.dirty)
    if changed or read or not w.wgmma_fenced:
        if not w.wgmma_fenced:
            what = "no wgmma.fence came before the first wgmma"
        elif changed:
            what = f"{len(changed)} registers changed"
        else:
            what = f"{len(read)} accumulators are overwritten that threads have read since the last one"
        m.report(Kind.MISSING_WGMMA_FENCE, what, w, ins)
        w.dirty.difference_update(used)
        w.read.difference_update(read)
        w.wgmma_fenced = True


def _check_operands(
    m: Machine, w: Warp, ins: Instruction, op: _Operation, group: Warpgroup, clock: int
) -> None:
    """Race checks of both operands against the clocks of the warp that knows least."""
    if not m.check or _nothing_wrong(m, op, group, clock):
        return
    vc = functools.reduce(np.minimum, [p.vc for p in op.parts.values()])
    fc = functools.reduce(np.minimum, [p.fc for p in op.parts.values()])
    trans_a, trans_b = _transposes(op)
    cta = w.cta
    operands = [("B", op.b, op.shape.n, op.shape.b, trans_b)]
    if op.a is not None:
        operands.append(("A", op.a, 64, op.shape.a, trans_a))
    for name, descriptor, rows, dtype, transposed in operands:
        size = np.dtype(tensor_core.storage_type(dtype)).itemsize
        try:
            pieces = wgmma.operand_pieces(descriptor, rows, size, transposed)
        except wgmma.MatrixDescriptorError as error:
            m.report(Kind.DESCRIPTOR, str(error), w, ins)
            continue
        if int(pieces[0]) * 16 < SHARED_BASE or int(pieces[-1]) * 16 + 16 > m.shared_bytes:
            m.report(
                Kind.OUT_OF_BOUNDS,
                f"operand {name} reaches shared bytes {int(pieces[0]) * 16:#x} to "
                f"{int(pieces[-1]) * 16 + 16:#x}",
                w,
                ins,
                address=int(pieces[0]) * 16,
            )
            continue
        index = Pieces(pieces << 4, 16)
        access.note_unwritten(
            m, w, ins, cta, index, group.agent, f"operand {name} has bytes that nothing has written"
        )
        conflict = cta.shadow.read(index, group.agent, clock, vc, ins)
        if conflict is not None:
            m.report_conflict(conflict, "read", w, ins, cta)
            continue
        unfenced = cta.shadow.unfenced(index, fc)
        if unfenced is not None:
            m.report(
                Kind.MISSING_PROXY_FENCE,
                f"operand {name} has bytes written by {unfenced.agent.name}, which ran no "
                "fence.proxy.async between its store and the barrier",
                w,
                ins,
                address=unfenced.offset,
                other=m.place(f"write by {unfenced.agent.name}", unfenced.ins),
                look_at=suspects.unfenced(m, w, ins, cta, unfenced),
            )


@functools.lru_cache(maxsize=1024)
def _bytes_of(descriptor: wgmma.MatrixDescriptor, rows: int, dtype: str, transposed: bool) -> Array:
    """Offsets of the 16-byte pieces of an operand."""
    size = np.dtype(tensor_core.storage_type(dtype)).itemsize
    return wgmma.operand_pieces(descriptor, rows, size, transposed) << 4


def _nothing_wrong(m: Machine, op: _Operation, group: Warpgroup, clock: int) -> bool:
    """Note the reads of both operands in compiled code; False, with nothing noted, where one needs a look."""
    compiled = fast.kernels()
    if compiled is None:
        return False
    trans_a, trans_b = _transposes(op)
    try:
        pieces = [_bytes_of(op.b, op.shape.n, op.shape.b, trans_b)]
        if op.a is not None:
            pieces.append(_bytes_of(op.a, 64, op.shape.a, trans_a))
    except wgmma.MatrixDescriptorError:
        return False
    if any(int(p[0]) < SHARED_BASE or int(p[-1]) + 16 > m.shared_bytes for p in pieces):
        return False
    one, two, three, four = op.parts.values()
    clocks = (one.vc, two.vc, three.vc, four.vc), (one.fc, two.fc, three.fc, four.fc)
    return group.cta.shadow.consume(compiled, pieces, clocks, group.agent, clock, op.ins)


def _transposes(op: _Operation) -> tuple[bool, bool]:
    extra = op.immediates[2:]
    if op.a is None:
        return False, bool(extra[0]) if extra else False
    return (bool(extra[0]), bool(extra[1])) if len(extra) == 2 else (False, False)


def wgmma_commit(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``wgmma.commit_group``: when all four warps have committed, the group may run."""
    group = _warpgroup(w, ins)
    number = w.state.get("wgmma_commits", 0)
    w.state["wgmma_commits"] = number + 1
    this = _group_of(group, number)
    this.committed += 1
    if this.committed < 4:
        return
    at = m.step

    def run() -> None:
        # Groups run in the order of their commits, whatever their events say.
        if group.done != number:
            m.later(run, 1, 8)
            return
        for operation in this.operations:
            _execute(m, group, operation)
        group.done = number + 1
        if m.timeline is not None:
            m.timeline.add(
                f"CTA {group.cta.index} WGMMA {group.number}", "wgmma", f"group {number}", at, m.step
            )
        m.wake(group.waiters)

    m.later(run)


def _execute(m: Machine, group: Warpgroup, op: _Operation) -> None:
    if len(op.parts) < 4:
        return
    trans_a, trans_b = _transposes(op)
    smem = group.cta.smem
    parts = [op.parts[i] for i in range(4)]
    try:
        b = wgmma.read_operand(smem, op.b, op.shape.n, op.shape.b, trans_b)
        if op.a is not None:
            a = wgmma.read_operand(smem, op.a, 64, op.shape.a, trans_a)
        else:
            stacked = np.concatenate([p.a for p in parts if p.a is not None])
            a = wgmma.a_from_registers(stacked, op.shape.a)
    except wgmma.MatrixDescriptorError as error:
        m.report(Kind.DESCRIPTOR, str(error), group.warps[0], op.ins)
        for part in parts:
            part.new[:] = 0
        return
    for part in parts:
        if part.old is not None:
            np.stack(part.old, out=part.new)
    negate = [s == -1 for s in (*op.immediates, 1, 1)[:2]]  # integer types have none
    wgmma.accumulate(
        op.shape, a, b, [p.new for p in parts], op.words[2], negate_a=negate[0], negate_b=negate[1],
        saturate="satfinite" in op.ins.parts,
    )  # fmt: skip
    op.parts.clear()


def wgmma_wait(m: Machine, w: Warp, ins: Instruction, mask: Array) -> object:
    """``wgmma.wait_group N``: all but the latest N groups are complete when this returns."""
    group = _warpgroup(w, ins)
    target = w.state.get("wgmma_commits", 0) - int(ins.operands[0].value)
    if group.done < target:
        waiting = [g.number for g in group.warps if g.state.get("wgmma_commits", 0) < target]
        text = f"WGMMA group {target - 1} of warpgroup {group.number}"
        if waiting:
            text += f", which warps {waiting} have not committed"
        return m.block(w, text, group.waiters)
    if target > 0:
        w.learn(group.agent, target)
    for block in [block for block in w.accumulating if block.group <= target]:
        w.accumulating.remove(block)
        for row in block.rows:
            del w.pending[id(row)]
        if isinstance(w.R, Registers):
            w.R.arrived(w.pending)
    if w.pending_a:
        w.pending_a = {r: number for r, number in w.pending_a.items() if number > target}
    return None


def mma_sync(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``mma.sync``."""
    if not mask.all():
        m.report(Kind.BARRIER_DIVERGENCE, "mma.sync needs all 32 lanes", w, ins, lanes=mask)
    try:
        shape = _parse_mma(ins.opcode)
    except ValueError as error:
        raise access.stop(ins, str(error)) from None
    d, a, b, c = ins.operands
    sources = [[w.value(item, "b32") for item in o.items] for o in (a, b, c)]
    if w.taint:
        taint.matrix_product(
            w,
            registers(d),
            registers(a),
            registers(b),
            [getattr(i, "index", -1) for i in c.items],
            shape.d != "f16",
        )
    result = mma.product(shape, *sources)
    for i, target in enumerate(d.items):
        w.set(target, result[i], mask)
    if m.stats is not None:
        m.stats.add(ins, "matrix_flops", 2 * 16 * 8 * shape.k)


def _matrix_form(ins: Instruction) -> tuple[int, bool]:
    if not ins.has("m8n8") or not ins.has("b16"):
        raise access.stop(ins, "only matrices of 8x8 16-bit elements are modelled")
    return next(n for n in (1, 2, 4) if ins.has(f"x{n}")), ins.has("trans")


def load_matrix(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``ldmatrix``."""
    count, transposed = _matrix_form(ins)
    check_members(m, w, ins, np.full(32, 0xFFFFFFFF, np.uint32), mask)
    addresses = ldmatrix.row_addresses(w.address(ins.operands[1]) & ((1 << 60) - 1), count).reshape(-1)
    lanes = np.arange(32) < 8 * count
    rows = access.load_shared(m, w, ins, addresses, 16, lanes)
    values = ldmatrix.loaded(np.ascontiguousarray(rows).view(np.uint16).reshape(count, 8, 8), transposed)
    targets = ins.operands[0].items if isinstance(ins.operands[0], Vector) else (ins.operands[0],)
    unwritten = access.undefined_bytes(m, w, addresses, 16)
    if unwritten is not None or w.taint:
        found, cta = unwritten if unwritten is not None else (np.zeros((8 * count, 16), bool), w.cta)
        pairs = np.ascontiguousarray(found).view(np.uint16).reshape(count, 8, 8)
        held = ldmatrix.distribute(pairs, transposed) != 0
        first = int(addresses[np.argmax(found.any(axis=1))]) & OFFSET_MASK
        taint.loaded(w, ins, cta, [t.index for t in targets], [held[:, i] for i in range(count)], first, mask)
    for i, target in enumerate(targets):
        w.set(target, values[i], mask)


def store_matrix(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``stmatrix``."""
    count, transposed = _matrix_form(ins)
    check_members(m, w, ins, np.full(32, 0xFFFFFFFF, np.uint32), mask)
    addresses = ldmatrix.row_addresses(w.address(ins.operands[0]) & ((1 << 60) - 1), count).reshape(-1)
    sources = ins.operands[1].items if isinstance(ins.operands[1], Vector) else (ins.operands[1],)
    rows = ldmatrix.collect(np.stack([w.value(s, "b32") for s in sources], axis=1), transposed)
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 16)
    access.store_shared(m, w, ins, addresses, data, mask)
    undefined = taint.undefined_lanes(w, list(sources), np.ones(32, bool)) if w.taint else None
    if undefined is not None:
        held = ldmatrix.collect(undefined.astype(np.uint32) * np.uint32(0xFFFFFFFF), transposed)
        access.mark_undefined(m, w, addresses, np.ascontiguousarray(held).view(np.uint8).reshape(-1, 16) != 0)


def move_matrix(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``movmatrix``."""
    w.set(ins.operands[0], ldmatrix.movmatrix(w.value(ins.operands[1], "b32")), mask)


HANDLERS: dict[str, Callable] = {
    "wgmma.fence": wgmma_fence, "wgmma.mma_async.sync": wgmma_async, "wgmma.commit_group": wgmma_commit,
    "wgmma.wait_group": wgmma_wait, "mma.sync": mma_sync, "ldmatrix": load_matrix, "stmatrix": store_matrix,
    "movmatrix": move_matrix,
}  # fmt: skip
