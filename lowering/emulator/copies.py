"""Handlers of asynchronous copies: TMA tensor copies, bulk copies and reductions.

A load's data arrives at an event some steps after its issue and only then counts on its mbarrier; a store
reads shared memory at an event before its group is waited for. The race detector sees each copy at its issue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from . import access, ordering, peers, suspects, sync
from .barriers import MBarrier
from .boxes import Box, box_at
from .machine import Machine
from .memory import Fault
from .ptx import Address, Imm, Instruction, Reg, Symbol
from .reports import Kind
from .semantics import tma
from .shadow import AgentKind, Index, first_byte
from .spans import Spans, of_bytes
from .state import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, Cta, Warp
from .translate import WINDOWS

Array = np.ndarray


# Groups of bulk stores


@dataclass
class StoreGroups:
    """Bulk groups of one warp, lane by lane. Each operation is a one-entry dict with the key "done"."""

    agent: int  # that reads shared memory
    writer: int  # that writes global memory
    clock: int = 0
    open: dict[int, list[dict]] = field(default_factory=dict)
    lanes: dict[int, list[tuple[int, list[dict]]]] = field(default_factory=dict)
    writes: dict[int, list[int]] = field(default_factory=dict)  # clocks of groups that only .read has covered
    waiters: list[Warp] = field(default_factory=list)
    last: Instruction | None = None

    def unfinished(self) -> bool:
        """True if there are stores that no wait has covered."""
        return any(self.open.values()) or any(ops for mine in self.lanes.values() for _, ops in mine)


def _stores(w: Warp) -> StoreGroups:
    groups = w.state.get("stores")
    if groups is None:
        agent = w.cta.domain.agent(
            AgentKind.BULK_STORE, f"the bulk stores of warp {w.number} of CTA {w.cta.index}"
        )
        writer = w.cta.domain.agent(
            AgentKind.BULK_STORE, f"the bulk stores to global memory of warp {w.number} of CTA {w.cta.index}"
        )
        groups = w.state["stores"] = StoreGroups(agent, writer)
    return groups


def commit_bulk(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``cp.async.bulk.commit_group``: one group for each lane that executes it."""
    groups = _stores(w)
    groups.clock += 1
    for lane in list(groups.lanes):
        if mask[lane]:
            groups.lanes[lane].append((groups.clock, groups.open.pop(lane, [])))
            groups.writes.setdefault(lane, []).append(groups.clock)


def wait_bulk(m: Machine, w: Warp, ins: Instruction, mask: Array) -> object:
    """``cp.async.bulk.wait_group`` and ``.read``: all but the latest N groups of each lane that waits."""
    groups = _stores(w)
    keep = int(ins.operands[0].value)
    waiting = [lane for lane in np.flatnonzero(mask).tolist() if lane in groups.lanes]
    for lane in waiting:
        mine = groups.lanes[lane]
        due = mine[: max(0, len(mine) - keep)]
        if any(not op["done"] for _, ops in due for op in ops):
            return m.block(w, "bulk stores to read shared memory", groups.waiters)
        groups.lanes[lane] = mine[len(due) :]
    open_clocks = [clock for mine in groups.lanes.values() for clock, ops in mine if ops]
    w.learn(groups.agent, min(open_clocks) - 1 if open_clocks else groups.clock)
    groups.lanes = {k: v for k, v in groups.lanes.items() if v or k in groups.open}
    if not ins.has("read"):
        for lane in np.flatnonzero(mask):
            clocks = groups.writes.get(int(lane), [])
            del clocks[: max(0, len(clocks) - keep)]
        pending = [clocks[0] for clocks in groups.writes.values() if clocks]
        w.learn(groups.writer, min(pending) - 1 if pending else groups.clock)
    return None


# TMA


