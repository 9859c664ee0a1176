"""Products of few rows, as a served model multiplies, against cuBLAS and cuBLASLt.

    python -m benchmarks.gemm_small                                    # all rows; two minutes
    python -m benchmarks.gemm_small --kind bf16 --rows 1,16,64         # some
    python -m benchmarks.gemm_small --sweep --seconds 120              # other configurations too

Layers of Llama-3, Qwen-3 and DeepSeek-V3, weights (N, K) in memory. All calls of a row are timed as CUDA
graphs, in turns, and weights rotate, so that they come from HBM. A peer counts with the best of its ways. The
rate is that of the bytes that must move, and the share is of the rate at which a reduction reads, measured
before. One line of JSON a row, as it comes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, machine
from benchmarks.gemm_small_calls import (
    KINDS,
    Operands,
    Problem,
    check,
    exact,
    operands,
    our_call,
    peer_calls,
    pools,
)
from benchmarks.gemm_small_sweep import Compiling, configurations, fitting
from benchmarks.harness import OURS, Case, Row
from kernels_dsl.config.gemm import Sm90GemmConfig

ROWS = (1, 2, 4, 7, 8, 16, 33, 64, 100, 129, 200, 256)
SWEPT_ROWS = (1, 16, 33, 64, 100, 128, 129, 200, 256)
LAYERS = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen-3": ((12288, 4096), (4096, 12288), (5120, 8192), (51200, 5120), (5120, 25600)),
    "deepseek-v3": ((2112, 7168), (24576, 1536), (7168, 16384), (7168, 2048), (4096, 7168), (7168, 18432)),
}
"""(N, K) of a model's linear layers; those that stand in two models once."""
SWEPT_LAYERS = (
    (4096, 14336),
    (28672, 4096),
    (24576, 1536),
    (7168, 2048),
    (4096, 4096),
    (7168, 18432),
    (12288, 4096),
)
KNOWN = (
    Problem("bf16", 129, 4096, 14336),
    Problem("bf16", 33, 14336, 4096),
    Problem("bf16", 7, 12288, 4096),
    Problem("tensor", 16, 24576, 1536),
    Problem("tensor", 128, 7168, 2048),
    Problem("tensor-fast", 16, 24576, 1536),
    Problem("tensor-fast", 128, 7168, 2048),
)
"""Rows that were behind when this was written: they come first."""


def problems(kinds: Sequence[str], rows: Sequence[int], layers: Sequence[tuple[int, int]]) -> list[Problem]:
    """All rows of a table, the known ones among its kinds first, fast sums last."""
    found = [known for known in KNOWN if known.kind in kinds]
    rest = [Problem(kind, m, n, k) for n, k in layers for kind in kinds for m in rows]
    return list(dict.fromkeys(found + sorted(rest, key=lambda problem: problem.fast)))


def read_rate(pool: Any) -> float:
    """Bytes a second at which PyTorch's reduction reads a GiB."""
    import torch

    values = pool.view(torch.int32)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for event in events:
        event.record()
        values.amax()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return float(values.nbytes / statistics.median(times[2:]) * 1e3)


