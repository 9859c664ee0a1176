"""Waits at the cluster barrier in compiled code."""

from __future__ import annotations

from . import mbarrier, places
from . import opcodes as o
from .jit import jit


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
