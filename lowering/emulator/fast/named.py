"""Named barriers in compiled code: arrivals of warps, and what follows their wait."""

from __future__ import annotations

import numpy as np

from . import mbarrier, places
from . import opcodes as o
from .jit import jit


@jit
def _may_go_on(barrier, known):  # type: ignore[no-untyped-def]
    """True if compiled code may let all that wait go on: it alone has what they know."""
    if barrier[o.N_LEFT]:
        return False
    for at in range(o.N_WAITING, o.N_WAITING + barrier[o.N_WAITERS]):
        warp = places.longs(barrier[at], o.WARP_COLUMNS)
        if not warp[o.RAN] or mbarrier.known_together(warp[o.KNOWN], known) < 0:
            return False
    return True


@jit
def _go_on(warp, clocks, known, step):  # type: ignore[no-untyped-def]
    """Let a warp take over the clocks of all that arrived."""
    agents = warp[o.AGENTS]
    mbarrier.take_most(places.words(warp[o.VC_AT], agents), clocks[:agents])
    mbarrier.take_most(places.words(warp[o.FC_AT], agents), clocks[agents:])
    warp[o.KNOWN] = mbarrier.known_together(warp[o.KNOWN], known)
    warp[o.RELEASED] = step
    warp[o.CONVERGED] = warp[o.LEARNED] = 1


@jit
def _open(barrier, warp, clocks, waits):  # type: ignore[no-untyped-def]
    """Let all go on that wait, and the warp that came last if it would wait."""
    known, step = barrier[o.N_KNOWN], warp[o.STEP]
    for at in range(o.N_WAITING, o.N_WAITING + barrier[o.N_WAITERS]):
        _go_on(places.longs(barrier[at], o.WARP_COLUMNS), clocks, known, step)
    if waits:
        _go_on(warp, clocks, known, step)
    barrier[o.N_ARRIVED], barrier[o.N_EXPECTED], barrier[o.N_KNOWN], barrier[o.N_WAITERS] = 0, -1, 0, 0
    for which in range(2):
        clocks[which * warp[o.AGENTS] : (which + 1) * warp[o.AGENTS] - 1] = 0


@jit
def synchronise(file, row, lanes, warp, memory, entry):  # type: ignore[no-untyped-def]
    """``bar.sync`` and ``bar.arrive``; False, and nothing done, where it is left to the Python code."""
    if warp[o.PASSED]:
        warp[o.PASSED] = 0
        return True
    if lanes != warp[o.LIVE] or row[o.B] < 0:
        return False
    lane = 0
    while not lanes >> lane & 1:
        lane += 1
    number, count = np.int64(file[2][row[o.A] + lane]), np.int64(file[2][row[o.B] + lane])
    cta = places.longs(warp[o.CTA], o.CTA_COLUMNS)
    if number >= o.NAMED or count % 32 or count > 32 * cta[o.WARPS]:
        return False
    barrier = places.table(cta[o.NAMED_AT], o.NAMED, o.N_COLUMNS)[number]
    known = mbarrier.known_together(barrier[o.N_KNOWN], warp[o.KNOWN])
    arrived = barrier[o.N_ARRIVED]
    if known < 0 or (arrived and barrier[o.N_EXPECTED] != count):
        return False
    waits, last = not row[o.FLAGS] & 16, arrived + 32 >= count
    if last and not _may_go_on(barrier, known):
        return False
    agents = warp[o.AGENTS]
    clocks = places.words(barrier[o.N_CLOCKS_AT], 2 * agents)
    mbarrier.take_most(clocks[:agents], memory[o.VC])
    mbarrier.take_most(clocks[agents:], places.words(warp[o.FC_AT], agents))
    barrier[o.N_KNOWN], barrier[o.N_EXPECTED], barrier[o.N_ARRIVED] = known, count, arrived + 32
    memory[o.VC][warp[o.AGENT]] += 1
    warp[o.CLOCK] += 1
    warp[o.LEARNED] = 1
    entry[3], entry[5], entry[6], entry[7] = 1, number, count - arrived - 32, count
    if last:
        _open(barrier, warp, clocks, waits)
        entry[3] = o.OPENED
    elif waits:
        barrier[o.N_WAITING + barrier[o.N_WAITERS]] = warp[o.PLACE]
        barrier[o.N_WAITERS] += 1
        warp[o.BLOCKED] = warp[o.PASSED] = 1
    return True
