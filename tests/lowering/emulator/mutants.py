"""Seeded faults in the PTX of this project's kernels, one at a time, and what the emulator says of each.

    python -m tests.lowering.emulator.mutants --count 200 --seed 1 [--out results.json]

Mutants are drawn evenly from kernels and kinds of fault. A mutant without a finding is run again under
other schedules; one that still has none is told apart by its result, and by whether its line runs at all.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import kernels_dsl
from kernels_dsl.config.gemm import Sm80GemmConfig, Sm90GemmConfig
from lowering import emulator
from lowering.emulator import Kind, Severity, ptx, session
from reference.bsr import random_bsr
from tests.ops.bsr import bsr_cases

SEEDS = 2
STEPS = 8
"""A mutant may take so many times the steps of the kernel as it is."""


class Subject(NamedTuple):
    """A kernel to be mutated: `call` runs it on the CPU and returns its result."""

    arch: str
    call: Callable[[], torch.Tensor]
    sms: int | None = None


class Fault(NamedTuple):
    """A kind of fault: lines that match `pattern` are replaced by `by`, or dropped if that is empty."""

    pattern: str
    by: str | Callable[[re.Match[str]], str] = ""


def _gemm(config: Sm80GemmConfig | Sm90GemmConfig, m: int, n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-2, 3, (rows, k), generator=generator).to(torch.bfloat16) for rows in (m, n))
    return kernels_dsl.gemm(a, b.mT, config=config)


def _attention() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 192, 1, 64, generator=generator).to(torch.bfloat16) for _ in range(3))
    return kernels_dsl.attention(q, k, v, causal=True)


def _bsr() -> torch.Tensor:
    matrix = random_bsr("one_heavy_row", (3, 5), (64, 64), 0, seed=1)
    dense = torch.randint(-2, 3, (320, 72), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return kernels_dsl.bsr_gemm(bsr_cases.sparse_of(matrix), dense, family="sm90")


SUBJECTS = {
    "gemm_sm90": Subject("sm_90a", lambda: _gemm(Sm90GemmConfig(128, 64, stages=2), 136, 72, 264)),
    "gemm_stream_k": Subject("sm_90a", lambda: _gemm(Sm90GemmConfig(64, 16, stream_k=True), 200, 32, 640), 3),
    "gemm_sm80": Subject("sm_80", lambda: _gemm(Sm80GemmConfig(64, 64, 32, 3, 2, 2), 72, 72, 136)),
    "attention_sm90": Subject("sm_90a", _attention, 1),
    "attention_sm80": Subject("sm_80", _attention),
    "bsr_sm90": Subject("sm_90a", _bsr, 1),
}

_WAIT = (
    r"mbarrier\.try_wait(?P<kind>[^\s]*)\s+(?P<done>\w+), (?P<at>\[[^]]*\]), "
    r"(?P<phase>%?\w+)(?P<rest>[^;]*);"
)
FAULTS = {
    "a wait on an mbarrier removed": Fault(_WAIT, r"setp.eq.u32 \g<done>, 0, 0;"),
    "a phase flipped": Fault(
        _WAIT,
        r"{ .reg .b32 MUT; xor.b32 MUT, \g<phase>, 1;"
        r" mbarrier.try_wait\g<kind> \g<done>, \g<at>, MUT\g<rest>; }",
    ),
    "an arrival removed": Fault(r"(@\S+\s+)?mbarrier\.arrive\.shared[^;]*;"),
    "an arrive count too large": Fault(
        r"mbarrier\.init(?P<kind>\S*)\s+(?P<at>\[[^]]*\]), (?P<count>%?\w+);",
        r"{ .reg .b32 MUT; add.s32 MUT, \g<count>, 1; mbarrier.init\g<kind> \g<at>, MUT; }",
    ),
    "an mbarrier not initialised": Fault(r"mbarrier\.init[^;]*;"),
    "a byte count off": Fault(
        r"mbarrier\.arrive\.expect_tx(?P<kind>\S*)\s+(?P<state>\S+), (?P<at>\[[^]]*\]), (?P<count>%?\w+);",
        r"{ .reg .b32 MUT; add.s32 MUT, \g<count>, 16;"
        r" mbarrier.arrive.expect_tx\g<kind> \g<state>, \g<at>, MUT; }",
    ),
    "a barrier removed": Fault(r"(bar\.sync|barrier\.(sync|cluster))[^;]*;"),
    "a proxy fence dropped": Fault(r"fence\.proxy\.async[^;]*;"),
    "fence.mbarrier_init dropped": Fault(r"fence\.mbarrier_init[^;]*;"),
    "wgmma.fence dropped": Fault(r"wgmma\.fence[^;]*;"),
    "a wait on a group removed": Fault(
        r"(wgmma|cp\.async|cp\.async\.bulk)\.wait_(group|all)(\.read|\.sync|\.aligned)*\b[^;]*;"
    ),
    "a wait on a group one short": Fault(
        r"(?P<wait>(wgmma|cp\.async|cp\.async\.bulk)\.wait_group\S*)\s+(?P<n>\d+);",
        lambda found: f"{found['wait']} {int(found['n']) + 1};",
    ),
    "a commit removed": Fault(r"(wgmma|cp\.async|cp\.async\.bulk)\.commit_group[^;]*;"),
    "a release or acquire relaxed": Fault(
        r"(?P<op>(ld|st|atom|red)\S*)\.(release|acquire|acq_rel)\b", r"\g<op>.relaxed"
    ),
    "an index of shared memory shifted": Fault(
        r"(?P<op>(st\.shared|ld\.shared|stmatrix|ldmatrix)\S*)(?P<first>[^;[]*)\[(?P<base>%\w+)(?P<off>[^]]*)\]",
        r"\g<op>\g<first>[\g<base>\g<off>+4096]",
    ),
    "an index of global memory shifted": Fault(
        r"(?P<op>(st\.global|ld\.global)\S*)(?P<first>[^;[]*)\[(?P<base>%\w+)(?P<off>[^]]*)\]",
        r"\g<op>\g<first>[\g<base>\g<off>+4096]",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault at one line (from 0) of one kernel's PTX."""

    subject: str
    fault: str
    line: int

    def apply(self, text: str) -> str:
        """PTX with the fault; lines keep their numbers."""
        lines = text.split("\n")
        fault = FAULTS[self.fault]
        lines[self.line] = _sums(re.sub(fault.pattern, fault.by, lines[self.line], count=1))
        return "\n".join(lines)

    def trapped(self, text: str) -> str:
        """PTX with a trap at the line, which tells whether it runs."""
        lines = text.split("\n")
        lines[self.line] = "trap; " + lines[self.line]
        return "\n".join(lines)


