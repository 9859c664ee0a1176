"""Process of `benchmarks.revisions` that times the cases of one version of the project.

Run by its path, not as a module, so that an older version needs no such file: PYTHONPATH names the version
whose `benchmarks` and `kernels_dsl` are imported. It answers each line of its input with one of JSON: `next`
makes the next case and answers its name (null after the last), `time` answers milliseconds of one call.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 10
"""Timed calls of one turn."""


def on_gpu(case: Any) -> float:
    from kernels_dsl.measure import interleaved

    timing = interleaved({"ours": case.calls["ours"]}, sets=case.sets, rounds=ROUNDS, graph=case.graph)
    return float(timing["ours"].ms)


def on_host(case: Any) -> float:
    """For tests of the method: the time that the call takes on the host."""
    samples = []
    for index in range(ROUNDS):
        start = time.perf_counter()
        case.calls["ours"](index % case.sets)
        samples.append(time.perf_counter() - start)
    return sorted(samples)[ROUNDS // 2] * 1e3


def main() -> None:
    module, expression, clock = sys.argv[1:]
    measure: Callable[[Any], float] = {"gpu": on_gpu, "host": on_host}[clock]
    answers, sys.stdout = sys.stdout, sys.stderr  # what a case prints is no answer
    cases = iter(eval(expression, vars(importlib.import_module(module))))
    case = None
    for line in sys.stdin:
        if line.strip() == "next":
            case = next(cases, None)
            answer: Any = None if case is None else case.name
            if case is not None:
                case.calls["ours"](0)
        else:
            answer = measure(case)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, which may be of another version
    main()
