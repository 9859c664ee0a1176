"""Seeded faults in the PTX of a kernel, one at a time, and what the emulator says of each.

    python -m tests.lowering.emulator.mutants gemm_sm80 --count 34 --seed 1 [--out results.json]

One kernel a process: packages of others patch the DSL when they are imported. A kernel is compiled once; each
mutant starts from the memory that its first launch found. One that has no finding is told apart by its
result, by whether its line runs at all, and by another schedule.
"""

from __future__ import annotations

import argparse
import json
import linecache
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from lowering import emulator
from lowering.emulator import Kind, Severity, call_stacks, ptx, schedules, statements
from lowering.emulator.memory import GlobalMemory
from lowering.emulator.reports import Place, Report, SourceLine, Suspect, where_to_look
from lowering.emulator.session import Session
from lowering.emulator.state import Launch
from tests.lowering.emulator.faults import FAULTS, Mutant
from tests.lowering.emulator.mutant_subjects import SUBJECTS

STEPS = 8
"""A mutant may take so many times the steps of the kernel as it is."""
INSIDE = 2
"""A line that a report names counts for what happens within so many calls from it."""
SHOWN = 4
"""Reports of a mutant whose text is kept."""


@dataclass(frozen=True)
class Verdict:
    """The emulator's word on one mutant.

    `outcome`: found; found by seed 1; else, by the result, wrong result or silent; not run. `beside`: an
    access that a report names stands at the mutated line or the one beside it, in the PTX or in the source.
    `named`: so does one of the `lines` that the findings name together to be looked at.
    """

    mutant: Mutant
    outcome: str
    kinds: tuple[str, ...] = ()
    beside: bool = False
    named: bool = False
    lines: int = 0
    text: str = ""
    source: str = ""
    reports: tuple[str, ...] = ()


class _Ran(NamedTuple):
    kinds: frozenset[str]
    places: tuple[Place, ...]
    same: bool
    steps: int
    reports: tuple[Report, ...] = ()


class Bench:
    """The first launch of a subject, to be repeated with other PTX from the memory that it found."""

    def __init__(self, name: str, text: str, launch: Launch, memory: GlobalMemory) -> None:
        self.name, self.subject = name, SUBJECTS[name]
        self.ptx, self.launch, self.memory = text, launch, memory
        self.before = schedules.copy(memory)
        self.after: list[schedules.RegionCopy] = []
        self.module = ptx.parse(text)
        self.right = self._run(self.module, 0, 50_000_000)
        assert not self.right.kinds, f"{name} as it is has findings: {set(self.right.kinds)}"
        self.after = schedules.copy(memory)

    def _run(self, module: ptx.Module, seed: int, steps: int) -> _Ran:
        schedules.restore(self.memory, self.before)
        subject = self.subject
        session = Session(subject.arch, seed, subject.sms, raise_on_report=False, max_steps=steps)
        failed: tuple[Report, ...] | None = None
        try:
            session.execute(module, self.launch, self.memory)
        except emulator.EmulatorError as error:
            failed = error.reports
        errors = [r for r in (*session.reports, *(failed or ())) if r.severity is Severity.ERROR]
        kinds = {r.kind.name for r in errors} or ({"error"} if failed is not None else set())
        same = failed is None and schedules.difference(self.memory, self.after or self.before) is None
        return _Ran(
            frozenset(kinds), tuple(p for r in errors for p in r.places), same, session.steps, tuple(errors)
        )

    def run(self, text: str, seed: int = 0) -> _Ran:
        """The launch with PTX `text` in place of its own."""
        return self._run(ptx.parse(text), seed, STEPS * self.right.steps + 10_000)

    def mutants(self) -> Iterator[Mutant]:
        """Every place where a fault applies."""
        for number, line in enumerate(self.ptx.split("\n")):
            if not line.lstrip().startswith(("//", ".")):
                for fault, how in FAULTS.items():
                    if re.search(how.pattern, line):
                        yield Mutant(self.name, fault, number)

    def judge(self, mutant: Mutant) -> Verdict:
        """Run a mutant; where that finds nothing, its line with a trap, then another schedule."""
        shown, stack = self.ptx.split("\n")[mutant.line].strip(), self._stack(mutant.line + 1)
        source = " < ".join(f"{Path(line.path).name}:{line.line}" for line in stack)
        text = mutant.apply(self.ptx)
        ran = self.run(text)
        if ran.kinds:
            beside = any(_beside(place, mutant.line + 1, stack) for place in ran.places)
            look = where_to_look(ran.reports)
            named = any(_named(suspect, mutant.line + 1, stack, shown) for suspect in look)
            texts = (*(f"look at {suspect}" for suspect in look), *map(str, ran.reports[:SHOWN]))
            lines = len(set().union(*(suspect.lines() for suspect in look)))
            kinds = tuple(sorted(ran.kinds))
            return Verdict(mutant, "found", kinds, beside, named, lines, shown, source, texts)
        if Kind.TRAP.name not in self.run(mutant.trapped(self.ptx)).kinds:
            return Verdict(mutant, "not run", text=shown, source=source)
        again = self.run(text, seed=1)
        if again.kinds:
            return Verdict(mutant, "found by seed 1", tuple(sorted(again.kinds)), text=shown, source=source)
        outcome = "silent" if ran.same and again.same else "wrong result"
        return Verdict(mutant, outcome, text=shown, source=source)

    def _stack(self, line: int) -> tuple[SourceLine, ...]:
        """The Python lines that a line of the PTX comes from, innermost first."""
        for kernel in self.module.kernels.values():
            for ins in kernel.instructions:
                if ins.line == line and ins.source[0] in self.module.files:
                    number, at, column = ins.source
                    return call_stacks.find(self.module.files[number], at, column).lines
        return ()


