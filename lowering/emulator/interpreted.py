"""Lets the interpreter run a warp as far as it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import away, matrix
from .aftermath import Aftermath
from .fast import chance, tma, turns
from .fast import mbarrier as compiled_mbarrier
from .fast import opcodes as o
from .fast import wgmma as compiled_wgmma
from .fast.context import CtaRow, LaunchRow, WarpArrays, WarpRow
from .fast.encode import Encoder
from .fast.first_rows import FirstRows
from .ready import Ready
from .semantics import mma
from .warpgroup import address

if TYPE_CHECKING:
    from .barriers import MBarrier
    from .machine import Machine
    from .semantics.tma import WholeBox
    from .state import Cta, Warp
    from .stats import Stats

Array = np.ndarray


class Runner:
    """Runs the steps of one launch that the interpreter knows."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.steps = machine, machine.program.steps
        encoder = self.encoder = Encoder(machine.program, machine.symbol_value, machine.params)
        self._first, self._tables = FirstRows(encoder.rows(), encoder.own), encoder.tables
        kinds, guards = encoder.steps[:, o.KIND], encoder.steps[:, o.STEP_GUARD]
        self.knows: list[bool] = ((kinds != o.UNKNOWN) | (guards >= 0)).tolist()
        self._counts = np.zeros((len(self.steps), 3), np.int64)
        self._log = np.zeros((8 * o.LOG, o.ENTRY), np.int64)
        random = chance.source_of(machine.random)
        self._source = random[:2]
        self.launch = LaunchRow((*self._tables, self._counts, self._log), random)
        self.warps: dict[int, Warp] = {}  # by the addresses of their rows
        self._aftermath = Aftermath(machine, self.warps)
        self._arrays: WarpArrays  # of the CTA that begins
        self.stale: set[Warp] = set()  # whose rows are not what Python code has made of them
        self._turns, self._ran = np.zeros(o.T_COLUMNS, np.int64), np.zeros(256, np.int64)
        self.numbers = memoryview(self._turns)  # type: ignore[arg-type]
        self.ready = Ready(self.numbers)
        self._turns[[o.T_RAN_AT, o.T_RAN_ROOM]] = address(self._ran), len(self._ran)

    def start(self, most_steps: int | None) -> None:
        """The launch begins, and may take so many steps."""
        self.numbers[o.T_STARTED] = self.machine.step
        self.numbers[o.T_MOST] = o.NEVER if most_steps is None else most_steps

    def begin(self, warp: Warp) -> None:
        """Give a warp that begins its registers, and what compiled code is to know of it."""
        cta = warp.cta
        if warp.number == 0:
            cta.row = CtaRow(cta, warp.agent)
            words = len(cta.smem) // 4 + 1 if self.encoder.touches else 0
            self._arrays = WarpArrays(cta, cta.row, self.encoder.layout, self._first, words)
        arrays = self._arrays
        warp.R, warp.lane_touches = arrays.registers(warp.number), arrays.touches_of(warp.number, self.steps)
        warp.row, warp.unfenced = WarpRow(warp, arrays), arrays.unfenced[warp.number]
        self._first.fill(arrays.files, warp)
        self.warps[warp.row.address] = warp
        self.stale.add(warp)

    def end(self, warp: Warp) -> None:
        """A warp's row goes."""
        del self.warps[warp.row.address]
        self.stale.discard(warp)

    def takes(self, warp: Warp, at: int) -> bool:
        """True if the interpreter may go on with a warp from step ``at``."""
        if warp.taint or warp.pending_a or len(warp.frames) > o.MOST_FRAMES:
            return False
        return 0 <= at < len(self.knows) and (self.knows[at] or at == warp.frames[-1].reconverge)

    def turns(self) -> int:
        """Let the scheduler go on, to where Python code has something to do; returns what."""
        machine, numbers = self.machine, self.numbers
        for warp in self.stale:
            if warp.frames:
                self._push(warp)
        self.stale.clear()
        numbers[o.T_STEP] = machine.step
        numbers[o.T_EVENT] = machine.events[0][0] if machine.events else o.NEVER
        why = turns.run(self._turns, self.launch.row)
        ran = numbers[o.T_RAN]
        for place in self._ran[:ran].tolist():
            away.go(self.warps[place])
        numbers[o.T_RAN] = 0
        logged = self.launch.row[o.LOGGED_ALL]
        if logged:
            self.launch.row[o.LOGGED_ALL] = 0
            self._aftermath.follow(self._log[:logged].tolist())
        machine.step = numbers[o.T_STEP]
        if why == o.ROOM:
            self.turn()[0].cta.shadow.make_room()
        return int(why)

    def turn(self) -> tuple[Warp, int]:
        """The warp whose turn it is, and the steps left of it."""
        return self.warps[self.numbers[o.T_WARP]], self.numbers[o.T_LEFT]

    def leave(self, warp: Warp, left: int) -> None:
        """Python code has executed steps of a warp, whose turn has so many left."""
        self.stale.add(warp)
        self.numbers[o.T_LEFT] = left

    @property
    def amid(self) -> bool:
        """True within a turn."""
        return bool(self.numbers[o.T_LEFT])

    def _push(self, warp: Warp) -> None:
        """Bring a warp's state to its row."""
        held, row, touched = warp.R, warp.row, warp.lane_touches
        if held.assigned:
            held.settle(warp.pending)
        row.begin(warp)
        numbers = row.numbers
        numbers[o.PENDING] = bool(warp.pending)
        numbers[o.HELD] = bool(warp.taint or warp.pending_a or len(warp.frames) > o.MOST_FRAMES)
        numbers[o.FENCED] = warp.wgmma_fenced and not warp.dirty and not warp.read
        numbers[o.LANES_KNOWN], numbers[o.TOUCHES] = touched.known, touched.used

    def pull(self, warp: Warp) -> None:
        """Take a warp's state from its row after compiled code ran it, perhaps several times."""
        row = warp.row
        numbers = row.numbers
        numbers[o.RAN] = 0
        if numbers[o.REFRAMED]:
            warp.frames, numbers[o.REFRAMED] = row.frames(), 0
        else:
            warp.frames[-1].pc = numbers[o.FRAMES + o.FRAME * (numbers[o.DEPTH] - 1) + o.FRAME_PC]
        if numbers[o.LEARNED]:
            row.learned(warp)
            numbers[o.LEARNED] = 0
        if numbers[o.REACHED] == o.REACHED_NOW:
            warp.reached = row.of_reached = row.reached.copy()
            numbers[o.REACHED] = 1
        warp.passed, warp.gave_up = bool(numbers[o.PASSED]), bool(numbers[o.GAVE_UP])
        warp.suspended, began = bool(numbers[o.SUSPENDED]), numbers[o.BEGAN]
        warp.cluster_target = numbers[o.CLUSTER_TARGET]
        warp.began = None if began < 0 else began
        if numbers[o.ROLES]:
            warp.did.update(role for role, bit in self.encoder.roles.items() if numbers[o.ROLES] >> bit & 1)
            numbers[o.ROLES] = 0
        touched, converged = warp.lane_touches, numbers[o.CONVERGED]
        if converged:
            warp.converge()
            if converged == 1:
                numbers[o.LANES_KNOWN], numbers[o.TOUCHES] = 1, 0
            else:
                touched.arrays[0][0] -= 1  # compiled code began this interval itself
            numbers[o.CONVERGED] = 0
        touched.used, touched.known = numbers[o.TOUCHES], bool(numbers[o.LANES_KNOWN])

    def note_load(self, warp: Warp, cta: Cta, barrier: MBarrier, pieces: tuple[Array, int]) -> bool:
        """Note a TMA load that a warp issues; False, and nothing noted, where anything is to report."""
        owner, row = cta.row, warp.row
        if cta.shadow.used == len(cta.shadow.notes):
            cta.shadow.make_room()
        row.take_clocks(warp)
        row.numbers[o.AT] = warp.frames[-1].pc
        return bool(tma.note_load(row.row, owner.address, barrier.numbers, *pieces))

    def land(self, cta: Cta, barrier: MBarrier, box: WholeBox, transaction: int) -> bool:
        """Copy a box to shared memory; returns whether the phase of its mbarrier is complete now."""
        return bool(
            tma.land(box.rows, box.row_bytes, box.chunks, cta.row.address, barrier.numbers, transaction)
        )

    def settle(self, barrier: MBarrier) -> int:
        """Complete a phase if it is due: 1 or 0, or -1 where Python code must see."""
        return int(compiled_mbarrier.settle(barrier.numbers, barrier.cta.domain.capacity + 1))

    def multiply(self, operations: Array, smem: Array) -> int:
        """Compute WGMMAs that all four warps have issued, up to one of a kind not known; returns how many."""
        return int(compiled_wgmma.multiply(self.launch.row, operations, smem))

    def below(self, count: int) -> int:
        """Draw a number below ``count``, as the machine's generator does."""
        return int(chance.below(count, *self._source))

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
