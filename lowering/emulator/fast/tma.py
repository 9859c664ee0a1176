"""TMA loads of boxes within their tensors: what the race detector notes at their issue, and their landing."""

from __future__ import annotations

from . import mbarrier, places
from . import opcodes as o
from .compiled import fenced, write
from .jit import jit


@jit
def note_load(warp, owner, barrier, offsets, size):  # type: ignore[no-untyped-def]
    """Note that a copy into these pieces of a CTA's shared memory begins, which an mbarrier counts.

    ``owner``: the row of the CTA. False, and nothing noted, where anything is to report.
    """
    agents = warp[o.AGENTS]
    vc, fc = places.words(warp[o.VC_AT], agents), places.words(warp[o.FC_AT], agents)
    cta, by = places.longs(owner, o.CTA_COLUMNS), barrier[o.M_INIT_BY]
    if cta[o.STRONG_THERE] or not mbarrier.usable(warp, barrier, vc) or not mbarrier.begun(warp, cta, vc):
        return False
    if not barrier[o.M_INIT_FENCED] and fc[by] < barrier[o.M_INIT_CLOCK]:
        return False
    writer, written_at, ordinary, undefined, marks, readers, notes = places.shadow(owner)
    if not fenced(ordinary, writer, written_at, fc, offsets, size):
        return False
    held, reads = (writer, written_at, ordinary, undefined), (marks, readers, cta[o.READERS_COUNT])
    agent, clock = barrier[o.M_AGENT], barrier[o.M_PHASE] + 1
    low, high = write(held, reads, vc, (agent, clock), offsets, size, False)
    if low < 0:
        return False
    entry = notes[cta[o.NOTES_COUNT]]
    entry[0], entry[1], entry[2], entry[3], entry[4], entry[5] = agent, clock, 1, warp[o.AT], low, high
    cta[o.NOTES_COUNT] += 1
    mbarrier.use(warp, barrier)
    return True


@jit
def land(rows, row_bytes, chunks, owner, barrier, transaction):  # type: ignore[no-untyped-def]
    """Copy rows of global memory to 16-byte chunks of shared memory, and count them on the mbarrier.

    Returns whether its phase is complete now.
    """
    cta = places.longs(owner, o.CTA_COLUMNS)
    smem, each = places.longs(cta[o.SMEM], cta[o.SMEM_SIZE] // 8), row_bytes // 16
    for i in range(rows.shape[0]):
        row = places.longs(rows[i], 2 * each)
        for j in range(each):
            chunk = 2 * chunks[i * each + j]
            smem[chunk], smem[chunk + 1] = row[2 * j], row[2 * j + 1]
    barrier[o.M_TX] -= transaction
    return barrier[o.M_PENDING] <= 0 and barrier[o.M_TX] == 0
