"""`python -m tests.fuzz FAMILY --cases N --seed S [--emulate] [--sanitize]`: see `--help`.

Exit status: 0 no failure, 1 a failure, 2 wrong usage or something missing here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference import inputs
from tests.fuzz import pool
from tests.fuzz.case import Outcome, Settings, Status
from tests.fuzz.families import FAMILIES, generate, module_of

LEAST_DRAWS = 5
_SHOWN_FAILURES = 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random calls of public operations, checked."
    )
    parser.add_argument(
        "families",
        nargs="+",
        metavar="FAMILY",
        choices=(*FAMILIES, "all"),
        help=", ".join((*FAMILIES, "all")),
    )
    parser.add_argument("--cases", type=int, default=1000, help="cases of each family (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first case, to share a seed among runs"
    )
    parser.add_argument("--case", type=int, help="run this one case alone, in this process")
    parser.add_argument("--numbers", help="run these cases alone, as in 3,17,40")
    parser.add_argument("--emulate", action="store_true", help="small cases in the emulator, no GPU needed")
    parser.add_argument("--sanitize", action="store_true", help="run under compute-sanitizer's memcheck")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="start no block of cases after so long, a family"
    )
    parser.add_argument(
        "--case-seconds", type=float, default=0.0,
        help="a case that takes longer has hung (default 180, under the sanitizer 600)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=0, help="processes (default: one a core)")
    parser.add_argument("--out", type=Path, help="write counts, coverage and failures to this JSON file")
    return parser


class Tally:
    """Counts of a family's outcomes, with a line of progress now and then."""

    def __init__(self, plan: pool.Plan, repro: str, save: Callable[[], None]) -> None:
        self.plan, self.repro, self.save = plan, repro, save
        self.counts: Counter[Status] = Counter()
        self.coverage: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failures: list[Outcome] = []
        self.start = self.shown = time.monotonic()

    def __call__(self, outcome: Outcome) -> None:
        self.counts[outcome.status] += 1
        self.seconds[outcome.features[0] if outcome.features else "?"] += outcome.seconds
        if outcome.status is Status.PASSED:
            self.coverage.update(outcome.features)
        elif outcome.status is Status.REFUSED:
            self.refusals[outcome.detail.split("\n")[0][:120]] += 1
        else:
            self.failures.append(outcome)
            if len(self.failures) <= _SHOWN_FAILURES:
                print(f"\nFAILED: {self.repro} --case {outcome.number}\n{outcome.detail}", flush=True)
        if time.monotonic() - self.shown > 5:
            self.show()

    @property
    def done(self) -> int:
        """Cases that ended."""
        return sum(self.counts.values())

    def show(self) -> None:
        """One line of progress, and the counts so far to the file."""
        self.shown = time.monotonic()
        self.save()
        took = self.shown - self.start
        rate = self.done / max(took, 1e-9)
        left = (self.plan.cases - self.done) / max(rate, 1e-9)
        if self.plan.seconds:
            left = min(left, max(self.plan.seconds - took, 0.0))
        counts = ", ".join(f"{self.counts[status]} {status.value}" for status in Status)
        print(
            f"{self.plan.family}: {self.done} of {self.plan.cases} in {took:.0f} s ({rate:.1f}/s, "
            f"{left:.0f} s left): {counts}",
            flush=True,
        )

    def thin(self) -> list[str]:
        """The features that a long run must have drawn and did not draw often enough."""
        expected = module_of(self.plan.family).expected_features(self.plan.settings)
        return [name for name in expected if self.coverage[name] < LEAST_DRAWS]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "family": self.plan.family,
            "seed": self.plan.settings.seed,
            "first": self.plan.first,
            "sanitized": self.plan.sanitize,
            "cases": self.done,
            **{status.value: self.counts[status] for status in Status},
            "seconds": round(time.monotonic() - self.start, 1),
            "coverage": dict(sorted(self.coverage.items())),
            "thin": self.thin(),
            "seconds of operations": {name: round(x, 1) for name, x in self.seconds.items()},
            "refusals": dict(self.refusals.most_common()),
            "failures": [outcome.as_dict() for outcome in self.failures],
        }

    def summary(self) -> None:
        """The final counts and the coverage."""
        self.show()
        print("  drawn and passed: " + ", ".join(f"{k} {n}" for k, n in sorted(self.coverage.items())))
        for text, count in self.refusals.most_common(8):
            print(f"  refused {count}: {text}")
        thin = self.thin()
        if thin:
            print(f"  fewer than {LEAST_DRAWS} times: {', '.join(thin)}")


