"""Work of Python code for steps that compiled code took: wakes, waits, and what may be reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from . import matrix, peers, register_file, sync
from .fast import opcodes as o
from .machine import mark
from .state import OFFSET_MASK, RANK_SHIFT

if TYPE_CHECKING:
    from .machine import Machine
    from .ptx import Instruction
    from .state import Warp


Rest = Callable[["Warp", "Instruction", int, int, list[int]], None]
"""Rest of the work for an instruction that a warp began at a clock; the numbers: see the interpreter."""


class Aftermath:
    """Goes through the log of compiled code. ``warps``: by the addresses of their rows."""

    def __init__(self, machine: Machine, warps: dict[int, Warp]) -> None:
        self.machine, self.warps, self.steps = machine, warps, machine.program.steps
        self._rest = [self._rest_of(step.first) for step in self.steps]
        self._looked_at = {n for n, s in enumerate(self.steps) if s.kind == "op" and s.first.has("mma_async")}

    def follow(self, entries: list[list[int]]) -> None:
        """Do what is left to do for these entries of the log, in order."""
        machine, steps, warps = self.machine, self.steps, self.warps
        for number, at, clock, more, place, *numbers in entries:
            warp = warps[place]
            machine.step = at
            if number == o.COMPLETED:
                self._complete(warp, clock, more)
                continue
            if number <= o.BLOCKED_AT:
                self._block(warp, steps[o.BLOCKED_AT - number].first, more, numbers)
                continue
            step = steps[number]
            if more:
                machine.at = warp, step.first
                self._rest[number](warp, step.first, clock, more, numbers)
                if number in self._looked_at:
                    warp.row.remember(number, clock)
            if step.flow:
                mark(warp, step)

    def _complete(self, warp: Warp, address: int, phase: int) -> None:
        """A phase of the mbarrier at this address is complete."""
        cta = warp.cta.cluster.ctas[address >> RANK_SHIFT]
        barrier = cta.mbarriers[address & OFFSET_MASK]
        sync.note_phase(self.machine, barrier, phase)
        self.machine.wake(barrier.waiters)

    def _block(self, warp: Warp, ins: Instruction, more: int, numbers: list[int]) -> None:
        """A warp waits; ``numbers`` tell of what, as it was then."""
        if ins.root == "mbarrier":
            cta = warp.cta.cluster.ctas[more >> RANK_SHIFT]
            sync.await_phase(self.machine, warp, cta.mbarriers[more & OFFSET_MASK], numbers)
        elif ins.root == "wgmma":
            matrix.await_group(self.machine, warp, numbers[0], numbers[1])
        elif "cluster" in ins.parts:
            sync.await_cluster(self.machine, warp, numbers[0])
        else:
            sync.join_named(self.machine, warp, numbers[0])
            sync.await_named(self.machine, warp, *numbers[:3])

    def _rest_of(self, ins: Instruction) -> Rest:
        """Function for what an instruction may leave to do."""
        if ins.root in ("bar", "barrier"):
            return self._of_named
        if ins.root == "setmaxnreg":
            return lambda warp, ins, clock, more, numbers: register_file.note(warp, ins)
        if ins.parts[:2] == ("mbarrier", "init"):
            return lambda warp, ins, clock, more, numbers: sync.made(warp, ins, *numbers[:3])
        return self._of_mbarrier if ins.root == "mbarrier" else self._of_warpgroup

    def _of_named(self, warp: Warp, ins: Instruction, clock: int, more: int, numbers: list[int]) -> None:
        if more == o.OPENED:
            sync.open_named(self.machine, warp, numbers[0])
        else:
            sync.join_named(self.machine, warp, numbers[0])

    def _of_mbarrier(self, warp: Warp, ins: Instruction, clock: int, more: int, numbers: list[int]) -> None:
        for cta in warp.cta.cluster.ctas if self.machine.check else ():
            if more >> cta.rank & 1:
                cta.uses[warp.agent] = peers.Use(clock, warp, ins)

    def _of_warpgroup(self, warp: Warp, ins: Instruction, clock: int, more: int, numbers: list[int]) -> None:
        assert warp.group is not None
        if ins.parts[1] == "mma_async":
            matrix.check_operands(self.machine, warp, ins, more - 1)
        elif ins.parts[1] == "commit_group":
            matrix.committed(self.machine, warp.group, more - 1)
        else:
            matrix.wgmma_fence(self.machine, warp, ins, warp.live)
