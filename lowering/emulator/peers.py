"""Uses of a CTA's shared memory by peers and copies: the CTA must have begun, and must not end before them.

Relaxed arrivals on the cluster barrier order no memory, but a warp that passes it knows how far the others
had come. That is enough here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import register_file
from .fast import opcodes as o
from .reports import Kind

if TYPE_CHECKING:
    from .machine import Machine
    from .ptx import Instruction
    from .state import Cta, Warp


class Use(NamedTuple):
    """A use of a CTA's shared memory by a peer or a copy, which ends at ``clock`` of some agent."""

    clock: int
    warp: Warp
    ins: Instruction


def note_use(m: Machine, w: Warp, ins: Instruction, cta: Cta, agent: int, clock: int) -> None:
    """Warp ``w`` uses the memory of a peer, or starts a copy there, until ``agent`` comes to ``clock``."""
    if not m.check:
        return
    reached = _reached(w)
    if cta.ended is not None:
        _report(m, Use(clock, w, ins), cta, "has ended")
    elif not any(reached[warp.agent] for warp in cta.warps):
        _report(m, Use(clock, w, ins), cta, "may not have begun: no cluster barrier comes before this")
    cta.uses[agent] = Use(clock, w, ins)


def note_end(m: Machine, w: Warp) -> None:
    """A warp ends; with the last one of its CTA the shared memory is gone."""
    cta = w.cta
    cta.exiting = _reached(w) if cta.exiting is None else np.maximum(cta.exiting, _reached(w))
    cta.alive -= 1
    if cta.alive:
        return
    cta.ended = cta.exiting
    if cta.row is not None:
        cta.row.numbers[o.ENDED] = 1
    register_file.check_end(m, cta)
    for agent, use in cta.uses.items():
        if cta.ended[agent] < use.clock:
            _report(m, use, cta, "ends without having waited for this")


def _reached(w: Warp) -> np.ndarray:
    return w.vc if w.reached is None else np.maximum(w.vc, w.reached)


def _report(m: Machine, use: Use, cta: Cta, what: str) -> None:
    m.report(Kind.PEER_ENDED, f"CTA {cta.index} of the cluster {what}", use.warp, use.ins)
