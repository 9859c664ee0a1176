"""Handlers of ``cp.async``: copies by the warp's own threads, in groups, or counted on an mbarrier.

A copy's data lands at an event some steps after its issue, at its wait at the latest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from . import access, fast, ordering, sync
from .fast import opcodes
from .lanes import Touch, note_copied
from .machine import Machine
from .ptx import Address, Instruction, Reg
from .shadow import AgentKind, byte_index
from .spans import of_lanes
from .state import OFFSET_MASK, SHARED_BASE, Warp

Array = np.ndarray


@dataclass
class CopyGroups:
    """``cp.async`` groups of one warp: copies of the open group, of committed groups, and the clock."""

    agent: int
    clock: int = 0
    open: list[dict] = field(default_factory=list)
    groups: list[tuple[int, list[dict]]] = field(default_factory=list)


def _copies(w: Warp) -> CopyGroups:
    groups = w.state.get("copies")
    if groups is None:
        agent = w.cta.domain.agent(AgentKind.CP_ASYNC, f"cp.async of warp {w.number} of CTA {w.cta.index}")
        groups = w.state["copies"] = CopyGroups(agent)
        w.state["cp_async_agent"] = agent
        if w.row is not None:
            w.row.numbers[opcodes.COPIES] = agent
    return groups


def cp_async(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``cp.async`` of 4, 8 or 16 bytes a lane, with zero fill past the source size."""
    groups = _copies(w)
    size = int(ins.operands[2].value)
    count = _counts(w, ins, size, mask)
    targets, sources = w.address(ins.operands[0]), w.address(ins.operands[1])
    if not mask.all():
        targets, sources = targets[mask], sources[mask]
    offsets = targets & OFFSET_MASK
    pieces = access.shared_target(m, w, ins, targets, size, mask)
    for cta, _, where in pieces:
        w.unfenced |= mask
        if m.check:
            index = byte_index(where, size)
            conflict = cta.shadow.write(index, groups.agent, groups.clock + 1, w.vc, True, ins)
            if conflict is not None:
                m.report_conflict(conflict, "write", w, ins, cta)
    if m.stats is not None:
        m.stats.add(ins, "cp_async_bytes", len(targets) * size)
    if count is None:
        ordering.copy_from(m, w, ins, of_lanes(sources, size), groups.agent, groups.clock + 1)
    elif (count > 0).any():
        read = of_lanes(sources[count > 0], int(count[count > 0].min()))
        ordering.copy_from(m, w, ins, read, groups.agent, groups.clock + 1)
    issued = m.step
    operation: dict = {"done": False, "touch": Touch(targets, size, mask, ins)}

    def land() -> None:
        if operation["done"]:
            return
        operation["done"] = True
        data = _arriving(m, w, ins, sources, size, count)
        inside = (offsets >= SHARED_BASE) & (offsets + size <= m.shared_bytes)
        compiled = fast.kernels()
        if compiled is not None and inside.all():
            compiled.put_rows(w.cta.smem, offsets, data)
        else:
            w.cta.smem[offsets[inside, None] + np.arange(size)] = data[inside]
        if m.timeline is not None:
            m.timeline.add(f"CTA {w.cta.index} cp.async", "cp.async", f"warp {w.number}", issued, m.step)

    operation["land"] = land
    groups.open.append(operation)
    m.later(land, 2, 400)


def _counts(w: Warp, ins: Instruction, size: int, mask: Array) -> Array | None:
    """Bytes that each lane of ``mask`` reads, of the ``size`` that it writes; None where all read as many."""
    ignored = next((x for x in ins.operands[3:] if isinstance(x, Reg) and x.cls == "pred"), None)
    if ignored is not None:
        count = np.where(w.value(ignored, "pred"), 0, size)
    elif len(ins.operands) - ins.has("L2::cache_hint") > 3:
        count = w.value(ins.operands[3], "b32").astype(np.int64)
    else:
        return None
    count = np.minimum(count[mask], size)
    return None if (count == size).all() else count


def _arriving(m: Machine, w: Warp, ins: Instruction, sources: Array, size: int, count: Array | None) -> Array:
    """The bytes of a copy, uint8 (lanes, size); zeros after the ``count`` that a lane reads."""
    if count is None:
        return access.load_global(m, w, ins, sources, size)
    full = count == size
    data = np.zeros((len(sources), size), np.uint8)
    if full.any():
        data[full] = access.load_global(m, w, ins, sources[full], size)
    for lane in np.flatnonzero((count > 0) & ~full):
        part = int(count[lane])
        data[lane, :part] = access.load_global(m, w, ins, sources[lane] + np.arange(part), 1)[:, 0]
    return data


def commit_copies(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``cp.async.commit_group``."""
    groups = _copies(w)
    groups.clock += 1
    groups.groups.append((groups.clock, groups.open))
    groups.open = []


def wait_copies(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``cp.async.wait_group N`` and ``cp.async.wait_all``: what is waited for has arrived afterwards."""
    groups = _copies(w)
    if ins.parts[2] == "wait_all":
        commit_copies(m, w, ins, mask)
        keep = 0
    else:
        keep = int(ins.operands[0].value)
    due = groups.groups[: max(0, len(groups.groups) - keep)]
    groups.groups = groups.groups[len(due) :]
    for clock, operations in due:
        for operation in operations:
            operation["land"]()
        if m.check:
            note_copied(w, [operation["touch"] for operation in operations])
        w.learn(groups.agent, clock)


def arrive_copies(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``cp.async.mbarrier.arrive``: arrives for each lane when its copies so far have landed."""
    groups = _copies(w)
    commit_copies(m, w, ins, mask)
    clock = groups.clock
    waiting = [op for _, operations in groups.groups for op in operations]
    where = ins.operands[0]
    assert isinstance(where, Address)
    address = int(w.address(where)[np.argmax(mask)]) & ((1 << 60) - 1)
    barrier = sync.find(m, w, ins, address)
    if barrier is None:
        return
    count = int(mask.sum())
    if not ins.has("noinc"):
        barrier.pending += count
        barrier.expected += 0
    handed = w.release()
    vc = handed.vc.copy()
    vc[groups.agent] = clock
    clocks = handed._replace(vc=vc)

    def land() -> None:
        for operation in waiting:
            operation["land"]()
        sync.count_arrivals(m, w, ins, barrier, count, clocks)

    m.later(land)


HANDLERS: dict[str, Callable] = {
    "cp.async": cp_async, "cp.async.commit_group": commit_copies, "cp.async.wait_group": wait_copies,
    "cp.async.wait_all": wait_copies, "cp.async.mbarrier.arrive": arrive_copies,
}  # fmt: skip
