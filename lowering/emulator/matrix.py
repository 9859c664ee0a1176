"""Handlers of the tensor cores: ``wgmma``, ``mma.sync``, ``ldmatrix``, ``stmatrix``, ``movmatrix``.

A WGMMA group runs at an event between its commit and its wait and reads its operands then. Its accumulators
are arrays that are filled at that event, so whatever a register was moved to gets the result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from operator import is_

import numpy as np

from . import access, fast, suspects, taint
from .fast import opcodes as o
from .fast.registers import Registers
from .machine import Machine
from .ptx import Imm, Instruction, Vector, registers
from .reports import EmulatorError, Kind
from .semantics import ldmatrix, mma, tensor_core, wgmma
from .shadow import Pieces
from .state import OFFSET_MASK, SHARED_BASE, Warp
from .warp_ops import check_members
from .warpgroup import Accumulators, Warpgroup, signed, unsigned

Array = np.ndarray
Descriptor = wgmma.MatrixDescriptor
_parse_wgmma = functools.lru_cache(maxsize=256)(wgmma.parse_opcode)
_decode_descriptor = functools.lru_cache(maxsize=1024)(wgmma.decode_descriptor)
_parse_mma = functools.lru_cache(maxsize=256)(mma.parse_opcode)


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
    operands, from_registers = ins.operands, words[0] is None
    part = w.number % 4
    number = int(group.numbers[o.ISSUED + part])
    group.numbers[o.ISSUED + part] += 1
    if number == group.numbers[o.NEXT]:
        _check_descriptors(m, w, ins, words)
        group.begin(w.frames[-1].pc, words)
    same = _same(m, group.row(number), ins, words)
    if not same:
        m.report(
            Kind.BARRIER_DIVERGENCE,
            "the warps of a warpgroup issue different wgmma operations or descriptors",
            w,
            ins,
        )
    commits = group.commits(w)
    block, old = _accumulators(w, operands[0].indices, words[2])
    block.group = commits + 1
    a_registers = np.stack([w.R[i] for i in operands[1].indices], axis=1) if from_registers else None
    if old is not None or a_registers is not None or not same:
        group.held[number, part] = old, a_registers
    if from_registers:
        for i in operands[1].indices:
            w.pending_a[i] = commits + 1
    if group.join(number, w, block):
        check_operands(m, w, ins, number)
    if m.stats is not None:
        m.stats.add(ins, "matrix_flops", flops_of(ins))


def flops_of(ins: Instruction) -> int:
    """Of one warp's quarter of a WGMMA."""
    shape = _parse_wgmma(ins.opcode)
    return 2 * 16 * shape.n * shape.k


def _same(m: Machine, row: Array, ins: Instruction, words: tuple[int | None, int, bool]) -> bool:
    """True if the row is of this instruction with these descriptors."""
    if m.program.steps[row[o.W_STEP]].first is not ins:
        return False
    mine = signed(words[0] or 0), signed(words[1]), words[2]
    return all(row[at] == word for at, word in zip((o.W_A, o.W_B, o.W_SCALE), mine, strict=True))


def _check_descriptors(m: Machine, w: Warp, ins: Instruction, words: tuple[int | None, int, bool]) -> None:
    """Report descriptors that mean nothing: the WGMMA cannot be executed."""
    try:
        for word in words[:2]:
            if word is not None:
                _decode_descriptor(word)
    except wgmma.MatrixDescriptorError as error:
        m.report(Kind.DESCRIPTOR, str(error), w, ins)
        raise EmulatorError(str(error), tuple(m.log.reports)) from None


def _accumulators(w: Warp, indices: list[int], scale: bool) -> tuple[Accumulators, list[Array] | None]:
    """The block that a WGMMA computes into, and accumulators that it starts from, where others."""
    place = w.pending.get(id(w.R[indices[0]]))
    block = None if place is None else w.accumulating[place >> o.BLOCK_BITS]
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
    slot = next(n for n in itertools.count() if n not in w.accumulating)
    block = w.accumulating[slot] = Accumulators(len(indices), slot)
    w.pending.update(zip(map(id, block.rows), block.places(), strict=True))
    if w.row is not None:
        w.row.hold(block)
    if isinstance(w.R, Registers):
        w.R.await_values(indices, block.rows, block.places())
    else:
        for i, value in zip(indices, block.rows, strict=True):
            w.R[i] = value
    return block, old


