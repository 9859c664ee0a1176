"""Checked accesses to shared and global memory, used by the handlers of every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import fast, peers, suspects
from .lanes import note_read, note_write
from .memory import Fault
from .ordering import order_of
from .ptx import Address, Instruction
from .reports import EmulatorError, Kind
from .shadow import AgentKind, Index, byte_index
from .state import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, Cta, Warp

if TYPE_CHECKING:
    from .machine import Machine

Array = np.ndarray


def shared_target(m: Machine, w: Warp, ins: Instruction, addresses: Array, size: int, lanes: Array) -> list:
    """Split cluster-window ``addresses`` by CTA: a list of (cta, positions, offsets) with bounds checked.

    Positions whose access is out of bounds are reported and left out.
    """
    ctas = w.cta.cluster.ctas
    offsets = addresses & OFFSET_MASK
    compiled = fast.kernels()
    if compiled is not None:
        rank = compiled.one_target(addresses, size, RANK_SHIFT, SHARED_BASE, m.shared_bytes, len(ctas))
        if rank == w.cta.rank:
            return [(w.cta, slice(None), offsets)]
    ranks = addresses >> RANK_SHIFT
    bad = (
        (offsets < SHARED_BASE)
        | (offsets + size > m.shared_bytes)
        | (ranks >= len(w.cta.cluster.ctas))
        | (ranks < 0)
    )
    if bad.any():
        address = int(addresses[bad][0])
        m.report(
            Kind.OUT_OF_BOUNDS,
            f"{size} bytes at shared address {address:#x}; this launch has shared memory "
            f"{SHARED_BASE:#x} to {m.shared_bytes:#x}",
            w,
            ins,
            address=address,
            lanes=lanes,
        )
    if size > 1 and (addresses % size).any():
        address = int(addresses[addresses % size != 0][0])
        m.report(
            Kind.MISALIGNED, f"{size} bytes need an address that {size} divides", w, ins, address=address
        )
    out = []
    good = ~bad
    first = ranks[0]
    if not bad.any() and (ranks == first).all():
        out.append((w.cta.cluster.ctas[int(first)], slice(None), offsets))
    else:
        for rank in np.unique(ranks[good]):
            where = good & (ranks == rank)
            out.append((w.cta.cluster.ctas[int(rank)], where, offsets[where]))
    for cta, _, _ in out:
        if cta is not w.cta and "async" not in ins.parts:  # their use ends on an mbarrier
            peers.note_use(m, w, ins, cta, w.agent, w.clock)
    return out


def check_read(m: Machine, w: Warp, ins: Instruction, cta: Cta, index: Index) -> None:
    """Note an ordinary read of shared memory by a warp, and report what is wrong with it."""
    if not m.check:
        return
    conflict = cta.shadow.read(index, w.agent, w.clock, w.vc, ins, order_of(ins.parts).strong)
    if conflict is not None:
        m.report_conflict(conflict, "read", w, ins, cta)


def note_unwritten(
    m: Machine, w: Warp, ins: Instruction, cta: Cta, index: Index, agent: int, text: str
) -> None:
    """Remember a read of bytes that nothing has written.

    It is reported when the CTA ends, unless a write that is not ordered after it turns up: then the read came
    too early by the accident of this schedule, and the race is what gets reported.
    """
    missing = cta.shadow.unwritten(index)
    if missing is not None:

        def tell() -> None:
            look_at = suspects.unwritten(m, w, ins, cta, missing)
            m.report(Kind.UNINITIALISED, text, w, ins, address=missing, look_at=look_at)

        cta.early_reads.setdefault((ins.line, agent), (missing, tell))


def check_write(
    m: Machine,
    w: Warp,
    ins: Instruction,
    cta: Cta,
    index: Index,
    lanes: Array,
    same: Callable[[], bool] | None = None,
) -> None:
    """Note an ordinary write of shared memory by a warp, and report what is wrong with it.

    ``same`` tells whether the bytes hold the value already: two warps that write one value do no harm.
    """
    w.unfenced |= lanes
    if not m.check:
        return
    conflict = cta.shadow.write(index, w.agent, w.clock, w.vc, True, ins, order_of(ins.parts).strong)
    if conflict is not None:
        harmless = conflict.wrote and conflict.agent.kind is AgentKind.WARP and same is not None and same()
        m.report_conflict(conflict, "write", w, ins, cta, harmless)


def undefined_bytes(m: Machine, w: Warp, addresses: Array, size: int) -> tuple[Array, Cta] | None:
    """Mask of bytes never written, bool (n, size), of ``size`` at each shared address; None for none."""
    if not m.check:
        return None
    offsets, rank = addresses & OFFSET_MASK, int(addresses[0]) >> RANK_SHIFT
    if int(offsets.max()) + size > m.shared_bytes or rank >= len(w.cta.cluster.ctas):
        return None
    cta = w.cta.cluster.ctas[rank]
    compiled = fast.kernels()
    if compiled is not None and not compiled.any_of(cta.shadow.undefined, offsets, size):
        return None
    found = cta.shadow.undefined[offsets[:, None] + np.arange(size)]
    return (found, cta) if found.any() else None


def mark_undefined(m: Machine, w: Warp, addresses: Array, undefined: Array) -> None:
    """Bytes just stored hold undefined values: bool (n, size) at each shared address."""
    offsets, rank = addresses & OFFSET_MASK, int(addresses[0]) >> RANK_SHIFT
    if rank < len(w.cta.cluster.ctas) and int(offsets.max()) + undefined.shape[1] <= m.shared_bytes:
        index = offsets[:, None] + np.arange(undefined.shape[1])
        w.cta.cluster.ctas[rank].shadow.undefined[index[undefined]] = True


def load_shared(m: Machine, w: Warp, ins: Instruction, addresses: Array, size: int, lanes: Array) -> Array:
    """``size`` bytes of shared memory at each address as uint8 (n, size); zeros where out of bounds."""
    out = np.zeros((len(addresses), size), np.uint8)
    if m.check and ins.root == "ld" and not order_of(ins.parts).strong:
        note_read(m, w, ins, "shared", addresses, size, lanes)
    for cta, where, offsets in shared_target(m, w, ins, addresses, size, lanes):
        index = byte_index(offsets, size)
        check_read(m, w, ins, cta, index)
        out[where] = _rows(cta.smem, offsets, size)
    if m.stats is not None:
        m.stats.shared_access(ins, addresses, size)
    return out


def _rows(memory: Array, offsets: Array, size: int) -> Array:
    """``size`` bytes at each offset, which is in bounds."""
    compiled = fast.kernels()
    if compiled is not None:
        return compiled.rows(memory, offsets, size)
    return memory[offsets[:, None] + np.arange(size)]


def store_shared(m: Machine, w: Warp, ins: Instruction, addresses: Array, data: Array, lanes: Array) -> None:
    """Write uint8 (n, size) ``data`` to shared memory."""
    size = data.shape[1]
    targets = shared_target(m, w, ins, addresses, size, lanes)
    if m.check and ins.root == "st" and not order_of(ins.parts).strong:
        note_write(m, w, ins, "shared", addresses, data, lanes, lambda: _differs(targets, data))
    for cta, where, offsets in targets:
        index, mine, into = byte_index(offsets, size), data[where], offsets[:, None] + np.arange(size)
        check_write(m, w, ins, cta, index, lanes, lambda: np.array_equal(cta.smem[into], mine))  # noqa: B023
        cta.smem[into] = mine
    if m.stats is not None:
        m.stats.shared_access(ins, addresses, size)


def _differs(targets: list, data: Array) -> Array:
    """For each lane, whether ``data`` differs from what the shared memory holds."""
    different = np.zeros(len(data), bool)
    for cta, where, offsets in targets:
        held = cta.smem[offsets[:, None] + np.arange(data.shape[1])]
        different[where] = (held != data[where]).any(axis=1)
    return different


def load_global(m: Machine, w: Warp | None, ins: Instruction, addresses: Array, size: int) -> Array:
    """``size`` bytes of global memory at each address as uint8 (n, size); zeros where out of bounds."""
    check_alignment(m, w, ins, addresses, size)
    if m.stats is not None:
        m.stats.add(ins, "global_bytes", len(addresses) * size)
    try:
        out, unwritten = m.memory.load(addresses, size)
    except Fault as fault:
        report_fault(m, w, ins, fault, size, "read")
        out = np.zeros((len(addresses), size), np.uint8)
        good = ~fault.lanes
        if good.any():
            out[good] = m.memory.load(addresses[good], size)[0]
        return out
    if m.memory.gaps:
        report_gap(m, w, ins, addresses, size, "read")
    if unwritten:
        m.report(
            Kind.UNINITIALISED,
            "global memory is read that nothing has written",
            w,
            ins,
            address=int(addresses[0]),
            space="global",
        )
    return out


def store_global(m: Machine, w: Warp | None, ins: Instruction, addresses: Array, data: Array) -> None:
    """Write uint8 (n, size) ``data`` to global memory."""
    size = data.shape[1]
    check_alignment(m, w, ins, addresses, size)
    if m.stats is not None:
        m.stats.add(ins, "global_bytes", len(addresses) * size)
    m.progress += 1
    if m.memory.gaps:
        report_gap(m, w, ins, addresses, size, "write")
    try:
        m.memory.store(addresses, data)
    except Fault as fault:
        report_fault(m, w, ins, fault, size, "write")
        good = ~fault.lanes
        if good.any():
            m.memory.store(addresses[good], data[good])


def check_alignment(m: Machine, w: Warp | None, ins: Instruction, addresses: Array, size: int) -> None:
    """Report addresses of global memory that ``size`` does not divide."""
    if size in (2, 4, 8, 16) and (addresses & (size - 1)).any():
        address = int(addresses[(addresses & (size - 1)) != 0][0])
        m.report(
            Kind.MISALIGNED,
            f"{size} bytes need an address that {size} divides",
            w,
            ins,
            address=address,
            space="global",
        )


def report_fault(m: Machine, w: Warp | None, ins: Instruction, fault: Fault, size: int, verb: str) -> None:
    """Report an access outside every registered tensor."""
    _out_of_bounds(m, w, ins, fault, size, verb)


def report_gap(m: Machine, w: Warp | None, ins: Instruction, addresses: Array, size: int, verb: str) -> None:
    """Report an access between the rows of a strided tensor: a warning where it only reads."""
    fault = m.memory.between(addresses, size)
    if fault is not None:
        _out_of_bounds(m, w, ins, fault, size, verb, warning=verb == "read")


def _out_of_bounds(
    m: Machine, w: Warp | None, ins: Instruction, fault: Fault, size: int, verb: str, warning: bool = False
) -> None:
    who = _thread(w, ins, fault.address)
    m.report(
        Kind.OUT_OF_BOUNDS,
        f"{verb} of {size} bytes {fault}" + (f"; by {who}" if who else ""),
        w,
        ins,
        address=fault.address,
        space="global",
        warning=warning,
    )


def _thread(w: Warp | None, ins: Instruction, address: int) -> str:
    """The first thread of the warp whose operand is this address."""
    for operand in ins.operands if w is not None else ():
        if isinstance(operand, Address) and not operand.coords:
            assert w is not None
            found = np.flatnonzero((w.address(operand) == address) & w.live)
            if len(found):
                return "thread " + str(tuple(int(w.S[f"%tid.{axis}"][found[0]]) for axis in "xyz"))
    return ""


def stop(ins: Instruction, text: str) -> EmulatorError:
    """An error for an instruction that cannot be executed."""
    return EmulatorError(f"PTX line {ins.line}: {text}: {ins.text}")
