"""Lets the interpreter run a warp as far as it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import history, matrix, peers, sync
from .fast import interpreter
from .fast import opcodes as o
from .fast import wgmma as compiled_wgmma
from .fast.context import CtaRow, LaunchRow, WarpRow
from .fast.encode import REMEMBERED, Encoder
from .fast.registers import LANES, Registers
from .fast.touches import Touches
from .machine import mark
from .semantics import mma
from .state import OFFSET_MASK, RANK_SHIFT

if TYPE_CHECKING:
    from .machine import Machine
    from .ptx import Instruction
    from .state import Warp
    from .stats import Stats

Array = np.ndarray


class Runner:
    """Runs the steps of one launch that the interpreter knows."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.steps = machine, machine.program.steps
        encoder = self.encoder = Encoder(machine.program, machine.symbol_value, machine.params)
        self._rows, self._tables = encoder.rows(), encoder.tables
        kinds, guards = encoder.steps[:, o.KIND], encoder.steps[:, o.STEP_GUARD]
        self.knows: list[bool] = ((kinds != o.UNKNOWN) | (guards >= 0)).tolist()
        self._notes = [
            (step.first, step.role, step.flow, step.kind == "op" and step.first.root in REMEMBERED)
            for step in self.steps
        ]
        self._counts = np.zeros((len(self.steps), 3), np.int64)
        self._log = np.zeros((o.LOG, o.ENTRY), np.int64)
        self.launch = LaunchRow((*self._tables, self._counts, self._log))

    def begin(self, warp: Warp) -> None:
        """Give a warp that begins its registers, and what compiled code is to know of it."""
        held = warp.R = Registers(self.encoder.layout, self._rows)
        for at, size, value in self.encoder.own:
            held.file[0][at : at + LANES * size].view(f"u{size}")[:] = value(warp)
        cta = warp.cta
        if cta.row is None:
            cta.row = CtaRow(cta, warp.agent)
        touches = Touches(self.steps, len(cta.smem) // 4 + 1 if self.encoder.touches else 0)
        warp.lane_touches, warp.row = touches, WarpRow(warp, cta.row, held, touches)

    def takes(self, warp: Warp, at: int) -> bool:
        """True if the interpreter may go on with a warp from step ``at``."""
        if warp.taint or warp.pending_a or len(warp.frames) > o.MOST_FRAMES:
            return False
        return 0 <= at < len(self.knows) and (self.knows[at] or at == warp.frames[-1].reconverge)

    def run(self, warp: Warp, left: int) -> int:
        """Run a warp for at most ``left`` turns of its loop; returns how many there were."""
        machine, held, cta, touched, row = self.machine, warp.R, warp.cta, warp.lane_touches, warp.row
        if held.assigned:
            held.settle(warp.pending)
        cta.row.begin(left)
        row.begin(warp)
        numbers = row.numbers
        numbers[o.LEFT], numbers[o.PENDING] = left, bool(warp.pending)
        numbers[o.FENCED] = warp.wgmma_fenced and not warp.dirty and not warp.read
        numbers[o.STEP] = machine.step
        numbers[o.LANES_KNOWN], numbers[o.TOUCHES] = touched.known, touched.used
        interpreter.run(self.launch.row, row.row)
        after = numbers[: o.FRAMES + o.FRAME].tolist()
        cta.shadow.used = after[o.NOTES_USED]
        if after[o.REFRAMED]:
            warp.frames = row.frames()
        else:
            warp.frames[-1].pc = numbers[o.FRAMES + o.FRAME * (after[o.DEPTH] - 1) + o.FRAME_PC]
        if after[o.LEARNED]:
            row.learned(warp)
        self._lanes(warp, after)
        if after[o.LOGGED]:
            self._note(warp, after[o.LOGGED])
        machine.step += after[o.DONE]
        return after[o.SPENT]

    def _lanes(self, warp: Warp, after: list[int]) -> None:
        """Results of the run for a warp's lanes: that they came together, and what they touched since."""
        touched, used = warp.lane_touches, after[o.TOUCHES]
        if after[o.CONVERGED]:
            warp.converge()
            if after[o.CONVERGED] == 1:
                return
            touched.arrays[0][0] -= 1  # the run began this interval itself
        touched.used, touched.known = used, bool(after[o.LANES_KNOWN])

    def _note(self, warp: Warp, logged: int) -> None:
        """Do what the interpreter left to do for some of its steps."""
        machine, start, notes = self.machine, self.machine.step, self._notes
        for number, before, clock, more in self._log[:logged].tolist():
            if number == o.COMPLETED:
                machine.step = start + before + 1
                self._complete(warp, clock, more)
                continue
            ins, role, flow, remembers = notes[number]
            if role:
                warp.did.add(role)
            if more:
                machine.step, machine.at = start + before + 1, (warp, ins)
                self._finish(warp, ins, clock, more)
            if remembers:
                began, warp.began = warp.began, None
                if not warp.past or warp.past[-1].ins is not ins:
                    history.remember(warp, ins, clock if began is None else began)
            if flow:
                mark(warp, self.steps[number])
        machine.step = start

    def _complete(self, warp: Warp, address: int, phase: int) -> None:
        """A phase of the mbarrier at this address is complete."""
        cta = warp.cta.cluster.ctas[address >> RANK_SHIFT]
        barrier = cta.mbarriers[address & OFFSET_MASK]
        sync.note_phase(self.machine, barrier, phase)
        self.machine.wake(barrier.waiters)

    def _finish(self, warp: Warp, ins: Instruction, clock: int, more: int) -> None:
        """Do the rest of an operation; ``more``: see the interpreter."""
        if ins.root == "mbarrier":
            for cta in warp.cta.cluster.ctas if self.machine.check else ():
                if more >> cta.rank & 1:
                    cta.uses[warp.agent] = peers.Use(clock, warp, ins)
            return
        assert warp.group is not None
        if ins.parts[1] == "mma_async":
            matrix.check_operands(self.machine, warp, ins, more - 1)
        elif ins.parts[1] == "commit_group":
            matrix.committed(self.machine, warp.group, more - 1)
        else:
            matrix.wgmma_fence(self.machine, warp, ins, warp.live)

    def multiply(self, operations: Array, smem: Array) -> int:
        """Compute WGMMAs that all four warps have issued, up to one of a kind not known; returns how many."""
        return int(compiled_wgmma.multiply(self.launch.row, operations, smem))

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
            elif step.first.root == "wgmma" and step.first.has("mma_async"):
                stats.add(step.first, "matrix_flops", times * matrix.flops_of(step.first))
        self._counts[:] = 0