def _warpgroup(w: Warp, ins: Instruction) -> Warpgroup:
    if w.group is None:
        raise access.stop(ins, f"warp {w.number} is not in a whole warpgroup of four warps")
    return w.group


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


def check_operands(m: Machine, w: Warp, ins: Instruction, number: int) -> None:
    """Race checks of both operands of a complete WGMMA against the clocks of the warp that knows least."""
    group = _warpgroup(w, ins)
    row, (vc, fc) = group.row(number), group.clocks[number % len(group.rows)]
    shape, (a, b), clock = _parse_wgmma(ins.opcode), _descriptors(row, ins), int(row[o.W_GROUP]) + 1
    if not m.check or _nothing_wrong(group, ins, (a, b), (vc, fc), clock):
        return
    trans_a, trans_b = _transposes(ins)
    cta = w.cta
    operands = [("B", b, shape.n, shape.b, trans_b)]
    if a is not None:
        operands.append(("A", a, 64, shape.a, trans_a))
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


def _descriptors(row: Array, ins: Instruction) -> tuple[Descriptor | None, Descriptor]:
    """Of A, unless it lies in registers, and of B."""
    a = None if isinstance(ins.operands[1], Vector) else _decode_descriptor(unsigned(row[o.W_A]))
    return a, _decode_descriptor(unsigned(row[o.W_B]))


def _nothing_wrong(
    group: Warpgroup,
    ins: Instruction,
    descriptors: tuple[Descriptor | None, Descriptor],
    clocks: tuple[Array, Array],
    clock: int,
) -> bool:
    """Note the reads of both operands in compiled code; False, with nothing noted, where one needs a look."""
    compiled = fast.kernels()
    if compiled is None:
        return False
    shape, (a, b), (trans_a, trans_b) = _parse_wgmma(ins.opcode), descriptors, _transposes(ins)
    try:
        pieces = [_bytes_of(b, shape.n, shape.b, trans_b)]
        if a is not None:
            pieces.append(_bytes_of(a, 64, shape.a, trans_a))
    except wgmma.MatrixDescriptorError:
        return False
    end = group.cta.machine.shared_bytes
    if any(int(p[0]) < SHARED_BASE or int(p[-1]) + 16 > end for p in pieces):
        return False
    return group.cta.shadow.consume(compiled, pieces, clocks, group.agent, clock, ins)


def immediates_of(ins: Instruction) -> tuple[int, ...]:
    """Scales and transposes that follow scale-d."""
    return tuple(x.value for x in ins.operands[4:] if isinstance(x, Imm))


def _transposes(ins: Instruction) -> tuple[bool, bool]:
    extra = immediates_of(ins)[2:]
    if isinstance(ins.operands[1], Vector):
        return False, bool(extra[0]) if extra else False
    return (bool(extra[0]), bool(extra[1])) if len(extra) == 2 else (False, False)


