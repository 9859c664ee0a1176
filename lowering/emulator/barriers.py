"""Barriers: mbarriers with phases and transaction counts, named barriers of a CTA, and the cluster barrier.

Each carries vector clocks: what arrives hands its clocks over, what passes takes them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .barrier_room import Tables
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

    def get(barrier: Any) -> int:
        return int(barrier.numbers[column])

    def put(barrier: Any, value: int) -> None:
        barrier.numbers[column] = value

    return property(get, put)


class MBarrier:
    """An mbarrier object of shared memory at ``offset`` of CTA ``cta``, in arrays for compiled code.

    ``phase`` counts completed phases, so a wait on parity p passes where ``phase % 2 != p``.
    """

    expected, pending, tx, phase = map(_number, (o.M_EXPECTED, o.M_PENDING, o.M_TX, o.M_PHASE))
    agent, init_by, init_clock = map(_number, (o.M_AGENT, o.M_INIT_BY, o.M_INIT_CLOCK))
    init_fenced = _number(o.M_INIT_FENCED)  # by fence.mbarrier_init

    def __init__(self, cta: Any, offset: int, tables: Tables, made: Instruction) -> None:
        self.cta, self.offset, self.made = cta, offset, made
        self.numbers, self.tallied, self.users, self.arrived, self.waits, clocks = tables
        self._clocks = clocks
        self.waiters: list[Warp] = []
        self.waited_twice: dict[int, SecondWait] = {}

    @cached_property
    def arriving(self) -> Collected:
        """The clocks of who has arrived in this phase."""
        return Collected(self.cta.domain, self._clocks[:2], self.numbers[o.M_ARRIVING_KNOWN :])

    @cached_property
    def done(self) -> Collected:
        """The clocks of the last phase."""
        return Collected(self.cta.domain, self._clocks[2:], self.numbers[o.M_DONE_KNOWN :])

    def begin(self, count: int, agent: int, owner: Warp) -> None:
        """Initialise it by a warp: it expects so many arrivals; ``agent`` copies to shared memory."""
        self.numbers[: o.M_TWICE] = count, count, 0, 0, agent, owner.agent, owner.clock, 0

    def keep_waits(self, waits: Array) -> None:
        """The waits so far, of the mbarrier that was there before."""
        self.waits, self.numbers[o.M_WAITS_AT] = waits, address(waits)

    def _find(self) -> None:
        """Tell compiled code where arrays are that have grown."""
        self.numbers[o.M_USERS_AT :] = (
            address(self.users), len(self.users), address(self.arrived), len(self.arrived),
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
        return describe(self.phase, self.pending, self.expected, self.tx)


def describe(phase: int, pending: int, expected: int, tx: int) -> str:
    """State of an mbarrier in words."""
    text = f"phase {phase}, {expected - pending} of {expected} arrivals"
    return text + (f", {tx} bytes of transactions outstanding" if tx else "")


class NamedBarrier:
    """Barrier ``number`` of a CTA (bar.sync, bar.arrive, bar.red), in arrays for compiled code.

    ``clocks``: of the warps that have arrived.
    """

    arrived, left = map(_number, (o.N_ARRIVED, o.N_LEFT))

    def __init__(self, number: int, clocks: Collected, numbers: Array) -> None:
        self.number, self.clocks, self.numbers = number, clocks, numbers
        self.waiters: list[Warp] = []
        self.who: list[Warp] = []  # arrived
        self.reductions: list[Array] = []

    @property
    def expected(self) -> int | None:
        """Threads that are expected; None: all of the CTA."""
        count = int(self.numbers[o.N_EXPECTED])
        return None if count < 0 else count

    @expected.setter
    def expected(self, count: int | None) -> None:
        self.numbers[o.N_EXPECTED] = -1 if count is None else count

    def reset(self) -> None:
        """Ready for the next use."""
        self.expected, self.arrived, self.left = None, 0, 0
        self.numbers[o.N_WAITERS] = 0
        self.clocks.clear()
        self.open()

    def open(self) -> list[Warp]:
        """All have arrived; returns those that have waited."""
        waited = self.waiters
        self.waiters, self.who, self.reductions = [], [], []
        return waited


class ClusterBarrier:
    """barrier.cluster, in arrays for compiled code: ``generation`` counts completed phases.

    ``reached``: where every warp had come to, for relaxed arrivals hand over no more.
    """

    generation, arrived, alive = map(_number, (o.C_GENERATION, o.C_ARRIVED, o.C_ALIVE))

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.waiters: list[Warp] = []
        self.numbers = np.zeros(o.C_COLUMNS, np.int64)
        clocks, arriving = domain.clocks(2), domain.clocks(2)
        self.arriving = Collected(domain, arriving, self.numbers[o.C_ARRIVING_KNOWN : o.C_ARRIVING_KNOWN + 1])
        self.done = Collected(domain, clocks, self.numbers[o.C_KNOWN : o.C_KNOWN + 1])
        self.reached, self.reaching = domain.clock(), domain.clock()
        self.numbers[o.C_CLOCKS_AT], self.numbers[o.C_ARRIVING_AT] = address(clocks), address(arriving)
        self._find()

    def _find(self) -> None:
        """Tell compiled code where the arrays are."""
        self.numbers[[o.C_REACHED_AT, o.C_REACHING_AT]] = address(self.reached), address(self.reaching)

    def arrive(self, clocks: Handover, reached: Array) -> None:
        """One warp arrives, which has come to ``reached`` and hands ``clocks`` over."""
        self.arrived += 1
        self.arriving.add(clocks)
        np.maximum(self.reaching, reached, out=self.reaching)

    def settle(self, expected: int) -> bool:
        """Complete the phase when ``expected`` warps arrived."""
        if self.arrived < expected or self.arrived == 0:
            return False
        self.generation += 1
        self.arrived = 0
        self.done.add(self.arriving)
        self.arriving.clear()
        self.reached, self.reaching = self.reaching, self.reaching.copy()
        self._find()
        return True