def _settings(options: argparse.Namespace) -> tuple[Settings, int] | str:
    """(settings, number of GPUs), or why they cannot be had here."""
    if options.emulate:
        return Settings(seed=options.seed, device="cpu", small=True), 0
    import torch

    if not torch.cuda.is_available():
        return "no NVIDIA GPU here: give --emulate to run small cases in the emulator"
    if options.sanitize and shutil.which(pool.SANITIZER[0]) is None:
        return "no compute-sanitizer on the PATH: it comes with the CUDA toolkit"
    major, minor = torch.cuda.get_device_capability()
    arch = "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"
    # Without the caching allocator, which the sanitizer is run without, nothing can be captured; and it slows
    # down products in float64 to seconds. Cases by two threads hung there.
    plain = not options.sanitize
    settings = Settings(seed=options.seed, arch=arch, graphs=plain, threads=plain, values=plain)
    return settings, torch.cuda.device_count()


def _one(family: str, options: argparse.Namespace, settings: Settings) -> int:
    """Run one case in this process, under any debugger."""
    from tests.fuzz import worker

    print(f"{family} {options.case}: {generate(family, options.case, settings)}", flush=True)
    if settings.device == "cpu":
        worker.poison_new_memory()
    else:
        inputs.make_on_device()
    outcome = worker.run_one(family, options.case, settings)
    print(f"{outcome.status.value} after {outcome.seconds:.1f} s\n{outcome.detail}")
    return int(outcome.status is Status.FAILED)


def main(arguments: list[str]) -> int:
    """Run what the command line asks for."""
    options = _parser().parse_args(arguments)
    found = _settings(options)
    if isinstance(found, str):
        print(f"tests.fuzz: {found}", file=sys.stderr)
        return 2
    settings, gpus = found
    families = FAMILIES if "all" in options.families else tuple(dict.fromkeys(options.families))
    if options.case is not None:
        return max(_one(family, options, settings) for family in families)
    tallies: list[Tally] = []
    numbers = tuple(int(number) for number in (options.numbers or "").split(",") if number)

    def save() -> None:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps([tally.as_dict() for tally in tallies], indent=1) + "\n")

    for family in families:
        plan = pool.Plan(
            family, settings, len(numbers) or options.cases, options.first,
            options.workers or os.cpu_count() or 1, options.seconds,
            case_seconds=options.case_seconds or (600.0 if options.sanitize else 180.0),
            gpus=gpus, sanitize=options.sanitize, numbers=numbers,
        )  # fmt: skip
        how = " --emulate" if options.emulate else ""
        tally = Tally(plan, f"python -m tests.fuzz {family} --seed {options.seed}{how}", save)
        tallies.append(tally)
        limit = f", at most {options.seconds:.0f} s" if options.seconds else ""
        print(f"{family}: {plan.cases} cases on {plan.workers} processes{limit}", flush=True)
        pool.run(plan, tally)
        tally.summary()
    failed = sum(len(tally.failures) for tally in tallies)
    passed = sum(tally.counts[Status.PASSED] for tally in tallies)
    refused = sum(tally.counts[Status.REFUSED] for tally in tallies)
    print(f"fuzz: {passed} passed, {refused} refused, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
