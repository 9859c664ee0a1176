"""Processes that compile points of `spaces`. One that dies is replaced, and its point reported."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.config.covering import covering
from tests.config.spaces import SPACES, Point, recorded

DRAWS = 400
"""Points drawn at random until one is accepted."""
COMPILES = 150
"""After so many a process is replaced: the compiler keeps memory of each."""
HANGS_AFTER = 180.0
"""Seconds of a task after which its process is ended."""


@dataclass(frozen=True)
class Found:
    """The outcome of a point. `why`: the first line of the error, None where all kernels compiled."""

    space: str
    point: Point
    why: str | None = None
    kernels: int = 0
    seconds: float = 0.0
    spills: int = 0
    """Bytes of stack of the kernel that has most."""

    @property
    def repro(self) -> str:
        """The command line that compiles this point alone."""
        words = json.dumps({"space": self.space, **self.point}, separators=(",", ":"))
        return f"python -m tests.config.all_configs --point '{words}'"


@dataclass(frozen=True)
class Task:
    """`kind`: "compile" a `point`, "draw" one and compile it, or find points that "cover" all pairs; "die" as
    a process does that the compiler ends, for tests."""

    kind: str
    space: str
    seed: int = 0
    point: Point | None = None
    seconds: float = 0.0
    spills: bool = True
    """True if the machine code is looked at."""


_compiled: dict[str, Any] = {}


def compile_point(space: str, point: Point, look: bool = True) -> Found | None:
    """Compile what the point launches; None where the operator refuses it. `look`: for spills."""
    from lowering import inspect
    from lowering.compile import compile_host
    from lowering.errors import CompileError
    from lowering.function import key_of

    calls = recorded(SPACES[space], point)
    if isinstance(calls, str):
        return None
    started, spills = time.perf_counter(), 0
    for call in calls:
        function, arch = call.function, point["arch"]
        key = key_of(function.key_parts(call.args, call.constants, arch))
        if key not in _compiled:
            try:
                made = compile_host(
                    function.target, function.parameters, function.signature(*call.args), call.constants,
                    arch=arch, name=function.name, options=function.options,
                )  # fmt: skip
                found = inspect.resources(made.cubin, made.launches) if look else []
                _compiled[key] = max((x.stack_bytes for x in found), default=0)
            except CompileError as error:
                _compiled[key] = " ".join(str(error).split())[:600]
        if isinstance(_compiled[key], str):
            return Found(space, point, why=_compiled[key], kernels=len(calls))
        spills = max(spills, _compiled[key])
    return Found(space, point, None, len(calls), time.perf_counter() - started, spills)


def draw(space: str, seed: int) -> Point | None:
    """A point at random that the operator accepts; None where it refused all that were drawn."""
    generator = random.Random(f"{space} {seed}")
    for attempt in range(DRAWS):
        point = SPACES[space].draw(generator, {}, common=min(0.8, 0.3 + attempt * 0.01))
        if not isinstance(recorded(SPACES[space], point), str):
            return point
    return None


def work(task: Task) -> Any:
    """The results of a task: a `Found` or None, or points."""
    if task.kind == "die":
        os._exit(1)
    if task.kind == "cover":
        accepts = lambda point: not isinstance(recorded(SPACES[task.space], point), str)  # noqa: E731
        return covering(SPACES[task.space], accepts, task.seed, task.seconds)
    point = draw(task.space, task.seed) if task.kind == "draw" else task.point
    if point is None:
        return None
    return compile_point(task.space, point, task.spills)


def _serve(pipe: Connection) -> None:
    import logging

    import torch

    logging.getLogger("lowering").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ["KERNELS_DSL_CACHE"] = "0"
    while True:
        task = pipe.recv()
        if task is None:
            return
        if task.kind == "draw":  # known to the parent before the compiler can end this process
            task = replace(task, kind="compile", point=draw(task.space, task.seed))
            pipe.send(task)
        pipe.send(work(task))


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.task: Task | None = None
        self.began, self.done = 0.0, 0

    def give(self, task: Task) -> None:
        self.task, self.began = task, time.monotonic()
        self.pipe.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(tasks: Iterable[Task], jobs: int) -> Iterator[tuple[Task, Any]]:
    """Every task with what came of it, as they end. A process that dies, or hangs, makes a `Found`."""
    waiting = iter(tasks)
    idle, busy = [_Worker() for _ in range(jobs)], []
    try:
        while True:
            while idle and (task := next(waiting, None)) is not None:
                worker = idle.pop()
                worker.give(task)
                busy.append(worker)
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in list(busy):
                assert worker.task is not None
                late = time.monotonic() - worker.began > max(HANGS_AFTER, 2 * worker.task.seconds)
                if worker.pipe not in ready and not late:
                    continue
                task, result = worker.task, None
                try:
                    if late:
                        raise EOFError
                    result = worker.pipe.recv()
                except EOFError:
                    what = "does not come to an end" if late else "ends the process"
                    worker.end()
                    busy.remove(worker)
                    idle.append(_Worker())
                    yield task, Found(task.space, task.point or {}, f"the compiler {what}")
                    continue
                if isinstance(result, Task):
                    worker.task = result
                    continue
                busy.remove(worker)
                worker.done += 1
                if worker.done >= COMPILES:
                    worker.end()
                    worker = _Worker()
                idle.append(worker)
                yield task, result
    finally:
        for worker in [*idle, *busy]:
            worker.end()