def wgmma_commit(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``wgmma.commit_group``: when all four warps have committed, the group may run."""
    group = _warpgroup(w, ins)
    number = group.commit(w)
    if number is not None:
        committed(m, group, number)


def committed(m: Machine, group: Warpgroup, number: int) -> None:
    """All four warps have committed this group."""
    at = m.step

    def run() -> None:
        # Groups run in the order of their commits, whatever their events say.
        if group.done != number:
            m.later(run, 1, 8)
            return
        _execute_all(m, group, group.of_group(number))
        group.numbers[o.DONE_GROUPS] = number + 1
        if m.timeline is not None:
            m.timeline.add(
                f"CTA {group.cta.index} WGMMA {group.number}", "wgmma", f"group {number}", at, m.step
            )
        m.wake(group.waiters)

    m.later(run)


def _execute_all(m: Machine, group: Warpgroup, numbers: list[int]) -> None:
    """Execute WGMMAs one after another; compiled code takes runs of those whose operands lie in memory."""
    done = 0
    while done < len(numbers):
        if m.runner is not None and not group.held:
            rows = group.rows[np.array(numbers[done:]) % len(group.rows)]
            done += m.runner.multiply(rows, group.cta.smem)
        if done < len(numbers):
            _execute(m, group, numbers[done])
            done += 1


def _execute(m: Machine, group: Warpgroup, number: int) -> None:
    row, smem = group.row(number), group.cta.smem
    blocks = [group.blocks[int(at)] for at in row[o.W_BLOCKS :]]
    held = [group.held.pop((number, part), (None, None)) for part in range(4)]
    for block, (old, _) in zip(blocks, held, strict=True):
        if old is not None:
            np.stack(old, out=block)
    ins = m.program.steps[row[o.W_STEP]].first
    if not _fit(ins, blocks, [a for _, a in held]):
        for block in blocks:
            block[:] = 0
        return
    if m.runner is not None and m.runner.multiply(row[None], smem):
        return
    shape, (a_at, b_at), (trans_a, trans_b) = (
        _parse_wgmma(ins.opcode),
        _descriptors(row, ins),
        _transposes(ins),
    )
    try:
        b = wgmma.read_operand(smem, b_at, shape.n, shape.b, trans_b)
        if a_at is not None:
            a = wgmma.read_operand(smem, a_at, 64, shape.a, trans_a)
        else:
            a = wgmma.a_from_registers(np.concatenate([x for _, x in held if x is not None]), shape.a)
    except wgmma.MatrixDescriptorError as error:
        m.report(Kind.DESCRIPTOR, str(error), group.warps[0], ins)
        for block in blocks:
            block[:] = 0
        return
    negate = [s == -1 for s in (*immediates_of(ins), 1, 1)[:2]]  # integer types have none
    wgmma.accumulate(
        shape, a, b, blocks, bool(row[o.W_SCALE]), negate_a=negate[0], negate_b=negate[1],
        saturate="satfinite" in ins.parts,
    )  # fmt: skip


def _fit(ins: Instruction, blocks: list[Array], a: list[Array | None]) -> bool:
    """True if all four warps have issued a WGMMA of this kind; of others the result has no meaning."""
    registers_of_a = isinstance(ins.operands[1], Vector)
    count = _parse_wgmma(ins.opcode).accumulator_registers
    return all(len(b) == count for b in blocks) and all((x is not None) == registers_of_a for x in a)


def wgmma_wait(m: Machine, w: Warp, ins: Instruction, mask: Array) -> object:
    """``wgmma.wait_group N``: all but the latest N groups are complete when this returns."""
    group = _warpgroup(w, ins)
    target = group.commits(w) - int(ins.operands[0].value)
    if group.done < target:
        return await_group(
            m, w, target, sum((group.commits(g) < target) << i for i, g in enumerate(group.warps))
        )
    if target > 0:
        w.learn(group.agent, target)
    complete = [block for block in w.accumulating.values() if block.group <= target]
    for block in complete:
        del w.accumulating[block.slot]
        group.blocks.pop(block.address, None)
        for row in block.rows if w.accumulating else ():
            del w.pending[id(row)]
        if w.row is not None:
            w.row.let_go(block)
    if not w.accumulating:
        w.pending.clear()
    if complete and isinstance(w.R, Registers):
        w.R.arrived(w.pending)
    if w.pending_a:
        w.pending_a = {r: number for r, number in w.pending_a.items() if number > target}
    return None


def await_group(m: Machine, w: Warp, target: int, missing: int) -> object:
    """A warp waits for so many WGMMA groups; ``missing``: bits of the warps that have not committed them."""
    group = w.group
    assert group is not None
    waiting = [g.number for i, g in enumerate(group.warps) if missing >> i & 1]
    text = f"WGMMA group {target - 1} of warpgroup {group.number}"
    if waiting:
        text += f", which warps {waiting} have not committed"
    return m.block(w, text, group.waiters)


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