def _beside(place: Place, line: int, stack: tuple[SourceLine, ...]) -> bool:
    """True for the PTX line or the one beside it, and for neighbours in the source.

    From the kernel's own line inwards, stacks of neighbours part at one statement of a function and the next.
    One of them may go on inwards, by no more than `INSIDE` calls.
    """
    if place.ptx_line and abs(place.ptx_line - line) <= 1:
        return True
    return bool(place.stack and stack) and _near(place.stack, stack, place.stack[0].line)


def _near(named: tuple[SourceLine, ...], mutated: tuple[SourceLine, ...], until: int) -> bool:
    """True for a stack beside another, whose innermost function is named up to line `until`."""
    depth = 0
    one, other = named[::-1], mutated[::-1]
    while depth < min(len(one), len(other)) - 1 and one[depth][:2] == other[depth][:2]:
        depth += 1
    path, low = one[depth][:2]
    high = until if depth == len(one) - 1 else low
    if path != other[depth].path or len(other) - 1 - depth > INSIDE or len(one) - 1 - depth > INSIDE:
        return False
    first, mine, last = (statements.number(path, at) for at in (low, other[depth].line, high))
    return first - 1 <= mine <= last + 1


def _named(suspect: Suspect, line: int, stack: tuple[SourceLine, ...], text: str) -> bool:
    """The same of lines to look at, which may be several."""
    if _beside(suspect.place, line, stack):
        return True
    if suspect.span.first < line < suspect.span.last and _lost(suspect, stack, text):
        return True
    return bool(suspect.until and stack) and _near(suspect.place.stack, stack, suspect.until)


def _lost(suspect: Suspect, stack: tuple[SourceLine, ...], text: str) -> bool:
    """True for a ``wgmma.fence`` whose line the compiler lost, where the lines to look at call it."""
    if not text.startswith("wgmma.fence") or len(stack) != 1 or not suspect.place.stack:
        return False
    first = suspect.place.stack[0]
    lines = range(first.line, max(first.line, suspect.until) + 1)
    return any("fence(" in linecache.getline(first.path, line) for line in lines)


