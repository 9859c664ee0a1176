"""Barriers: mbarriers with phases and transaction counts, named barriers of a CTA, and the cluster barrier.

Each carries vector clocks: what arrives hands its clocks over, what passes takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .clocks import Collected, Handover
from .shadow import Domain

if TYPE_CHECKING:
    from .arrivals import Arrivals
    from .ptx import Instruction
    from .state import Warp

Array = np.ndarray


class SecondWait(NamedTuple):
    """A warp that waited for a phase a second time, having released something in between."""

    warp: Warp
    ins: Instruction
    clock: int  # of the warp at the second wait


class Use(NamedTuple):
    """An instruction that used an mbarrier, and the warps that executed it."""

    ins: Instruction
    warps: set[Warp]


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
        self.init_fenced = False  # by fence.mbarrier_init
        self.domain = domain
        self.arriving, self.done = Collected(domain), Collected(domain)
        self.waiters: list[Warp] = []
        self.arrivals: list[str] = []  # who arrived in the current phase, for reports
        self.waited_twice: dict[int, SecondWait] = {}
        self.made: Instruction | None = None  # mbarrier.init
        self.tally: dict[Warp, Arrivals] = {}
        self.uses: dict[int, Use] = {}  # by PTX line

    def note(self, ins: Instruction, warp: Warp) -> None:
        """Remember who used the barrier where, for reports."""
        use = self.uses.get(ins.line)
        if use is None:
            use = self.uses[ins.line] = Use(ins, set())
        use.warps.add(warp)

    def arrive(self, clocks: Handover, count: int, who: str) -> bool:
        """Count ``count`` arrivals. Returns whether more arrived than the phase expects."""
        over = count > self.pending
        self.arriving.add(clocks)
        self.pending -= count
        self.arrivals.append(who)
        return over

    def settle(self) -> bool:
        """Complete the phase if all arrivals and all transaction bytes are there; returns whether it did."""
        if self.pending > 0 or self.tx != 0:
            return False
        self.phase += 1
        self.pending += self.expected
        self.done.add(self.arriving)
        self.done.vc[self.agent] = self.done.fc[self.agent] = self.phase
        self.arriving = Collected(self.domain)
        self.arrivals.clear()
        return True

    def overtaken(self) -> list[SecondWait]:
        """Second waits for an earlier phase than the one just completed, which nobody who arrived knew of.

        Where those who arrived had synchronised with the warp after its second wait, that wait did no harm:
        the warp looked twice before it gave its stage back.
        """
        found = [wait for agent, wait in self.waited_twice.items() if self.done.vc[agent] < wait.clock]
        self.waited_twice.clear()
        return found

    def passed(self, parity: int) -> bool:
        """True if the phase of ``parity`` has completed."""
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
    clocks: Collected | None = None
    who: list[Warp] = field(default_factory=list)  # arrived
    reductions: list[Array] = field(default_factory=list)

    def join(self, clocks: Handover, domain: Domain) -> None:
        """Take the clocks of an arriving warp."""
        if self.clocks is None:
            self.clocks = Collected(domain)
        self.clocks.add(clocks)

    def reset(self) -> None:
        """Ready for the next use."""
        self.expected, self.arrived, self.clocks = None, 0, None
        self.waiters, self.who, self.reductions = [], [], []


@dataclass
class ClusterBarrier:
    """barrier.cluster: ``generation`` counts completed phases."""

    domain: Domain
    generation: int = 0
    arrived: int = 0
    waiters: list[Warp] = field(default_factory=list)
    arriving: Collected = field(init=False)
    done: Collected = field(init=False)
    reaching: Array = field(init=False)
    reached: Array = field(init=False)  # where every warp had come to: relaxed arrivals hand over no more

    def __post_init__(self) -> None:
        self.arriving, self.done = Collected(self.domain), Collected(self.domain)
        self.reaching = self.reached = self.domain.clock()

    def arrive(self, clocks: Handover, reached: Array) -> None:
        """One warp arrives, which has come to ``reached`` and hands ``clocks`` over."""
        self.arrived += 1
        self.arriving.add(clocks)
        self.reaching = np.maximum(self.reaching, reached)

    def settle(self, expected: int) -> bool:
        """Complete the phase when ``expected`` warps arrived."""
        if self.arrived < expected or self.arrived == 0:
            return False
        self.generation += 1
        self.arrived = 0
        self.done.add(self.arriving)
        self.reached = self.reaching
        self.arriving = Collected(self.domain)
        return True
