"""Barriers: mbarriers with phases and transaction counts, named barriers of a CTA, and the cluster barrier.

Each carries vector clocks: what arrives hands its clocks over, what passes takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .shadow import Domain

if TYPE_CHECKING:
    from .ptx import Instruction
    from .state import Warp

Array = np.ndarray


class SecondWait(NamedTuple):
    """A warp that waited for a phase a second time, having released something in between."""

    warp: Warp
    ins: Instruction
    clock: int  # of the warp at the second wait


class MBarrier:
    """An mbarrier object of shared memory at ``offset`` of CTA ``cta``.

    ``phase`` counts completed phases, so a wait on parity p passes where ``phase % 2 != p``.
    """

    def __init__(self, cta: Any, offset: int, count: int, domain: Domain, agent: int, owner: Warp):
        self.cta, self.offset = cta, offset
        self.expected = self.pending = count
        self.tx = 0
        self.phase = 0
        self.agent = agent
        self.init_by, self.init_clock = owner.agent, owner.clock
        self.domain = domain
        self.arriving, self.arriving_fc = domain.clock(), domain.clock()
        self.done, self.done_fc = domain.clock(), domain.clock()
        self.waiters: list[Warp] = []
        self.arrivals: list[str] = []  # who arrived in the current phase, for reports
        self.waited_twice: dict[int, SecondWait] = {}

    def arrive(self, vc: Array | None, fc: Array | None, count: int, who: str) -> bool:
        """Count ``count`` arrivals. Returns whether more arrived than the phase expects."""
        over = count > self.pending
        if vc is not None and fc is not None:
            np.maximum(self.arriving, vc, out=self.arriving)
            np.maximum(self.arriving_fc, fc, out=self.arriving_fc)
        self.pending -= count
        self.arrivals.append(who)
        return over

    def settle(self) -> bool:
        """Complete the phase if all arrivals and all transaction bytes are there; returns whether it did."""
        if self.pending > 0 or self.tx != 0:
            return False
        self.phase += 1
        self.pending += self.expected
        np.maximum(self.done, self.arriving, out=self.done)
        np.maximum(self.done_fc, self.arriving_fc, out=self.done_fc)
        self.done[self.agent] = self.done_fc[self.agent] = self.phase
        self.arriving, self.arriving_fc = self.domain.clock(), self.domain.clock()
        self.arrivals.clear()
        return True

    def overtaken(self) -> list[SecondWait]:
        """Second waits for an earlier phase than the one just completed, which nobody who arrived knew of.

        Where those who arrived had synchronised with the warp after its second wait, that wait did no harm:
        the warp looked twice before it gave its stage back.
        """
        found = [wait for agent, wait in self.waited_twice.items() if self.done[agent] < wait.clock]
        self.waited_twice.clear()
        return found

    def passed(self, parity: int) -> bool:
        """Whether the phase of ``parity`` has completed."""
        return self.phase & 1 != parity & 1

    def describe(self) -> str:
        """State in words."""
        text = f"phase {self.phase}, {self.expected - self.pending} of {self.expected} arrivals"
        return text + (f", {self.tx} bytes of transactions outstanding" if self.tx else "")


@dataclass
class NamedBarrier:
    """Barrier ``number`` of a CTA (bar.sync, bar.arrive, bar.red)."""

    number: int
    expected: int | None = None  # None: all threads of the CTA
    arrived: int = 0
    waiters: list[Warp] = field(default_factory=list)
    vc: Array | None = None
    fc: Array | None = None
    reductions: list[Array] = field(default_factory=list)

    def join(self, vc: Array, fc: Array) -> None:
        """Take the clocks of an arriving warp."""
        self.vc = vc.copy() if self.vc is None else np.maximum(self.vc, vc)
        self.fc = fc.copy() if self.fc is None else np.maximum(self.fc, fc)

    def reset(self) -> None:
        """Ready for the next use."""
        self.expected, self.arrived, self.vc, self.fc = None, 0, None, None
        self.waiters, self.reductions = [], []


@dataclass
class ClusterBarrier:
    """barrier.cluster: ``generation`` counts completed phases."""

    domain: Domain
    generation: int = 0
    arrived: int = 0
    waiters: list[Warp] = field(default_factory=list)
    vc: Array = field(init=False)
    fc: Array = field(init=False)
    done: Array = field(init=False)
    done_fc: Array = field(init=False)

    def __post_init__(self) -> None:
        self.vc, self.fc, self.done, self.done_fc = (self.domain.clock() for _ in range(4))

    def arrive(self, vc: Array, fc: Array) -> None:
        """One warp arrives."""
        self.arrived += 1
        np.maximum(self.vc, vc, out=self.vc)
        np.maximum(self.fc, fc, out=self.fc)

    def settle(self, expected: int) -> bool:
        """Complete the phase when ``expected`` warps arrived."""
        if self.arrived < expected or self.arrived == 0:
            return False
        self.generation += 1
        self.arrived = 0
        np.maximum(self.done, self.vc, out=self.done)
        np.maximum(self.done_fc, self.fc, out=self.done_fc)
        self.vc, self.fc = self.domain.clock(), self.domain.clock()
        return True