def _sums(line: str) -> str:
    """A line whose addresses have one offset each: ``[%r1+16+4096]`` is no PTX."""
    return re.sub(r"\+(\d+)\+(\d+)\]", lambda found: f"+{int(found[1]) + int(found[2])}]", line)


@dataclass(frozen=True)
class Verdict:
    """The emulator's word on one mutant: `outcome` is found, wrong result, not run or silent."""

    mutant: Mutant
    outcome: str
    kinds: tuple[str, ...] = ()
    beside: bool = False  # a report names the mutated line or the one beside it
    text: str = ""


class _Ran(NamedTuple):
    result: torch.Tensor | None
    kinds: frozenset[str]
    lines: frozenset[int]
    steps: int


class Bench:
    """One kernel, compiled once, and run with other PTX."""

    def __init__(self, name: str) -> None:
        self.name, self.subject = name, SUBJECTS[name]
        before = set(session._loaded)
        self.right = self._run(0, 50_000_000)
        assert not self.right.kinds, f"{name} as it is has findings: {set(self.right.kinds)}"
        new = [key for key in session._loaded if key not in before]
        self.key = max(new, key=lambda key: len(session._loaded[key].made.ptx))
        self.loaded = session._loaded[self.key]
        self.ptx: str = self.loaded.made.ptx

    def _run(self, seed: int, steps: int) -> _Ran:
        result: torch.Tensor | None = None
        subject = self.subject
        with emulator.run(
            arch=subject.arch, sms=subject.sms, seed=seed, raise_on_report=False, max_steps=steps
        ) as active:
            reports = active.reports
            try:
                result = subject.call()
            except emulator.EmulatorError as error:
                reports = [*active.reports, *error.reports]
                if not reports:
                    return _Ran(None, frozenset({"error"}), frozenset(), active.steps)
            reports = [*reports, *active.reports]
        errors = [r for r in reports if r.severity is Severity.ERROR]
        lines = frozenset(place.ptx_line for r in errors for place in r.places)
        return _Ran(result, frozenset(r.kind.name for r in errors), lines, active.steps)

    def run(self, text: str, seed: int) -> _Ran:
        """The kernel with PTX `text` in place of its own."""
        module = ptx.parse(text)
        made = self.loaded.made
        host = session.host_function(made.ir_module, made.function_name, module)
        session._loaded[self.key] = session._Loaded(module, host, made)
        kernels = len(session._loaded)
        try:
            ran = self._run(seed, STEPS * self.right.steps + 10_000)
            assert len(session._loaded) == kernels, "another kernel ran: the sources have changed meanwhile"
            return ran
        finally:
            session._loaded[self.key] = self.loaded

    def mutants(self) -> Iterator[Mutant]:
        """Every place where a fault applies."""
        for number, line in enumerate(self.ptx.split("\n")):
            if not line.lstrip().startswith(("//", ".")):
                for fault, how in FAULTS.items():
                    if re.search(how.pattern, line):
                        yield Mutant(self.name, fault, number)

    def judge(self, mutant: Mutant) -> Verdict:
        """Run a mutant under `SEEDS` schedules, and its line with a trap where that finds nothing."""
        text, shown = mutant.apply(self.ptx), self.ptx.split("\n")[mutant.line].strip()
        wrong = False
        for seed in range(SEEDS):
            if seed == 1 and not wrong and Kind.TRAP.name not in self.run(mutant.trapped(self.ptx), 0).kinds:
                return Verdict(mutant, "not run", text=shown)
            ran = self.run(text, seed)
            if ran.kinds:
                beside = any(abs(line - 1 - mutant.line) <= 3 for line in ran.lines)
                return Verdict(mutant, "found", tuple(sorted(ran.kinds)), beside, shown)
            wrong = wrong or not _same(ran.result, self.right.result)
        return Verdict(mutant, "wrong result" if wrong else "silent", text=shown)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def draw(benches: dict[str, Bench], count: int, seed: int) -> list[Mutant]:
    """Seeded mutants, in turns from kernels and from their kinds of fault; none twice."""
    chance = random.Random(seed)
    pools: dict[str, dict[str, list[Mutant]]] = {}
    for name, bench in benches.items():
        kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
        for mutant in bench.mutants():
            kinds[mutant.fault].append(mutant)
        for mutants in kinds.values():
            chance.shuffle(mutants)
        pools[name] = dict(sorted(kinds.items()))
    drawn: list[Mutant] = []
    while len(drawn) < count and any(pools.values()):
        for kinds_of_one in pools.values():
            if kinds_of_one and len(drawn) < count:
                fault = next(iter(kinds_of_one))
                mutants = kinds_of_one.pop(fault)
                drawn.append(mutants.pop())
                if mutants:
                    kinds_of_one[fault] = mutants  # to the end of the line
    return drawn


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0, help="start no mutant after so long")
    parser.add_argument("--part", default="1/1", help="2/3: the second of three processes")
    parser.add_argument("--out", type=Path, help="write the verdicts to this JSON file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    benches = {name: Bench(name) for name in SUBJECTS}
    part, parts = (int(x) for x in asked.part.split("/"))
    mutants = draw(benches, asked.count, asked.seed)[part - 1 :: parts]
    verdicts: list[Verdict] = []
    start = time.monotonic()
    for number, mutant in enumerate(mutants, 1):
        verdicts.append(benches[mutant.subject].judge(mutant))
        spent = time.monotonic() - start
        left = spent / number * (len(mutants) - number)
        last = verdicts[-1]
        print(
            f"{number} of {len(mutants)}, {left:.0f} s left: {last.outcome}: {mutant.subject} line"
            f" {mutant.line + 1}, {mutant.fault} {', '.join(last.kinds)}",
            flush=True,
        )
        if asked.out:
            asked.out.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
        if asked.seconds and spent > asked.seconds:
            break
    for verdict in verdicts:
        if verdict.outcome != "found":
            at = f"{verdict.mutant.subject} line {verdict.mutant.line + 1}"
            print(f"{verdict.outcome}: {at}: {verdict.mutant.fault}: {verdict.text}")
    table = Counter((v.mutant.fault, v.outcome) for v in verdicts)
    for fault in FAULTS:
        print(f"{fault}: " + ", ".join(f"{n} {o}" for (f, o), n in sorted(table.items()) if f == fault))
    print(f"in all: {dict(Counter(v.outcome for v in verdicts))}, beside: {sum(v.beside for v in verdicts)}")


if __name__ == "__main__":
    main()
