"""The cluster barrier in compiled code: arrivals of warps that are not the last, and waits."""

from __future__ import annotations

from . import mbarrier, places
from . import opcodes as o
from .jit import jit


@jit
def arrive(row, lanes, warp, memory):  # type: ignore[no-untyped-def]
    """``barrier.cluster.arrive``; False, and nothing done, where it is left to the Python code."""
    cta = places.longs(warp[o.CTA], o.CTA_COLUMNS)
    barrier, agents = places.longs(cta[o.CLUSTER_AT], o.C_COLUMNS), warp[o.AGENTS]
    relaxed = row[o.FLAGS] & 16
    if lanes != warp[o.LIVE] or barrier[o.C_ARRIVED] + 1 >= barrier[o.C_ALIVE]:
        return False
    if relaxed:
        if warp[o.FENCES]:
            return False
    else:
        known = mbarrier.known_together(barrier[o.C_ARRIVING_KNOWN], warp[o.KNOWN])
        if known < 0:
            return False
        clocks = places.words(barrier[o.C_ARRIVING_AT], 2 * agents)
        mbarrier.take_most(clocks[:agents], memory[o.VC])
        mbarrier.take_most(clocks[agents:], places.words(warp[o.FC_AT], agents))
        barrier[o.C_ARRIVING_KNOWN] = known
    mbarrier.take_most(places.words(barrier[o.C_REACHING_AT], agents), memory[o.VC])
    barrier[o.C_ARRIVED] += 1
    memory[o.VC][warp[o.AGENT]] += 1
    warp[o.CLOCK] += 1
    warp[o.CLUSTER_TARGET], warp[o.LEARNED] = barrier[o.C_GENERATION] + 1, 1
    return True


@jit
def wait(lanes, warp, memory, entry):  # type: ignore[no-untyped-def]
    """``barrier.cluster.wait``; False, and nothing done, where it is left to the Python code."""
    cta = places.longs(warp[o.CTA], o.CTA_COLUMNS)
    barrier, agents = places.longs(cta[o.CLUSTER_AT], o.C_COLUMNS), warp[o.AGENTS]
    if lanes != warp[o.LIVE] or warp[o.CLUSTER_TARGET] < 0:
        return False
    if barrier[o.C_GENERATION] < warp[o.CLUSTER_TARGET]:
        entry[5], warp[o.BLOCKED] = barrier[o.C_ARRIVED], 1
        return True
    known = mbarrier.known_together(warp[o.KNOWN], barrier[o.C_KNOWN])
    if known < 0:
        return False
    clocks = places.words(barrier[o.C_CLOCKS_AT], 2 * agents)
    mbarrier.take_most(memory[o.VC], clocks[:agents])
    mbarrier.take_most(places.words(warp[o.FC_AT], agents), clocks[agents:])
    places.words(warp[o.REACHED_AT], agents)[:] = places.words(barrier[o.C_REACHED_AT], agents)
    warp[o.KNOWN], warp[o.REACHED] = known, o.REACHED_NOW
    warp[o.CONVERGED] = warp[o.LEARNED] = 1
    return True