def _descriptor(m: Machine, w: Warp, ins: Instruction, address: int) -> tma.TensorMap | None:
    if address % 64:
        m.report(
            Kind.MISALIGNED,
            "a tensor map needs an address that 64 divides",
            w,
            ins,
            address=address,
            space="global",
        )
    if address >> 60 == WINDOWS["param"] >> 60:
        at = address & ((1 << 60) - 1)
        raw = m.params[at : at + 128]
    else:
        try:
            raw = m.memory.load(np.array([address]), 128)[0][0]
        except Fault as fault:
            access.report_fault(m, w, ins, fault, 128, "read of a tensor map")
            return None
    try:
        return _tensor_map(raw.tobytes())
    except tma.TensorMapError as error:
        m.report(Kind.DESCRIPTOR, str(error), w, ins, address=address, space="global")
        return None


_tensor_map = functools.lru_cache(maxsize=256)(tma.decode_descriptor)


def tensor_copy(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``cp.async.bulk.tensor`` and ``cp.reduce.async.bulk.tensor``, tile mode."""
    if not _by_tiles(ins.parts):
        raise access.stop(ins, "TMA modes other than tile are not modelled")
    for lane in distinct_lanes(w, ins, mask):
        if ins.has("mbarrier::complete_tx::bytes"):
            _tensor_load(m, w, ins, lane)
        else:
            _tensor_store(m, w, ins, lane)


@functools.lru_cache(maxsize=256)
def _by_tiles(parts: tuple[str, ...]) -> bool:
    """True for tile mode, as opposed to im2col and others."""
    return not any(part.startswith(("im2col", "tile::")) for part in parts)


def distinct_lanes(w: Warp, ins: Instruction, mask: Array) -> list[int]:
    """The lanes whose operands differ, first of each kind.

    The hardware's bulk copies are instructions of the warp's uniform datapath: lanes with equal operands make
    one copy, which is what kernels that store from a whole warp without ``elect.sync`` rely on.
    """
    lanes = np.flatnonzero(mask)
    if len(lanes) == 1 or _alike(w, ins, lanes):
        return [int(lanes[0])]
    columns = []
    for operand in ins.operands:
        if isinstance(operand, Address):
            columns.append(w.address(operand))
            columns += [w.value(c, "s32").astype(np.int64) for c in operand.coords]
        else:
            columns.append(w.value(operand, "b64").astype(np.int64))
    chosen = np.stack([c[lanes] for c in columns])
    if (chosen == chosen[:, :1]).all():
        return [int(lanes[0])]
    _, first = np.unique(chosen, axis=1, return_index=True)
    return [int(lanes[i]) for i in sorted(first)]


def _alike(w: Warp, ins: Instruction, lanes: Array) -> bool:
    """True if the operands are registers and constants that do not differ among these lanes."""
    for operand in ins.operands:
        for item in (operand.base, *operand.coords) if isinstance(operand, Address) else (operand,):
            if isinstance(item, Reg):
                values = w.R[item.index][lanes]
                raw = values.tobytes()
                if raw != raw[: values.itemsize] * len(lanes):
                    return False
            elif not isinstance(item, (Imm, Symbol)):
                return False
    return True


def _tensor_load(m: Machine, w: Warp, ins: Instruction, lane: int) -> None:
    destination, source, barrier_operand = ins.operands[:3]
    tensor = _descriptor(m, w, ins, w.lane_address(source, lane))
    if tensor is None:
        return
    coords = [w.lane_value(c, lane, "s32") for c in source.coords]
    target = w.lane_address(destination, lane) & ((1 << 60) - 1)
    box = box_at(m, w, ins, tensor, coords, target & OFFSET_MASK)
    if box is None:
        return
    bar_address = w.lane_address(barrier_operand, lane) & ((1 << 60) - 1)
    if ins.has("multicast::cluster"):
        bits = w.lane_value(ins.operands[3], lane, "b16")
        ranks = [r for r in range(16) if bits >> r & 1]
        if not ranks or max(ranks) >= len(w.cta.cluster.ctas):
            m.report(
                Kind.DESCRIPTOR,
                f"multicast mask {bits:#x} in a cluster of {len(w.cta.cluster.ctas)} CTAs",
                w,
                ins,
            )
            ranks = [r for r in ranks if r < len(w.cta.cluster.ctas)]
    else:
        ranks = [target >> RANK_SHIFT if ins.has("shared::cluster") else w.cta.rank]
    issued = m.step
    for rank in ranks:
        cta = w.cta.cluster.ctas[rank]
        barrier = _begin_load(m, w, ins, cta, box, bar_address & OFFSET_MASK)
        if barrier is None:
            continue
        if box.spans is not None:
            ordering.copy_from(m, w, ins, box.spans, barrier.agent, barrier.phase + 1)

        def land(cta: Cta = cta, barrier: MBarrier = barrier) -> None:
            due = _land(m, w, ins, box, cta, barrier)
            if m.timeline is not None:
                m.timeline.add(
                    f"CTA {cta.index} TMA", "tma load", f"mbarrier {barrier.offset:#x}", issued, m.step
                )
            if due:
                sync.complete(m, barrier)

        m.later(land)
    if m.stats is not None:
        m.stats.add(ins, "bulk_bytes", box.transaction_bytes)


def _begin_load(m: Machine, w: Warp, ins: Instruction, cta: Cta, box: Box, offset: int) -> MBarrier | None:
    """The mbarrier at this offset, which is to count a load that begins now; None, and a report, for none."""
    barrier = cta.mbarriers.get(offset)
    if m.check and m.runner is not None and barrier is not None:
        if m.runner.note_load(w, cta, barrier, box.pieces):
            cta.uses[barrier.agent] = peers.Use(barrier.phase + 1, w, ins)
            m.names.note_copy(first_byte(box.index), offset, ins)
            return barrier
    barrier = sync.find(m, w, ins, (cta.rank << RANK_SHIFT) | offset, True)
    if barrier is not None:
        _note_load(m, w, ins, cta, box.index, barrier)
    return barrier


def _land(m: Machine, w: Warp, ins: Instruction, box: Box, cta: Cta, barrier: MBarrier) -> bool:
    """The data of a load lands and counts on its mbarrier; returns whether its phase may be complete."""
    if m.runner is None or box.whole is None or tma.converts(box.tensor):
        _arrive(m, w, ins, box, cta)
        barrier.tx -= box.transaction_bytes
        return True
    if m.stats is not None:
        m.stats.add(ins, "global_bytes", len(box.whole.rows) * box.whole.row_bytes)
    return bool(m.runner.land(cta, barrier, box.whole, box.transaction_bytes))


def _arrive(m: Machine, w: Warp, ins: Instruction, box: Box, cta: Cta) -> None:
    """The data of a load lands in shared memory."""
    if box.whole is not None:
        rows = access.load_global(m, w, ins, box.whole.rows, box.whole.row_bytes)
        data = tma.convert_on_load(box.tensor, rows.reshape(-1).view(tma.storage_type(box.tensor.element)))
        _chunks_of(cta.smem)[box.whole.chunks] = _chunks_of(data)
    else:
        assert box.elements is not None
        data = _gather(m, w, ins, box.tensor, box.elements)
        _scatter(cta.smem, box.elements.shared_address, data, box.elements.element_bytes)


def _chunks_of(memory: Array) -> Array:
    """Memory as chunks of 16 bytes: int64 (chunks, 2)."""
    usable = memory.nbytes // tma.CHUNK * tma.CHUNK // memory.itemsize
    return memory[:usable].view(np.int64).reshape(-1, 2)


def _note_load(m: Machine, w: Warp, ins: Instruction, cta: Cta, index: Index, barrier: MBarrier) -> None:
    if not m.check:
        return
    peers.note_use(m, w, ins, cta, barrier.agent, barrier.phase + 1)
    m.names.note_copy(first_byte(index), barrier.offset, ins)
    unfenced = cta.shadow.unfenced(index, w.fc)
    conflict = cta.shadow.write(index, barrier.agent, barrier.phase + 1, w.vc, False, ins)
    if conflict is not None:
        m.report_conflict(conflict, "write", w, ins, cta)
    elif unfenced is not None:
        m.report(
            Kind.MISSING_PROXY_FENCE,
            f"the bulk copy overwrites bytes written by {unfenced.agent.name}, which ran no "
            "fence.proxy.async between its store and the barrier: the store may land after the copy",
            w,
            ins,
            address=unfenced.offset,
            other=m.place(f"write by {unfenced.agent.name}", unfenced.ins),
            look_at=suspects.unfenced(m, w, ins, cta, unfenced),
        )


def _gather(m: Machine, w: Warp, ins: Instruction, tensor: tma.TensorMap, box: tma.BoxMap) -> Array:
    """Elements of a box, out-of-bounds ones filled, as unsigned integers."""
    storage = tma.storage_type(tensor.element)
    out: Array = np.full(len(box.valid), tma.fill_value(tensor), storage)
    if box.valid.any():
        raw = access.load_global(m, w, ins, box.global_address[box.valid], box.element_bytes)
        out[box.valid] = tma.convert_on_load(tensor, np.ascontiguousarray(raw).view(storage)[:, 0])
    return out


def _scatter(smem: Array, addresses: Array, data: Array, size: int) -> None:
    usable = len(smem) // size * size
    smem[:usable].view(data.dtype)[addresses // size] = data


def _tensor_store(m: Machine, w: Warp, ins: Instruction, lane: int) -> None:
    destination, source = ins.operands[:2]
    tensor = _descriptor(m, w, ins, w.lane_address(destination, lane))
    if tensor is None:
        return
    coords = [w.lane_value(c, lane, "s32") for c in destination.coords]
    offset = w.lane_address(source, lane) & OFFSET_MASK
    box = box_at(m, w, ins, tensor, coords, offset, store=True)
    if box is None:
        return
    cta = w.cta
    reduction = next(
        (p for p in ins.parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), None
    )
    reduction = reduction if ins.parts[1] == "reduce" else None
    if box.spans is not None:
        _note_store(m, w, ins, box.index)
        _note_write(m, w, ins, box.spans, reduction is not None)

    def write() -> None:
        if box.spans is not None:
            where, data = _departing(box, cta)
            if reduction is not None:
                data = _reduced(m, w, ins, box.tensor, reduction, where, data)
            access.store_global(m, w, ins, where, data)

    _issue_store(m, w, ins, lane, write, "tma store")
    if m.stats is not None:
        m.stats.add(ins, "bulk_bytes", box.transaction_bytes)


def _departing(box: Box, cta: Cta) -> tuple[Array, Array]:
    """Addresses of the pieces of global memory that a store writes, and their bytes, uint8 (n, size)."""
    if box.whole is not None:
        data = _chunks_of(cta.smem)[box.whole.chunks].view(np.uint8)
        return box.whole.rows, data.reshape(-1, box.whole.row_bytes)
    assert box.elements is not None
    valid, size = box.elements.valid, box.elements.element_bytes
    storage = tma.storage_type(box.tensor.element)
    data = cta.smem[: len(cta.smem) // size * size].view(storage)[box.elements.shared_address[valid] // size]
    return box.elements.global_address[valid], data.view(np.uint8).reshape(-1, size)


def _reduced(
    m: Machine, w: Warp, ins: Instruction, tensor: tma.TensorMap, operation: str, where: Array, data: Array
) -> Array:
    """The bytes of the pieces, combined with those that are there: what a reduction writes."""
    storage = tma.storage_type(tensor.element)
    there: Array = np.ascontiguousarray(access.load_global(m, w, ins, where, data.shape[1]))
    old: Array = there.reshape(-1).view(storage)
    other: Array = data.reshape(-1).view(storage)
    new = tma.reduce_elements(operation, tensor.element, old, other)
    return new.astype(storage).view(np.uint8).reshape(data.shape)


def _note_store(m: Machine, w: Warp, ins: Instruction, index: Index) -> None:
    groups = _stores(w)
    _note_source(m, w, ins, index, groups.agent, groups.clock + 1)


def _note_source(m: Machine, w: Warp, ins: Instruction, index: Index, agent: int, clock: int) -> None:
    """A bulk copy reads the CTA's shared memory until ``agent`` comes to ``clock``."""
    if not m.check:
        return
    cta = w.cta
    access.note_unwritten(
        m, w, ins, cta, index, agent, "a bulk store reads shared memory that nothing has written"
    )
    conflict = cta.shadow.read(index, agent, clock, w.vc, ins)
    if conflict is not None:
        m.report_conflict(conflict, "read", w, ins, cta)
        return
    unfenced = cta.shadow.unfenced(index, w.fc)
    if unfenced is not None:
        m.report(
            Kind.MISSING_PROXY_FENCE,
            f"the bulk store reads bytes written by {unfenced.agent.name}, which ran no "
            "fence.proxy.async between its store and the barrier",
            w,
            ins,
            address=unfenced.offset,
            other=m.place(f"write by {unfenced.agent.name}", unfenced.ins),
            look_at=suspects.unfenced(m, w, ins, cta, unfenced),
        )


def _note_write(m: Machine, w: Warp, ins: Instruction, target: Spans, reduces: bool) -> None:
    groups = _stores(w)
    ordering.copy_to(m, w, ins, target, groups.writer, groups.clock + 1, reduces)


def _issue_store(
    m: Machine, w: Warp, ins: Instruction, lane: int, action: Callable[[], None], kind: str
) -> None:
    groups = _stores(w)
    operation = {"done": False}
    groups.last = ins
    groups.lanes.setdefault(lane, [])
    groups.open.setdefault(lane, []).append(operation)
    issued = m.step

    def run() -> None:
        action()
        operation["done"] = True
        if m.timeline is not None:
            m.timeline.add(f"CTA {w.cta.index} TMA", kind, f"warp {w.number}", issued, m.step)
        m.wake(groups.waiters)

    m.later(run)


# Bulk copies without a tensor map


def bulk_copy(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``cp.async.bulk`` and ``cp.reduce.async.bulk`` of contiguous bytes."""
    for lane in distinct_lanes(w, ins, mask):
        target, source = (int(w.address(o)[lane]) & ((1 << 60) - 1) for o in ins.operands[:2])
        size = w.lane_value(ins.operands[2], int(lane), "b32")
        if size % 16 or target % 16 or source % 16:
            m.report(
                Kind.MISALIGNED,
                f"a bulk copy of {size} bytes from {source:#x} to {target:#x} needs multiples of 16",
                w,
                ins,
                address=target,
            )
            continue
        if size == 0:
            continue
        if m.stats is not None:
            m.stats.add(ins, "bulk_bytes", size)
        destination = next(p for p in ins.parts if p.split("::")[0] in ("shared", "global"))
        if destination == "global":
            _bulk_store(m, w, ins, int(lane), target, source, size)
        else:
            _bulk_load(m, w, ins, int(lane), target, source, size)


def _inside(m: Machine, w: Warp, ins: Instruction, offset: int, size: int) -> bool:
    if offset >= SHARED_BASE and offset + size <= m.shared_bytes:
        return True
    m.report(
        Kind.OUT_OF_BOUNDS,
        f"{size} bytes of shared memory from {offset:#x}; this launch has {SHARED_BASE:#x} to "
        f"{m.shared_bytes:#x}",
        w,
        ins,
        address=offset,
    )
    return False


def _bulk_load(m: Machine, w: Warp, ins: Instruction, lane: int, target: int, source: int, size: int) -> None:
    barrier_address = int(w.address(ins.operands[3])[lane]) & ((1 << 60) - 1)
    from_shared = ins.has("shared::cta") and ins.has("shared::cluster")
    start = source & OFFSET_MASK  # where it is shared memory
    if ins.has("multicast::cluster"):
        bits = w.lane_value(ins.operands[4], lane, "b16")
        ranks = [r for r in range(len(w.cta.cluster.ctas)) if bits >> r & 1]
    else:
        ranks = [target >> RANK_SHIFT if ins.has("shared::cluster") else w.cta.rank]
    offset = target & OFFSET_MASK
    if not _inside(m, w, ins, offset, size):
        return
    if from_shared and not _inside(m, w, ins, start, size):
        return
    issued = m.step
    for rank in ranks:
        cta = w.cta.cluster.ctas[rank]
        barrier = sync.find(m, w, ins, (rank << RANK_SHIFT) | (barrier_address & OFFSET_MASK), True)
        if barrier is None:
            continue
        _note_load(m, w, ins, cta, slice(offset, offset + size), barrier)
        if from_shared:
            _note_source(m, w, ins, slice(start, start + size), barrier.agent, barrier.phase + 1)
            peers.note_use(m, w, ins, w.cta, barrier.agent, barrier.phase + 1)
        else:
            ordering.copy_from(m, w, ins, of_bytes(source, size), barrier.agent, barrier.phase + 1)

        def land(cta: Cta = cta, barrier: MBarrier = barrier) -> None:
            if from_shared:
                cta.smem[offset : offset + size] = w.cta.smem[start : start + size]
            else:
                chunks = source + 16 * np.arange(size // 16)
                cta.smem[offset : offset + size] = access.load_global(m, w, ins, chunks, 16).reshape(-1)
            barrier.tx -= size
            if m.timeline is not None:
                m.timeline.add(
                    f"CTA {cta.index} TMA", "tma load", f"mbarrier {barrier.offset:#x}", issued, m.step
                )
            sync.complete(m, barrier)

        m.later(land)


def _bulk_store(
    m: Machine, w: Warp, ins: Instruction, lane: int, target: int, source: int, size: int
) -> None:
    start = source & OFFSET_MASK
    if not _inside(m, w, ins, start, size):
        return
    cta = w.cta
    _note_store(m, w, ins, slice(start, start + size))
    reduction = next(
        (p for p in ins.parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), None
    )
    kinds = {e.name.lower(): e for e in tma.ElementType}
    element = next((kinds[p] for p in ins.parts if p in kinds), None)
    _note_write(m, w, ins, of_bytes(target, size), reduction is not None)

    def write() -> None:
        data = cta.smem[start : start + size]
        chunks = target + 16 * np.arange(size // 16)
        if reduction is not None and element is not None:
            storage = tma.storage_type(element)
            old: Array = (
                np.ascontiguousarray(access.load_global(m, w, ins, chunks, 16)).reshape(-1).view(storage)
            )
            data = (
                tma.reduce_elements(reduction, element, old, data.view(storage))
                .astype(storage)
                .view(np.uint8)
            )
        access.store_global(m, w, ins, chunks, data.reshape(-1, 16))

    _issue_store(m, w, ins, lane, write, "tma store")


def no_effect(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """Prefetches into the L2 cache."""


HANDLERS: dict[str, Callable] = {
    "cp.async.bulk.tensor": tensor_copy, "cp.reduce.async.bulk.tensor": tensor_copy,
    "cp.async.bulk": bulk_copy, "cp.reduce.async.bulk": bulk_copy, "cp.async.bulk.prefetch": no_effect,
    "cp.async.bulk.commit_group": commit_bulk, "cp.async.bulk.wait_group": wait_bulk,
}  # fmt: skip
