"""Named barriers in compiled code: arrivals of warps that are not the last, and what follows the wait."""

from __future__ import annotations

import numpy as np

from . import mbarrier, places
from . import opcodes as o
from .jit import jit


@jit
def arrive(file, row, lanes, warp, memory, entry):  # type: ignore[no-untyped-def]
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
    if known < 0 or arrived + 32 >= count or (arrived and barrier[o.N_EXPECTED] != count):
        return False
    agents = warp[o.AGENTS]
    clocks = places.words(barrier[o.N_CLOCKS_AT], 2 * agents)
    mbarrier.take_most(clocks[:agents], memory[o.VC])
    mbarrier.take_most(clocks[agents:], places.words(warp[o.FC_AT], agents))
    barrier[o.N_KNOWN], barrier[o.N_EXPECTED], barrier[o.N_ARRIVED] = known, count, arrived + 32
    memory[o.VC][warp[o.AGENT]] += 1
    warp[o.CLOCK] += 1
    warp[o.LEARNED] = entry[3] = 1
    entry[5], entry[6], entry[7] = number, count - arrived - 32, count
    if not row[o.FLAGS] & 16:  # not bar.arrive
        warp[o.BLOCKED] = warp[o.PASSED] = 1
    return True
