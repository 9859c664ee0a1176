"""The emulated machine: the seeded scheduler, the queue of asynchronous work, and findings.

One step is a run of arithmetic or one operation of one warp. A warp runs until it blocks or a random quantum
of steps is over. Asynchronous work (bulk copies, WGMMA groups, ``cp.async``) sits in a queue with the step
at which it happens, drawn from the same seed; so a seed fixes the whole schedule.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import arrivals, call_stacks, history, peers, roles, suspects, taint
from .branches import branch, guard_of
from .call_stacks import CallStack
from .fast.opcodes import LIMIT, MOST_STEPS, STEP_OF_WARP
from .global_shadow import GlobalShadow
from .hints import HINTS
from .memory import GlobalMemory
from .names import Names
from .ordering import Cell, Mark
from .program import EXIT, READ, Handlers, Program, Step
from .ptx import Instruction, Kernel, Symbol
from .reports import EmulatorError, Kind, Place, Report, ReportLog, SourceLine, Suspect, first_lines
from .shadow import AgentKind, Conflict
from .state import BLOCK, SHARED_BASE, Cluster, Cta, Frame, Launch, Warp
from .stats import Stats
from .timeline import Event, Timeline

Array = np.ndarray
MOST_TABLES = 8  # of barriers in the report of a deadlock


class Machine:
    """Runs one launch of one kernel. ``seed`` fixes the schedule; ``resident`` clusters run at a time."""

    def __init__(
        self,
        kernel: Kernel,
        launch: Launch,
        memory: GlobalMemory,
        log: ReportLog,
        *,
        files: dict[int, str],
        seed: int = 0,
        sms: int = 132,
        resident: int = 8,
        handlers: Handlers,
        timeline: Timeline | None = None,
        stats: Stats | None = None,
        check: bool = True,
        watch: Any = None,
        max_steps: int | None = None,
        before: GlobalShadow | None = None,
        runner: Callable[[Machine], Any] | None = None,
    ):
        self.kernel, self.launch, self.memory, self.log = kernel, launch, memory, log
        self.files, self.check, self.watch, self.sms = files, check, watch, sms
        self.random = np.random.default_rng(seed)
        self.timeline, self.stats = timeline, stats
        self.first_event = len(timeline.events) if timeline is not None else 0
        # CTAs of a cooperative launch may wait for each other, so they run all at the same time.
        self.resident = sys.maxsize if launch.attributes.get("cooperative") else resident
        self.max_steps = max_steps
        self.ranks = math.prod(launch.cluster)
        self._lay_out()
        self.uses_wgmma = any(i.root == "wgmma" for i in kernel.instructions)
        self.program = Program(kernel, handlers, self.symbol_value, single=watch is not None)
        history.keep(self.program)
        self.names = Names(self)
        self.params = np.frombuffer(launch.params.ljust(4096, b"\0"), np.uint8)
        self.runner: Any = runner(self) if runner is not None and watch is None else None
        self.step = 0
        self.events: list[tuple[int, int, Callable[[], None], Instruction | None]] = []
        self.at: tuple[Warp | None, Instruction | None] = (None, None)  # what runs, for errors
        self.sequence = itertools.count()
        self.ready: Any = [] if self.runner is None else self.runner.ready
        self.clusters: list[Cluster] = []
        self.progress = 0
        self.accesses = GlobalShadow(memory, before if launch.attributes.get("programmatic") else None)
        self.marks: dict[Cell, Mark] = {}

    def _lay_out(self) -> None:
        at, local = SHARED_BASE, 0
        shared = [v for v in self.kernel.variables.values() if v.space == "shared"]
        for variable in sorted(shared, key=lambda v: v.size == 0):
            at = -(-at // variable.align) * variable.align
            variable.offset = at
            at += variable.size
        for variable in self.kernel.variables.values():
            if variable.space == "local":
                local = -(-local // variable.align) * variable.align
                variable.offset = local
                local += variable.size
            elif variable.space in ("global", "const"):
                self._place_global(variable)
        self.shared_bytes = at + self.launch.smem
        self.local_bytes = local

    def _place_global(self, variable: Any) -> None:
        data = np.zeros(max(variable.size, len(variable.data), 1) + 16, np.uint8)
        data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        variable.offset = -(-data.ctypes.data // 16) * 16
        shift = variable.offset - data.ctypes.data
        data[shift : shift + len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        self._kept = [*getattr(self, "_kept", []), data]
        self.memory.register(variable.offset, variable.size, f"variable {variable.name}")

    def symbol_value(self, symbol: Symbol) -> int:
        """Address of a variable or parameter in its own space."""
        variable = self.kernel.variables.get(symbol.name)
        if variable is not None:
            return variable.offset + symbol.offset
        for param in self.kernel.params:
            if param.name == symbol.name:
                return param.offset + symbol.offset
        raise EmulatorError(f"kernel {self.kernel.name}: unknown symbol {symbol.name}")

    # Findings

    def source(self, ins: Instruction) -> str:
        """File and line of the Python source, or nothing where the kernel has no line information."""
        number, line, _ = ins.source
        return f"{self.files[number]}:{line}" if number in self.files else ""

    def call_stack(self, ins: Instruction) -> CallStack | None:
        """The Python call stack of an instruction; None where the kernel has no line information."""
        number, line, column = ins.source
        return call_stacks.find(self.files[number], line, column) if number in self.files else None

    def stack(self, ins: Instruction) -> tuple[SourceLine, ...]:
        """The Python lines that an instruction comes from, innermost first."""
        found = self.call_stack(ins)
        return found.lines if found is not None else ()

    def role(self, warp: Warp) -> str:
        """``producer``, ``consumer 0``… or nothing."""
        return roles.role(warp)

    def ctas(self) -> list[Cta]:
        """The CTAs that run."""
        return [cta for cluster in self.clusters for cta in cluster.ctas]

    def place(self, who: str, ins: Instruction | None) -> Place | None:
        """The other side of a race; None where its instruction is not known."""
        if ins is None:
            return None
        return Place(self.names.replace(who, None), ins.line, ins.text, self.stack(ins))

    def report(
        self,
        kind: Kind,
        message: str,
        warp: Warp | None,
        ins: Instruction | None,
        *,
        address: int | None = None,
        space: str = "shared",
        lanes: Array | None = None,
        warning: bool = False,
        other: Place | None = None,
        look_at: Iterable[Suspect] | None = None,
    ) -> None:
        """Add a finding at ``ins`` of ``warp``.

        ``other``: the other side of a race. ``look_at``: lines that are suspect, consumed only for the first
        finding of its kind at this line; None: what the warp did before.
        """
        if look_at is None and warp is not None and ins is not None:
            look_at = suspects.before(self, warp, ins)
        known = self.log.knows(kind, self.kernel.name, ins.line if ins else 0, warning)
        where = (
            "" if lanes is None or lanes.all() else "lanes " + ",".join(str(i) for i in np.flatnonzero(lanes))
        )
        self.log.add(
            Report(
                kind=kind,
                message=self.names.replace(message, warp.cta if warp else None),
                kernel=self.kernel.name,
                ptx_line=ins.line if ins else 0,
                ptx_text=ins.text if ins else "",
                source=self.source(ins) if ins else "",
                cta=warp.cta.index if warp else (0, 0, 0),
                warp=warp.number if warp else -1,
                lanes=where,
                space=space if address is not None else "",
                address=address,
                step=self.step,
                warning=warning,
                stack=self.stack(ins) if ins else (),
                other=other,
                hint=HINTS.get(kind, ""),
                buffer=self.names.buffer(warp.cta, address)
                if warp and address is not None and space == "shared"
                else "",
                role=self.role(warp) if warp else "",
                suspects=() if known or look_at is None else first_lines(look_at),
            )
        )

    def report_conflict(
        self, conflict: Conflict, verb: str, warp: Warp, ins: Instruction, cta: Cta, same: bool = False
    ) -> None:
        """Name the kind of a race by the agent on its other side; ``same``: both wrote the same value."""
        agent, wrote = conflict.agent, conflict.wrote
        if not wrote:
            reader = cta.domain.agents.index(agent)
            cta.early_reads = {k: v for k, v in cta.early_reads.items() if k[1] != reader}
        if wrote and agent.kind in (AgentKind.BULK_LOAD, AgentKind.CP_ASYNC) and verb == "read":
            kind = Kind.READ_BEFORE_ARRIVAL
        elif not wrote and agent.kind in (AgentKind.WGMMA, AgentKind.BULK_LOAD, AgentKind.BULK_STORE):
            kind = Kind.OVERWRITE_IN_USE
        else:
            kind = Kind.RACE
        other = "write" if wrote else "read"
        text = f"{verb} does not wait for the {other} by {agent.name}"
        if cta is not warp.cta:
            text += f" (shared memory of CTA {cta.index})"
        if same:
            text += "; both write the same value"
        self.report(
            kind,
            text,
            warp,
            ins,
            address=conflict.offset,
            warning=same,
            other=self.place(f"{other} by {agent.name}", conflict.ins),
            look_at=suspects.race(self, warp, ins, cta, conflict),
        )

    # Scheduling

    def later(self, action: Callable[[], None], low: int = 2, high: int = 200) -> int:
        """Run ``action`` a random number of steps from now; returns that step."""
        count = high - low
        drawn = self.random.integers(count) if self.runner is None else self.runner.below(count)
        at = self.step + low + int(drawn)
        heapq.heappush(self.events, (at, next(self.sequence), action, self.at[1]))
        return at

    def wake(self, warps: list[Warp]) -> None:
        """Let waiting warps run again."""
        self.progress += 1
        for warp in warps:
            if warp.waiting:
                if self.timeline is not None:
                    self.timeline.add(warp.name, "wait", warp.waiting, warp.waiting_since, self.step)
                warp.waiting = ""
                self.ready.append(warp)
        warps.clear()

    def block(self, warp: Warp, reason: str, waiters: list[Warp]) -> object:
        """Put ``warp`` to sleep on ``waiters``; result of the handler."""
        warp.waiting, warp.waiting_since = reason, self.step
        if warp not in waiters:
            waiters.append(warp)
        return BLOCK

    def run(self) -> None:
        """Run the launch to its end. Raises :class:`EmulatorError` at a deadlock or where it cannot go on."""
        grid, shape = self.launch.grid, self.launch.cluster
        self.started = self.step
        if self.runner is not None:
            self.runner.start(self.max_steps)
        if any(g % c for g, c in zip(grid, shape, strict=True)):
            raise EmulatorError(f"grid {grid} is not a multiple of the cluster {shape}")
        counts = [g // c for g, c in zip(grid, shape, strict=True)]
        order = ((x, y, z) for z in range(counts[2]) for y in range(counts[1]) for x in range(counts[0]))
        linear = itertools.count()
        with np.errstate(all="ignore"):
            while True:
                while len(self.clusters) < self.resident:
                    number = next(order, None)
                    if number is None:
                        break
                    cluster = Cluster(self, number, next(linear))
                    self.clusters.append(cluster)
                    self.ready.extend(w for c in cluster.ctas for w in c.warps)
                if not self.clusters:
                    break
                self._turn()
            while self.events:
                self._next_event()
        self._name_events()

    def _name_events(self) -> None:
        """Put the names of mbarriers into the timeline."""
        for cluster in self.clusters:
            self._title(cluster)
        if self.timeline is not None and any(self.names.known.values()):
            kept, replace = self.timeline.events, functools.cache(lambda text: self.names.replace(text, None))
            for i in range(self.first_event, len(kept)):
                event = kept[i]
                if "mbarrier 0x" in event.actor or "mbarrier 0x" in event.label:
                    actor, label = replace(event.actor), replace(event.label)
                    kept[i] = Event(actor, event.kind, label, event.start, event.end)

    def _next_event(self) -> None:
        at, _, action, issuer = heapq.heappop(self.events)
        self.step, self.at = max(self.step, at), (None, issuer)
        action()

    def _turn(self) -> None:
        if self.runner is not None and self.runner.amid:
            self._compiled_turns()
            return
        while self.events and self.events[0][0] <= self.step:
            self._next_event()
        if not self.ready:
            if self.events:
                self._next_event()
            else:
                self._stalled()
            return
        if self.runner is not None:
            self._compiled_turns()
            return
        at = int(self.random.integers(len(self.ready)))
        warp = self.ready[at]
        quantum = int(self.random.integers(1, MOST_STEPS))
        self._end_turn(warp, self._run_warp(warp, quantum))

    def _compiled_turns(self) -> None:
        """Turns in compiled code, and then the steps that it leaves to Python code."""
        why = self.runner.turns()
        if why == LIMIT:
            self._end_turn(None, "run")
        if why == STEP_OF_WARP:
            warp, left = self.runner.turn()
            state = self._run_warp(warp, left)
            if state != "later":
                self._end_turn(warp, state)

    def _end_turn(self, warp: Any, state: str) -> None:
        """The end of a turn of a warp, which can go on, is blocked or done."""
        if state != "run":
            self.ready.remove(warp)
        if state == "done":
            self._ended(warp)
        if self.max_steps is not None and self.step - self.started > self.max_steps:
            raise EmulatorError(f"kernel {self.kernel.name}: more than {self.max_steps} steps")

    def _run_warp(self, warp: Warp, quantum: int) -> str:
        """Execute steps of a warp: all of them without compiled code, else until that may go on."""
        runner = self.runner
        if runner is None:
            return self._steps_of(warp, quantum, None)[0]
        runner.leave(warp, 0)
        state, left = self._steps_of(warp, quantum, runner)
        if state == "later":
            runner.leave(warp, left)
        return state

    def _steps_of(self, warp: Warp, quantum: int, runner: Any) -> tuple[str, int]:
        """Execute steps of a warp, at least one, until the runner takes the next; the steps left then."""
        steps, program, first = self.program.steps, self.program, True
        while quantum > 0:
            if not warp.frames:
                return "done", 0
            frame = warp.frames[-1]
            if runner is not None and not first and runner.takes(warp, frame.pc):
                return "later", quantum
            first = False
            quantum -= 1
            if frame.pc == frame.reconverge and len(warp.frames) > 1:
                warp.frames.pop()
                top = warp.frames[-1]
                top.full = bool((top.mask == warp.live).all())
                continue
            if frame.pc == EXIT or frame.pc >= len(steps):
                warp.exit_lanes(frame.mask)
                continue
            step = steps[frame.pc]
            self.step += 1
            if self.watch is not None:
                self.at = None, None  # an inspector's errors are not the emulator's
                self.watch.before(self, warp, step)
            self.at = warp, step.first
            if step.kind == "alu":
                undefined = bool(warp.taint) and not warp.taint.keys().isdisjoint(step.used)
                function = program.compiled(
                    step, not frame.full, bool(warp.pending or warp.pending_a), undefined
                )
                function(warp.R, warp.S, frame.mask, warp)
                if self.stats is not None:
                    self.stats.ran(step)
                if step.flow:
                    mark(warp, step)
                frame.pc += 1
            elif step.kind == "op":
                if self._operation(warp, frame, step) is BLOCK:
                    return "blocked", 0
            elif step.kind == "bra":
                if warp.taint and step.first.pred is not None:
                    taint.guard(self, warp, step.first, frame.mask)
                branch(warp, frame, step)
            else:
                mask = frame.mask & guard_of(warp, step.first) if step.first.pred is not None else frame.mask
                frame.pc += 1
                if mask.any():
                    warp.exit_lanes(mask)
        return ("run" if warp.frames else "done"), 0

    def _operation(self, warp: Warp, frame: Frame, step: Step) -> object:
        ins = step.first
        mask = warp.live if frame.full else frame.mask
        if ins.pred is not None:
            if warp.taint:
                taint.guard(self, warp, ins, mask)
            guard = guard_of(warp, ins)
            if not guard.all():
                mask = mask & guard
        if ins.pred is None or mask.any():
            if warp.pending:
                self._check_pending(warp, ins)
            if warp.taint:
                taint.operation(self, warp, ins, mask)
            if step.role:
                warp.did.add(step.role)
            assert step.handler is not None
            if step.handler(self, warp, ins, mask) is BLOCK:
                return BLOCK
            if warp.taint and ins.root not in taint.OWN_MARKS:
                for register in step.writes:
                    taint.assign(warp, register, None, mask)
            if self.stats is not None:
                self.stats.ran(step)
            if step.flow:
                mark(warp, step)
        frame.pc += 1
        return None

    def _check_pending(self, warp: Warp, ins: Instruction) -> None:
        if ins.root == "wgmma":
            return
        from .ptx import registers

        for operand in ins.operands:
            for register in registers(operand):
                if id(warp.R[register]) in warp.pending and not (
                    operand is ins.operands[0] and ins.root != "st"
                ):
                    warp.touched(0, register, False)
                    return

    def _ended(self, warp: Warp) -> None:
        from .sync import settle_after_exit

        cluster = warp.cta.cluster
        cluster.barrier.alive -= 1
        stores = warp.state.get("stores")
        if stores is not None and stores.unfinished() and self.check:
            self.report(
                Kind.OVERWRITE_IN_USE,
                "the warp ends with bulk stores that it has not waited for (cp.async.bulk.wait_group.read): "
                "nothing promises that the CTA's shared memory stays as it is until they have read it",
                warp,
                stores.last,
                look_at=suspects.stores_left(self, warp, stores.last),
            )
        peers.note_end(self, warp)
        settle_after_exit(self, warp)
        if cluster.barrier.alive == 0:
            while self.events:  # copies still under way count on their barriers before these are looked at
                self._next_event()
            for cta in cluster.ctas:
                self._check_end(cta)
            self._title(cluster)
            self.clusters.remove(cluster)
            cluster.release()

    def _title(self, cluster: Cluster) -> None:
        """Roles, cluster peers and names of barriers for the timeline."""
        if self.timeline is None:
            return
        ctas = tuple(f"CTA {cta.index}" for cta in cluster.ctas)
        for cta in cluster.ctas:
            self.names.remember(cta)
            self.timeline.peers[f"CTA {cta.index}"] = ctas
            self.timeline.roles |= {w.name: role for w, role in roles.of_cta(cta).items()}

    def _check_end(self, cta: Cta) -> None:
        warp = cta.warps[0]
        for _, tell in cta.early_reads.values():
            tell()
        for barrier in cta.mbarriers.values():
            arrived = barrier.expected - barrier.pending
            if barrier.tx:
                self.report(
                    Kind.TRANSACTION_COUNT,
                    f"the kernel ends while mbarrier {barrier.offset:#x} has "
                    f"{barrier.tx} bytes of transactions outstanding",
                    warp,
                    None,
                    address=barrier.offset,
                    look_at=suspects.counts(self, barrier),
                )
            elif arrived:
                self.report(
                    Kind.ARRIVE_COUNT,
                    f"the kernel ends while mbarrier {barrier.offset:#x} has {arrived} of "
                    f"{barrier.expected} arrivals ({', '.join(dict.fromkeys(barrier.arrivals))})\n"
                    + arrivals.of_mbarrier(self, barrier),
                    warp,
                    None,
                    address=barrier.offset,
                    look_at=suspects.counts(self, barrier),
                )

    def _stalled(self) -> None:
        """Nothing can run: let try_wait give up once, and if that changes nothing it is a deadlock."""
        waiting = [w for cluster in self.clusters for c in cluster.ctas for w in c.warps if w.waiting]
        again = [w for w in waiting if w.suspended and w.timed_out != self.progress]
        if again:
            for warp in again:
                warp.timed_out = self.progress
                warp.gave_up = True
                warp.waiting = ""
                self.ready.append(warp)
                if self.runner is not None:
                    self.runner.stale.add(warp)
            return
        for cluster in self.clusters:
            for cta in cluster.ctas:
                for _, tell in cta.early_reads.values():
                    tell()
                for barrier in cta.mbarriers.values():
                    for wait in barrier.waited_twice.values():
                        self.report(
                            Kind.PHASE_WAITED_TWICE,
                            f"a warp waited twice for one phase of mbarrier "
                            f"{barrier.offset:#x} and went on; then all warps came to wait",
                            wait.warp,
                            wait.ins,
                            address=barrier.offset,
                        )
        same: dict[tuple, list[Warp]] = {}
        for warp in waiting:
            place = self.program.steps[warp.frames[-1].pc].first
            same.setdefault((warp.cta.index, warp.waiting, place.line), []).append(warp)
        lines = []
        for (index, reason, _), warps in same.items():
            ins = self.program.steps[warps[0].frames[-1].pc].first
            where = self.source(ins) or f"PTX line {ins.line}"
            lines.append(f"    CTA {index} warps {[w.number for w in warps]}: {reason}, at {where}")
        first = waiting[0] if waiting else None
        at = self.program.steps[first.frames[-1].pc].first if first else None
        self.report(
            Kind.DEADLOCK,
            f"{len(waiting)} warps wait and nothing can wake them:\n" + "\n".join(lines + self._tables()),
            first,
            at,
            look_at=suspects.deadlock(self, waiting),
        )
        self._name_events()
        raise EmulatorError(f"deadlock in kernel {self.kernel.name}", tuple(self.log.reports))

    def _tables(self) -> list[str]:
        """Arrivals at each barrier that warps wait for."""
        found = []
        for cta in (cta for cluster in self.clusters for cta in cluster.ctas):
            found += [arrivals.of_mbarrier(self, b) for b in cta.mbarriers.values() if b.waiters]
            found += [arrivals.of_named(self, cta, b) for b in cta.named.values() if b.waiters]
        return found[:MOST_TABLES] + [f"    and {len(found) - MOST_TABLES} more"] * (len(found) > MOST_TABLES)


def mark(warp: Warp, step: Step) -> None:
    """Remember which registers that reach a WGMMA a step changed or read."""
    for target, source in step.flow:
        if source == READ:
            warp.read.add(target)
        elif source == -1 or source in warp.dirty:
            warp.dirty.add(target)
        else:
            warp.dirty.discard(target)
