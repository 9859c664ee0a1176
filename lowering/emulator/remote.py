"""Handlers of asynchronous stores into the shared memory of the cluster: ``st.async``, ``red.async``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import access, loads, peers, sync
from .machine import Machine
from .ptx import TYPE_BYTES, Instruction, Vector
from .shadow import byte_index
from .state import OFFSET_MASK, RANK_SHIFT, Cta, Warp

Array = np.ndarray


def store_async(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``st.async`` and ``red.async``: data and their bytes on the mbarrier arrive together, later.

    Each lane names its own address and mbarrier; both must lie in the same CTA.
    """
    kind = next(p for p in reversed(ins.parts) if p in TYPE_BYTES)
    unit = TYPE_BYTES[kind]
    sources = ins.operands[1].items if isinstance(ins.operands[1], Vector) else (ins.operands[1],)
    bits = {4: "b32", 8: "b64"}[unit]
    columns = [np.ascontiguousarray(w.value(s, bits)[mask]).view(np.uint8).reshape(-1, unit) for s in sources]
    data = np.concatenate(columns, axis=1)
    size = data.shape[1]
    addresses = w.address(ins.operands[0])[mask] & ((1 << 60) - 1)
    barriers = (w.address(ins.operands[2]) & ((1 << 60) - 1))[mask]
    operation = next(
        (p for p in ins.parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), ""
    )
    function = loads.integer_operation(operation, kind) if ins.root == "red" else None
    for cta, where, offsets in access.shared_target(m, w, ins, addresses, size, mask):
        for address in np.unique(barriers[where]):
            lanes = np.flatnonzero(barriers[where] == address)
            _send(m, w, ins, (cta, offsets[lanes], data[where][lanes], int(address)), function)


def _send(
    m: Machine, w: Warp, ins: Instruction, what: tuple[Cta, Array, Array, int], function: Callable | None
) -> None:
    cta, offsets, data, address = what
    if address >> RANK_SHIFT != cta.rank:
        raise access.stop(
            ins, f"the mbarrier is in CTA {address >> RANK_SHIFT} of the cluster, the data in {cta.rank}"
        )
    barrier = sync.find(m, w, ins, (cta.rank << RANK_SHIFT) | (address & OFFSET_MASK))
    if barrier is None:
        return
    size = data.shape[1]
    index = byte_index(offsets, size)
    if m.check:
        conflict = cta.shadow.write(index, barrier.agent, barrier.phase + 1, w.vc, False, ins)
        if conflict is not None:
            m.report_conflict(conflict, "write", w, ins, cta)
    if cta is not w.cta:
        peers.note_use(m, w, ins, cta, barrier.agent, barrier.phase + 1)
    issued = m.step

    def land() -> None:
        for offset, row in zip(offsets, data):
            place = cta.smem[offset : offset + size]
            if function is not None:
                word = f"u{size}"
                row = function(place.view(word), row.view(word)).astype(word).view(np.uint8)
            place[:] = row
        barrier.tx -= len(offsets) * size
        if m.timeline is not None:
            m.timeline.add(f"CTA {cta.index} remote stores", "st.async", w.name, issued, m.step)
        sync.complete(m, barrier)

    m.later(land)


HANDLERS: dict[str, Callable] = {"st.async": store_async, "red.async": store_async}
