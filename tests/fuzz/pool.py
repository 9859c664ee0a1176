"""Many cases in several processes. A process that crashes, hangs or loses its GPU costs one case."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.fuzz.case import Outcome, Settings, Status
from tests.fuzz.draw import cases_a_kernel
from tests.fuzz.worker import DONE, STARTED

ROOT = Path(__file__).parents[2]
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no")
_REPORT = "========= "
_NO_REPORT = ("========= COMPUTE-SANITIZER", "========= ERROR SUMMARY: 0 errors")
_TAIL = 3000
STACKS_SECONDS = 5.0
"""Before a case counts as hung, its threads' stacks are written."""


@dataclass(frozen=True)
class Plan:
    """A task: cases `first` to `first + cases` of a family, on `workers` processes.

    seconds: no block of cases starts after so long; 0 for no limit. case_seconds: a case that takes
    longer has hung. gpus: how many the workers are spread over. sanitize: workers run under
    compute-sanitizer. numbers: of the cases, instead of `first` and `cases`.
    """

    family: str
    settings: Settings
    cases: int
    first: int = 0
    workers: int = 2
    seconds: float = 0.0
    case_seconds: float = 180.0
    gpus: int = 0
    sanitize: bool = False
    numbers: tuple[int, ...] = ()


class _Worker:
    """A process of `worker`, started when it is first needed and again after it ended."""

    def __init__(self, plan: Plan, index: int) -> None:
        self.plan = plan
        self.environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        )
        if plan.gpus > 1:
            self.environment["CUDA_VISIBLE_DEVICES"] = str(index % plan.gpus)
        if plan.sanitize:
            self.environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.reader: threading.Thread | None = None
        self.errors: IO[str] | None = None

    def run(self, number: int) -> Outcome:
        """The outcome of one case, whatever becomes of the process."""
        process = self._alive()
        assert process.stdin is not None
        try:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._ended(number, [])
        return self._wait(number)

    def _wait(self, number: int) -> Outcome:
        reports: list[str] = []
        deadline = time.monotonic() + self.plan.case_seconds
        while True:
            try:
                line = self.lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                said = self._said()
                self.close(kill=True)
                detail = f"hung: no result after {self.plan.case_seconds} s\n{''.join(reports)}{said}"
                return Outcome(number, Status.FAILED, detail=detail)
            if line is None:
                return self._ended(number, reports)
            if line.startswith(DONE):
                outcome = Outcome.from_dict(json.loads(line[len(DONE) :]))
                if outcome.fatal:
                    self.close()
                if reports:
                    return Outcome(number, Status.FAILED, outcome.features, "".join(reports) + outcome.detail)
                return outcome
            if _is_report(line):
                reports.append(line)
            elif line.startswith(STARTED):
                deadline = time.monotonic() + self.plan.case_seconds

    def _alive(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            self.close()
            settings = json.dumps(self.plan.settings.as_dict())
            stacks_after = str(max(self.plan.case_seconds - STACKS_SECONDS, self.plan.case_seconds / 2))
            command = [sys.executable, "-m", "tests.fuzz.worker", self.plan.family, settings, stacks_after]
            if self.plan.sanitize:
                command = [*SANITIZER, *command]
            self.errors = tempfile.TemporaryFile("w+")
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True,
            )  # fmt: skip
            self.lines = queue.Queue()
            self.reader = threading.Thread(target=_read, args=(self.process, self.lines), daemon=True)
            self.reader.start()
        return self.process

    def _ended(self, number: int, reports: list[str]) -> Outcome:
        status = self.process.wait() if self.process is not None else None
        said = self._said()
        self.close()
        detail = f"the process ended with status {status}\n{''.join(reports)}{said}"
        return Outcome(number, Status.FAILED, detail=detail)

    def _said(self) -> str:
        """The end of the process' standard error."""
        if self.errors is None:
            return ""
        self.errors.seek(0)
        return self.errors.read()[-_TAIL:]

    def finish(self) -> str:
        """End the process; the sanitizer's reports that no case has."""
        self.close()
        if self.reader is not None:
            self.reader.join(10)
        lines = [self.lines.get_nowait() for _ in range(self.lines.qsize())]
        return "".join(line for line in lines if line is not None and _is_report(line))

    def close(self, kill: bool = False) -> None:
        """End the process; a stuck one by force."""
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            assert process.stdin is not None
            if not kill:
                process.stdin.close()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    kill = True
            if kill:
                os.killpg(process.pid, 9)
                process.wait()
        if self.errors is not None:
            self.errors.close()
            self.errors = None


def _is_report(line: str) -> bool:
    return line.startswith(_REPORT) and not line.startswith(_NO_REPORT)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _blocks(plan: Plan) -> Iterator[list[int]]:
    """The numbers of the cases, those that share a kernel together."""
    numbers = sorted(plan.numbers) or range(plan.first, plan.first + plan.cases)
    step = cases_a_kernel(plan.settings)
    for _, block in itertools.groupby(numbers, lambda number: number // step):
        yield list(block)


def run(plan: Plan, report: Callable[[Outcome], None]) -> None:
    """Run the plan; `report` is called with every outcome, from one thread at a time."""
    waiting: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for block in _blocks(plan):
        waiting.put(block)
    end = time.monotonic() + plan.seconds if plan.seconds else float("inf")
    lock = threading.Lock()

    def serve(index: int) -> None:
        worker, last = _Worker(plan, index), plan.first
        try:
            for number in _taken(waiting, end):
                outcome = worker.run(number)
                with lock:
                    report(outcome)
                last = number
        finally:
            late = worker.finish()
        if late:
            with lock:
                report(Outcome(last, Status.FAILED, detail=f"said after this case or one before it:\n{late}"))

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(plan.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _taken(waiting: queue.SimpleQueue[list[int]], end: float) -> Iterable[int]:
    """Numbers of one block after the other, until none is left or the time is up. Blocks that were begun are
    finished, so that what a run did is known by its first case and their count."""
    while time.monotonic() < end:
        try:
            yield from waiting.get_nowait()
        except queue.Empty:
            return
