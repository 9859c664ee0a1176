"""Compiles what callers can construct and the operators accept: it must compile, and fit the architecture.

    python -m tests.config.all_configs --jobs 16 --limit-seconds 500 --out FILE

First points in which any two values of any two axes meet, then points at random, until the time is up.
`--sample N --seed S` takes N at random instead, and `--point JSON` the one that a failure is printed with.
The spaces are in `spaces`; no GPU is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.config.compile_farm import Found, Task, compile_point, run
from tests.config.spaces import SPACES, recorded

PROGRESS_SECONDS = 10.0
COVER_SHARE = 0.2
"""Of the time, for finding the points that cover all pairs."""


def sample(count: int, seed: int, spaces: Sequence[str] = tuple(SPACES)) -> list[Task]:
    """`count` points at random, of the spaces in turn."""
    return [
        Task("draw", spaces[(seed + i) % len(spaces)], seed=seed * 100_003 + i // len(spaces))
        for i in range(count)
    ]


def _covering_tasks(spaces: Sequence[str], jobs: int, seed: int, seconds: float) -> list[Task]:
    """Points that cover all pairs, those of the spaces in turn."""
    tasks = [Task("cover", space, seed, seconds=seconds) for space in spaces]
    found: dict[str, list[Task]] = {}
    for task, points in run(tasks, min(jobs, len(tasks))):
        found[task.space] = [Task("compile", task.space, point=point) for point in points]
        print(f"{task.space}: {len(points)} points cover the pairs", flush=True)
    turns = itertools.zip_longest(*(found[space] for space in spaces))
    return [task for turn in turns for task in turn if task is not None]


class _Report:
    """Writes the findings so far: to the file at once, to the terminal now and then."""

    def __init__(self, total: int | None, end: float, path: Path | None) -> None:
        self.total, self.end = total, end
        self.began = self.said = time.monotonic()
        self.found: Counter[str] = Counter()
        self.spilling: Counter[str] = Counter()
        self.failed: list[Found] = []
        self.refused = 0
        self.file = path.open("w") if path is not None else None

    def _write(self, line: str) -> None:
        if self.file is not None:
            self.file.write(line + "\n")
            self.file.flush()

    def add(self, found: Found | None) -> None:
        if found is None:
            self.refused += 1
            return
        self.found[found.space] += 1
        if found.why is not None:
            self.failed.append(found)
            line = f"FAILED {found.space}: {found.why}\n    {found.repro}"
            print(line, flush=True)
            self._write(line)
        elif found.spills:
            self.spilling[found.space] += 1
            self._write(f"spills {found.spills} bytes, {found.space}\n    {found.repro}")
        if time.monotonic() - self.said > PROGRESS_SECONDS:
            self.say()

    def say(self) -> None:
        self.said = now = time.monotonic()
        done = self.found.total()
        rate = done / max(1e-9, now - self.began)
        left = self.end - now
        if self.total is not None:
            left = min(left, (self.total - done) / max(rate, 1e-9))
        print(
            f"{done} compiled{'' if self.total is None else f' of {self.total}'}, {len(self.failed)} failed, "
            f"{self.spilling.total()} spill, {rate:.1f} a second, {left:.0f} s to go",
            flush=True,
        )  # fmt: skip

    def close(self) -> int:
        self.say()
        for space in SPACES:
            failed = sum(found.space == space for found in self.failed)
            line = f"{space}: {self.found[space]} compiled, {failed} failed, {self.spilling[space]} spill"
            print(line)
            self._write(line)
        if self.file is not None:
            self.file.close()
        return 1 if self.failed else 0


def _one(words: str) -> int:
    point = json.loads(words)
    space = point.pop("space")
    calls = recorded(SPACES[space], point)
    if isinstance(calls, str):
        print(f"refused: {calls}")
        return 0
    found = compile_point(space, point)
    print(found)
    return 0 if found is not None and found.why is None else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 where an accepted call does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--space", action="append", choices=SPACES, help="these alone")
    parser.add_argument("--point", help="the JSON of a failure")
    parser.add_argument("--count", action="store_true", help="how many points there are")
    options = parser.parse_args(arguments)
    if options.point is not None:
        return _one(options.point)
    spaces = tuple(options.space or SPACES)
    if options.count:
        for space in spaces:
            print(f"{space}: {math.prod(map(len, SPACES[space].axes.values())):.1e} points")
        return 0
    end = time.monotonic() + options.limit_seconds
    tasks: Iterator[Task] = iter(sample(options.sample or 0, options.seed, spaces))
    total = options.sample
    if total is None:
        at_once = min(options.jobs, len(spaces)) / len(spaces)
        seconds = min(120.0, COVER_SHARE * options.limit_seconds * at_once)
        covering = _covering_tasks(spaces, options.jobs, options.seed, seconds)
        further = sample(1_000_000 if math.isfinite(end) else 0, options.seed, spaces)
        tasks, total = itertools.chain(covering, further), None if further else len(covering)
    report = _Report(total, end, options.out)
    in_time = itertools.takewhile(lambda _: time.monotonic() < end, tasks)
    for _, found in run(in_time, options.jobs):
        report.add(found)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