def visit(name: str, work: Callable[[Bench], None], scale: int = 1) -> None:
    """Call a subject and hand its first launch to `work`, while its tensors live."""
    texts: dict[int, tuple[str, ptx.Module]] = {}
    parse, execute = ptx.parse, Session.execute
    seen: list[str] = []

    def parsed(text: str) -> ptx.Module:
        module = parse(text)
        texts[id(module)] = (text, module)
        return module

    def executed(session: Session, module: ptx.Module, launch: Launch, memory: GlobalMemory) -> None:
        if not seen:
            seen.append(launch.kernel)
            with mock.patch.object(Session, "execute", execute):
                work(Bench(name, texts[id(module)][0], launch, memory))
        execute(session, module, launch, memory)

    subject = SUBJECTS[name]
    settings: dict[str, Any] = {"sms": subject.sms, "torch_cuda": subject.foreign, "raise_on_report": False}
    with (
        mock.patch.object(ptx, "parse", parsed),
        mock.patch.object(Session, "execute", executed),
        emulator.run(subject.arch, **settings),
    ):
        subject.call(scale)
    assert seen, f"{name} launches no kernel"


def draw(bench: Bench, seed: int) -> list[Mutant]:
    """All mutants of a kernel in a seeded order, in turns from its kinds of fault."""
    chance = random.Random(seed)
    kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in bench.mutants():
        kinds[mutant.fault].append(mutant)
    for mutants in kinds.values():
        chance.shuffle(mutants)
    drawn: list[Mutant] = []
    while any(kinds.values()):
        drawn += [mutants.pop() for _, mutants in sorted(kinds.items()) if mutants]
    return drawn


def missed(path: Path) -> list[Mutant]:
    """The mutants of a file of verdicts that had no finding."""
    verdicts = json.loads(path.read_text())
    return [Mutant(**v["mutant"]) for v in verdicts if v["outcome"] not in ("found", "not run")]


def campaign(bench: Bench, asked: argparse.Namespace) -> list[Verdict]:
    """Judge mutants until ``asked.count`` have run; verdicts are printed and written as they come."""
    verdicts: list[Verdict] = []
    start = time.monotonic()
    for mutant in missed(asked.again) if asked.again else draw(bench, seed=asked.seed):
        verdicts.append(bench.judge(mutant))
        spent, last = time.monotonic() - start, verdicts[-1]
        run = sum(verdict.outcome != "not run" for verdict in verdicts)
        where = " beside" * last.beside + " named" * last.named
        print(
            f"{run} of {asked.count}, {spent:.0f} s: {last.outcome}{where}: "
            f"line {mutant.line + 1}, {mutant.fault} {', '.join(last.kinds)}",
            flush=True,
        )
        if asked.out:
            asked.out.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
        if run == asked.count or (asked.seconds and spent > asked.seconds):
            break
    return verdicts


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("kernel", choices=SUBJECTS)
    parser.add_argument("--count", type=int, default=34, help="mutants whose lines run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0, help="start no mutant after so long")
    parser.add_argument("--again", type=Path, help="judge those of this file that had no finding")
    parser.add_argument("--scale", type=int, default=1, help="of the problem: 3 fills rings and tiles")
    parser.add_argument("--out", type=Path, help="write the verdicts to this JSON file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    verdicts: list[Verdict] = []
    visit(asked.kernel, lambda bench: verdicts.extend(campaign(bench, asked)), asked.scale)
    for verdict in verdicts:
        if verdict.outcome != "found":
            at = f"line {verdict.mutant.line + 1}, {verdict.source}"
            print(f"{verdict.outcome}: {at}: {verdict.mutant.fault}: {verdict.text}")
    table = Counter((v.mutant.fault, v.outcome) for v in verdicts)
    for fault in FAULTS:
        print(f"{fault}: " + ", ".join(f"{n} {o}" for (f, o), n in sorted(table.items()) if f == fault))
    counts = sorted(v.lines for v in verdicts if v.outcome == "found")
    named = (
        f"named: {sum(v.named for v in verdicts)}, lines named: {counts[len(counts) // 2]}" if counts else ""
    )
    print(f"in all: {dict(Counter(v.outcome for v in verdicts))}, {named}")


if __name__ == "__main__":
    main()
