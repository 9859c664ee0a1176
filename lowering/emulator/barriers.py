"""Barriers: mbarriers with phases and transaction counts, named barriers of a CTA, and the cluster barrier.

Each carries vector clocks: what arrives hands its clocks over, what passes takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .clocks import Collected, Handover
from .fast import opcodes as o
from .shadow import Domain
from .warpgroup import address

if TYPE_CHECKING:
    from .ptx import Instruction
    from .state import Warp

Array = np.ndarray


class SecondWait(NamedTuple):
    """A warp that waited for a phase a second time, having released something in between."""

    warp: Warp
    ins: Instruction
    clock: int  # of the warp at the second wait


class Arrivals(NamedTuple):
    """A warp's arrivals on one barrier: in ``phase``, and since its initialisation."""

    phase: int
    now: int
    total: int


class Use(NamedTuple):
    """An instruction that used an mbarrier, and the warps that executed it."""

    ins: Instruction
    warps: set[Warp]


def _number(column: int) -> Any:
    """A property that is kept in a barrier's numbers."""

    def get(barrier: MBarrier) -> int:
        return int(barrier.numbers[column])

    def put(barrier: MBarrier, value: int) -> None:
        barrier.numbers[column] = value

    return property(get, put)


class MBarrier:
    """An mbarrier object of shared memory at ``offset`` of CTA ``cta``, in arrays for compiled code.

    ``phase`` counts completed phases, so a wait on parity p passes where ``phase % 2 != p``. ``waits``: the
    phase and the step of each warp's last wait, by the warp's number in the cluster, -1 for none.
    """

    expected, pending, tx, phase = map(_number, (o.M_EXPECTED, o.M_PENDING, o.M_TX, o.M_PHASE))
    agent, init_by, init_clock = map(_number, (o.M_AGENT, o.M_INIT_BY, o.M_INIT_CLOCK))
    init_fenced = _number(o.M_INIT_FENCED)  # by fence.mbarrier_init

    def __init__(self, cta: Any, offset: int, count: int, agent: int, owner: Warp, waits: Array) -> None:
        self.cta, self.offset, self.waits = cta, offset, waits
        self.clocks = cta.domain.clocks(4)
        self.tallied = np.zeros((len(waits), o.TALLY_COLUMNS), np.int64)
        self.users = np.zeros((8, 1 + len(waits)), np.int64)
        self.arrived = np.zeros((16, 2), np.int64)
        numbers = self.numbers = np.zeros(o.M_COLUMNS, np.int64)
        numbers[: o.M_TWICE] = count, count, 0, 0, agent, owner.agent, owner.clock, 0
        numbers[o.M_WARPS] = len(waits)
        self._find()
        places = (numbers[at : at + 1] for at in (o.M_ARRIVING_KNOWN, o.M_DONE_KNOWN))
        self.arriving = Collected(cta.domain, self.clocks[:2], next(places))
        self.done = Collected(cta.domain, self.clocks[2:], next(places))
        self.waiters: list[Warp] = []
        self.waited_twice: dict[int, SecondWait] = {}
        self.made: Instruction | None = None  # mbarrier.init

    def _find(self) -> None:
        """Tell compiled code where the arrays are."""
        self.numbers[o.M_CLOCKS_AT :] = (
            address(self.clocks), address(self.waits), address(self.tallied), address(self.users),
            len(self.users), address(self.arrived), len(self.arrived),
        )  # fmt: skip

    def _warp(self, number: int) -> Warp:
        """The warp of this number in the cluster."""
        ctas = self.cta.cluster.ctas
        return ctas[number // self.cta.warp_count].warps[number % self.cta.warp_count]

    def note(self, warp: Warp) -> None:
        """Remember that a warp used the barrier, by the step that it executes, for reports."""
        step, used = warp.frames[-1].pc, int(self.numbers[o.M_USED])
        for i in range(used):
            if self.users[i, 0] == step:
                self.users[i, 1 + warp.in_cluster] = 1
                return
        if used == len(self.users):
            self.users = np.concatenate([self.users, np.zeros_like(self.users)])
            self._find()
        self.users[used, [0, 1 + warp.in_cluster]] = step, 1
        self.numbers[o.M_USED] += 1

    @property
    def uses(self) -> dict[int, Use]:
        """Instructions that used it, by PTX line, in the order of their first use."""
        steps, found = self.cta.machine.program.steps, {}
        for step, *used in self.users[: self.numbers[o.M_USED]].tolist():
            warps = {self._warp(i) for i, flag in enumerate(used) if flag}
            found[steps[step].first.line] = Use(steps[step].first, warps)
        return found

    @property
    def tally(self) -> dict[Warp, Arrivals]:
        """Arrivals of each warp that has arrived."""
        rows = self.tallied.tolist()
        return {self._warp(i): Arrivals(*row[:3]) for i, row in enumerate(rows) if row[3]}

    @property
    def arrivals(self) -> list[str]:
        """Texts of who arrived in the current phase, for reports."""
        return [
            f"{count} by warp {warp.number}" + ("" if warp.cta is self.cta else f" of CTA {warp.cta.index}")
            for count, warp in (
                (n, self._warp(i)) for n, i in self.arrived[: self.numbers[o.M_ARRIVED]].tolist()
            )
        ]

    def arrive(self, clocks: Handover, count: int, warp: Warp) -> bool:
        """Count ``count`` arrivals of a warp. Returns whether more arrived than the phase expects."""
        row, made = self.tallied[warp.in_cluster], int(self.numbers[o.M_ARRIVED])
        now = row[1] if row[0] == self.phase else 0
        row[:] = self.phase, now + count, row[2] + count, 1
        over = count > self.pending
        self.arriving.add(clocks)
        self.pending -= count
        if made == len(self.arrived):
            self.arrived = np.concatenate([self.arrived, np.zeros_like(self.arrived)])
            self._find()
        self.arrived[made] = count, warp.in_cluster
        self.numbers[o.M_ARRIVED] += 1
        return over

    def settle(self) -> bool:
        """Complete the phase if all arrivals and all transaction bytes are there; returns whether it did."""
        if self.pending > 0 or self.tx != 0:
            return False
        self.phase += 1
        self.pending += self.expected
        self.done.add(self.arriving)
        self.done.vc[self.agent] = self.done.fc[self.agent] = self.phase
        self.arriving.clear()
        self.numbers[o.M_ARRIVED] = 0
        return True

    def wait_again(self, agent: int, wait: SecondWait) -> None:
        """Remember a second wait for the same phase."""
        self.waited_twice[agent] = wait
        self.numbers[o.M_TWICE] = 1

    def overtaken(self) -> list[SecondWait]:
        """Second waits for an earlier phase than the one just completed, which nobody who arrived knew of.

        Where those who arrived had synchronised with the warp after its second wait, that wait did no harm:
        the warp looked twice before it gave its stage back.
        """
        found = [wait for agent, wait in self.waited_twice.items() if self.done.vc[agent] < wait.clock]
        self.waited_twice.clear()
        self.numbers[o.M_TWICE] = 0
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