def case_of(problem: Problem, sets: Sequence[Operands], configs: Sequence[Sm90GemmConfig]) -> Case:
    """Ours and the peers; of a sweep, ours with each of `configs` too."""
    import torch

    out, theirs = (torch.empty(problem.m, problem.n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    calls = {OURS: our_call(problem, sets, out)}
    right = exact(problem, sets[0])
    verify = partial(check, out=out, right=right, fast=problem.fast)
    wrong = []
    for config in configs:
        call = our_call(problem, sets, out, config)
        try:
            verify(call)
        except Exception as reason:  # it is named in the row, and the others are measured
            wrong.append(f"{config.label}: {type(reason).__name__}: {reason}")
            continue
        calls[f"{OURS}_{config.label}"] = call
    calls |= peer_calls(problem, sets, theirs)
    return Case(
        problem.name, 2.0 * problem.m * problem.n * problem.k, calls, sets=len(sets), graph=True,
        verify=lambda: verify(calls[OURS]), notes="; ".join(wrong),
    )  # fmt: skip


def chosen(problem: Problem, one: Operands) -> str:
    """The table's configuration, in words."""
    from kernels_dsl.ops.gemm import gemm
    from kernels_dsl.ops.scaled import scaled_gemm

    if problem.kind == "bf16":
        plan = gemm.plan_for(*one.arguments)
    else:
        plan = scaled_gemm.plan_for(*one.arguments, use_fast_accum=problem.fast)
    return "" if plan.decision is None else plan.decision.config.label


def record(problem: Problem, row: Row, rate: float, table: str) -> dict[str, Any]:
    """One line of the output: microseconds, rate, ratio to the best peer, the fastest of a sweep."""
    us = {name: round(ms * 1e3, 3) for name, ms in row.ms.items()}
    found: dict[str, Any] = {**problem._asdict(), "us": us[OURS], "table": table}
    if row.best_peer is not None:
        found |= {"ratio": round(row.ratio(row.best_peer), 4), "peer": us[row.best_peer]}
        found["by"] = " ".join([row.best_peer, row.chosen.get(row.best_peer, "")]).strip()
    found["TB/s"] = round(problem.traffic / us[OURS] / 1e6, 3)
    found["share"] = round(problem.traffic / us[OURS] * 1e6 / rate, 3)
    swept = {name.removeprefix(f"{OURS}_"): time for name, time in us.items() if name.startswith(f"{OURS}_")}
    if swept:
        best = min(swept, key=swept.__getitem__)
        found |= {"best": best, "best_us": swept[best], "sweep": swept}
    if row.notes:
        found["notes"] = row.notes
    return found


def measured(
    found: Sequence[Problem],
    configs: dict[Problem, list[Sm90GemmConfig]],
    compiling: Compiling,
    rounds: int,
    deadline: float,
) -> Iterator[tuple[Problem, Row, dict[str, Any]]]:
    """The rows one by one, until `deadline`; one that fails is printed and left out."""
    import torch

    pool = pools()
    rate = read_rate(pool[False])
    print(json.dumps({"read TB/s": round(rate / 1e12, 3)}), flush=True)
    for problem in found:
        if time.monotonic() > deadline:
            print(json.dumps({"stopped before": problem.name}), flush=True)
            return
        try:
            for text in compiling.wait(problem):
                print(json.dumps({"failed": text}), flush=True)
            sets = operands(problem, pool[problem.kind != "bf16"])
            row = harness.run_case(case_of(problem, sets, configs.get(problem, [])), rounds=rounds)
        except Exception as reason:  # the rows behind it are worth having
            print(
                json.dumps({**problem._asdict(), "failed": f"{type(reason).__name__}: {reason}"}), flush=True
            )
            continue
        yield problem, row, record(problem, row, rate, chosen(problem, sets[0]))
        torch.cuda.empty_cache()


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The geometric mean and the least ratio to the best peer, by kind."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["kind"] == kind and "ratio" in row]
        if not ratios:
            continue
        below = sum(ratio < 0.97 for ratio in ratios)
        lines.append(
            f"{kind}: geometric mean x{harness.geomean(ratios):.3f} over {len(ratios)}, "
            f"worst x{min(ratios):.3f}, {below} below 0.97"
        )
    return lines


def numbers(text: str) -> tuple[int, ...]:
    """The integers of a list with commas."""
    return tuple(int(part) for part in text.split(","))


def layer(text: str) -> tuple[int, int]:
    """(N, K) of "NxK"."""
    n, k = text.split("x")
    return int(n), int(k)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.gemm_small`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gemm_small", description=__doc__)
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated")
    parser.add_argument("--rows", type=numbers, help="M, comma-separated")
    parser.add_argument("--layer", type=layer, action="append", help="NxK, may be repeated; default: all")
    parser.add_argument("--sweep", action="store_true", help="other configurations too, fewer rows")
    parser.add_argument("--known", action="store_true", help="only rows that were behind")
    parser.add_argument("--rounds", type=int, default=7, help="timed graphs a call (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after as many")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the JSON file")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, must be at least 1")
    deadline = time.monotonic() + args.seconds
    kinds = args.kind or list(KINDS[:4])
    every = SWEPT_LAYERS if args.sweep else tuple(shape for layers in LAYERS.values() for shape in layers)
    found = problems(kinds, args.rows or (SWEPT_ROWS if args.sweep else ROWS), args.layer or every)
    if args.known:
        found = [problem for problem in found if problem in KNOWN]
    configs = {problem: fitting(problem, configurations(problem)) for problem in found} if args.sweep else {}
    wanted = [(problem, config) for problem in found for config in (None, *configs.get(problem, ()))]
    compiling = Compiling(wanted)
    print(compiling.words, flush=True)
    facts = machine.header()
    for text in machine.header_lines(facts):
        print(text, flush=True)
    rows = []
    for _problem, _row, line in measured(found, configs, compiling, args.rounds, deadline):
        rows.append(line)
        print(json.dumps(line, ensure_ascii=False), flush=True)
    compiling.stop()
    for text in summary(rows):
        print(text, flush=True)
    if rows:
        suite = "gemm_small_sweep" if args.sweep else "gemm_small"
        print(f"wrote {harness.write(suite, facts, rows, args.results)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
