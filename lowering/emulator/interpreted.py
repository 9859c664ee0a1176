"""Lets the interpreter run a warp as far as it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import history, matrix
from .fast import interpreter
from .fast import opcodes as o
from .fast.encode import Encoder
from .fast.registers import LANES, Registers
from .fast.touches import Touches
from .machine import mark
from .semantics import mma

if TYPE_CHECKING:
    from .machine import Machine
    from .state import Frame, Warp
    from .stats import Stats

_ALL_BITS = (1 << 64) - 1
_EVERY = np.ones(LANES, bool)


class Runner:
    """Runs the steps of one launch that the interpreter knows."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.steps = machine, machine.program.steps
        encoder = self.encoder = Encoder(machine.program, machine.symbol_value, machine.params)
        self._rows, self._tables = encoder.rows(), encoder.tables
        kinds, guards = encoder.steps[:, o.KIND], encoder.steps[:, o.STEP_GUARD]
        self.knows: list[bool] = ((kinds != o.UNKNOWN) | (guards >= 0)).tolist()
        self._state = np.zeros(o.STATE, np.int64)
        self._counts = np.zeros((len(self.steps), 3), np.int64)
        self._log = np.zeros((o.LOG, o.ENTRY), np.int64)

    def registers(self, warp: Warp) -> Registers:
        """The registers of a warp that begins."""
        made = Registers(self.encoder.layout, self._rows)
        for at, size, value in self.encoder.own:
            made.file[0][at : at + LANES * size].view(f"u{size}")[:] = value(warp)
        return made

    def takes(self, warp: Warp, at: int) -> bool:
        """True if the interpreter may go on with a warp from step ``at``."""
        return 0 <= at < len(self.knows) and self.knows[at] and not warp.taint and not warp.pending_a

    def run(self, warp: Warp, frame: Frame, left: int) -> int:
        """Run at most ``left`` steps; returns how many there were."""
        machine, state, held, cta = self.machine, self._state, warp.R, warp.cta
        held.settle(warp.pending)
        shadow, touched = cta.shadow, warp.lane_touches
        if shadow.used + left > len(shadow.notes):
            shadow.make_room()
        agent, vc = warp.agent, warp.vc
        state[:] = (
            frame.pc, left, frame.reconverge if len(warp.frames) > 1 else -2, frame.full and warp.all_live,
            bool(warp.pending), warp.wgmma_fenced and not warp.dirty and not warp.read, warp.ranks, cta.rank,
            agent, vc[agent], shadow.readers.rows.get(agent, -1), shadow.readers.count, shadow.used,
            shadow.strong is not None, machine.check, machine.stats is not None, touched.known, touched.used,
            0, 0, 0, 0, 0,
        )  # fmt: skip
        memory = (*cta.memory, shadow.readers.marks, shadow.readers.agents, shadow.notes, vc, touched.arrays)
        mask = _EVERY if frame.full else frame.mask
        interpreter.run(self._tables, memory, held.file, mask, state, self._counts, self._log)
        after = state.tolist()
        frame.pc, shadow.used = after[o.PC], after[o.NOTES_USED]
        self._lanes(warp, after)
        if after[o.LOGGED]:
            self._note(warp, after[o.LOGGED])
        machine.step += after[o.DONE]
        return after[o.DONE]

    def _lanes(self, warp: Warp, after: list[int]) -> None:
        """Results of the run for a warp's lanes: that they came together, and what they touched since."""
        touched, used = warp.lane_touches, after[o.TOUCHES]
        if after[o.WROTE]:
            warp.unfenced |= True
        if after[o.CONVERGED]:
            warp.converge()
            if after[o.CONVERGED] == 1:
                return
            touched.arrays[0][0] -= 1  # the run began this interval itself
        touched.used, touched.known = used, bool(after[o.LANES_KNOWN])

    def _note(self, warp: Warp, logged: int) -> None:
        """Do what the interpreter left to do for some of its steps."""
        machine, start = self.machine, self.machine.step
        for number, before, a_word, b_word, scale in self._log[:logged].tolist():
            step = self.steps[number]
            if step.role:
                warp.did.add(step.role)
            if step.first.root == "wgmma":
                machine.step, machine.at = start + before + 1, (warp, step.first)
                words = (a_word & _ALL_BITS, b_word & _ALL_BITS, bool(scale))
                matrix.issue(machine, warp, step.first, words)
                history.remember(warp, step.first, warp.clock)
            if step.flow:
                mark(warp, step)
        machine.step = start

    def touches(self, warp: Warp) -> Touches:
        """The place where accesses of a warp's lanes are noted."""
        return Touches(self.steps, len(warp.cta.smem) // 4 + 1 if self.encoder.touches else 0)

    def count(self, stats: Stats) -> None:
        """Hand the counts over."""
        for number in np.flatnonzero(self._counts[:, 0]).tolist():
            step, (times, shared, conflicts) = self.steps[number], self._counts[number].tolist()
            stats.ran(step, times)
            for name, amount in (("shared_bytes", shared), ("bank_conflicts", conflicts)):
                if amount:
                    stats.add(step.first, name, amount)
            if step.first.root == "mma":
                flops = 2 * 16 * 8 * mma.parse_opcode(step.first.opcode).k
                for ins in step.instructions:
                    stats.add(ins, "matrix_flops", times * flops)
        self._counts[:] = 0
