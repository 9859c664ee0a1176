"""Decoding attention against FlashAttention-3 and PyTorch's: microseconds, and terabytes of cache a second.

    python -m benchmarks.decode                               # a minute, and half of one to compile
    python -m benchmarks.decode --fa3 _vllm_fa3_C.abi3.so     # where vLLM is not installed

One query a sequence, bf16, D 128, caches in pages. All are timed as CUDA graphs, in turns, on caches that
rotate so that keys come from HBM. FlashAttention-3 counts with and without metadata for its scheduler that is
computed ahead. `ours_equal` is ours with `decode_equals_prefill`. The rate is that of the keys and values
which a call must read, once. Caches of fp8 have a table of their own, beside bf16 of the same run and
FlashAttention-3 with fp8 queries.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, machine
from benchmarks.decode_calls import (
    Inputs,
    Problem,
    check,
    check_near,
    flash3,
    flash3_library,
    flash_attn_call,
    flashinfer_call,
    inputs,
    ours,
    sdpa,
)
from benchmarks.harness import OURS, Case, Row
from kernels_dsl.measure import Call, host_us

SIZES = (
    (64, 8192, 32), (1, 131072, 32), (8, 16384, 64), (8, 32768, 32), (32, 4096, 32), (16, 4096, 128),
    (1, 32768, 32), (1, 1024, 32),
)  # fmt: skip
"""Sequences, keys of each, query heads on 8 of keys."""
FP8_SIZES = ((64, 8192, 32), (1, 131072, 32), (8, 32768, 32), (16, 4096, 128), (1, 1024, 32))
"""The same with caches of e4m3 and bf16 queries, which FlashAttention-3 takes with e4m3 queries alone."""
LOGNORMAL = (64, 2048, 1.2, 128, 32768)
"""Sequences, median, sigma, shortest, longest."""
ROOM = 131072
PEERS = ("fa3", "fa3_planned", "sdpa", "ours_equal", "ours_exact")


def problems(page: int) -> Iterator[Problem]:
    """The rows of one page size."""
    for batch, keys, heads in SIZES:
        yield Problem(f"{batch}x{keys}, H {heads}/8, pages of {page}", (keys,) * batch, heads, page=page)
    batch, median, sigma, least, most = LOGNORMAL
    draw = random.Random(0)
    lengths = tuple(
        int(min(max(draw.lognormvariate(math.log(median), sigma), least), most)) for _ in range(batch)
    )
    yield Problem(f"{batch} of {least}–{most}, H 32/8, pages of {page}", lengths, 32, page=page)
    for batch, keys, heads in FP8_SIZES:
        yield Problem(
            f"{batch}x{keys}, H {heads}/8, pages of {page}, fp8 KV",
            (keys,) * batch,
            heads,
            page=page,
            fp8=True,
        )
    yield Problem(f"1x1024 in room for {ROOM}, H 32/8, pages of {page}", (1024,), 32, page=page, room=ROOM)


def case_of(problem: Problem, library: Path | None) -> Case:
    """Ours and the peers; beside a call with much room in its table, ours without. `flops` are bytes."""
    sets = inputs(problem)
    calls: dict[str, Call] = {OURS: ours(sets), "ours_equal": ours(sets, equals_prefill=True)}
    if problem.room:
        exact = -(-max(problem.lengths) // problem.page)
        calls["ours_exact"] = ours([x._replace(table=x.table[:, :exact].contiguous()) for x in sets])
    if library is not None:
        right = partial(check_near if problem.fp8 else check, problem=problem, sets=sets)
        calls |= _right("fa3", partial(flash3, sets, problem, False), right)
        calls |= _right("fa3_planned", partial(flash3, sets, problem, True), right)
    if sets[0].flat is not None:
        calls["sdpa"] = sdpa(sets)
    return Case(
        problem.name, problem.cache_bytes, calls, sets=len(sets), graph=True,
        verify=partial(_check_ours, calls, problem, sets),
    )  # fmt: skip


def _check_ours(calls: dict[str, Call], problem: Problem, sets: Sequence[Inputs]) -> None:
    for name, call in calls.items():
        if name.startswith(OURS):
            check(call, problem, sets)


def _right(name: str, make: Callable[[], Call], right: Callable[[Call], None]) -> dict[str, Call]:
    """A peer's call, if the peer takes the problem and its result is right; else nothing, and says so."""
    try:
        call = make()
        right(call)
    except Exception as error:  # what a peer raises for a problem that it does not take is its own choice
        print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        return {}
    return {name: call}


def numbers(row: Row, problem: Problem) -> dict[str, Any]:
    """A measured row as numbers. `x_best`: the best peer's time divided by ours."""
    found: dict[str, Any] = {"name": row.title, "us": row.ms[OURS] * 1e3}
    found["tb_s"] = problem.cache_bytes / row.ms[OURS] / 1e9
    for peer in PEERS:
        found[f"{peer}_us"] = row.ms[peer] * 1e3 if peer in row.ms else None
    found["x_best"] = None if row.best_peer is None else row.ratio(row.best_peer)
    found["method"] = row.method
    return found


def said(found: dict[str, Any]) -> str:
    """One row for the terminal."""
    peers = [f"{key[:-3]} {value:7.1f}" for key, value in found.items() if key.endswith("_us") and value]
    best = "" if found["x_best"] is None else f"  x{found['x_best']:.3f}"
    return f"{found['name']:>44}  {found['us']:7.1f} us {found['tb_s']:5.2f} TB/s  {'  '.join(peers)}{best}"


def fp8_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of caches of fp8, each beside that of the same problem in bf16."""
    of_name, found = {row["name"]: row for row in rows}, []
    for name, row in of_name.items():
        title = name.removesuffix(", fp8 KV")
        if title != name:
            own, bf16 = row["us"], of_name[title]["us"]
            numbers = {"fp8_us": own, "fp8_tb_s": row["tb_s"], "bf16_us": bf16, "x_bf16": bf16 / own}
            beside = {"fp8_equal_us": row["ours_equal_us"], "fa3_us": row["fa3_us"]}
            beside["fa3_planned_us"] = row["fa3_planned_us"]
            found.append({"name": title, **numbers, **beside, "method": row["method"]})
    return found


def host_rows() -> list[dict[str, Any]]:
    """Host time of eager calls on small problems: of one launch, of two, under the names of other libraries,
    and of a product of PyTorch's."""
    import torch

    one, two = (inputs(Problem("host", (1024,) * batch, 32)) for batch in (1, 8))
    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "1×1024": partial(ours(one), 0), "8×1024": partial(ours(two), 0),
        "1×1024, flash_attn_with_kvcache": flash_attn_call(one[0]),
        "1×1024, FlashInfer's run": flashinfer_call(one[0]), "torch.mm": lambda: torch.mm(a, a),
    }  # fmt: skip
    nothing = dict.fromkeys(("tb_s", *(f"{peer}_us" for peer in PEERS), "x_best"))
    names = list(calls)
    orders = (names, names[::-1], names)
    rounds = [{name: host_us(calls[name], batches=15) for name in order} for order in orders]
    return [
        {"name": f"host time, {name}", "us": min(r[name] for r in rounds), **nothing, "method": "host"}
        for name in calls
    ]


def run(pages: Sequence[int], library: Path | None, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures all rows and prints them as they come."""
    import torch

    if library is not None:
        torch.ops.load_library(str(library))
    rows = host_rows()
    print(*(f"{row['name']}: {row['us']:.1f} us" for row in rows), sep="\n", flush=True)
    for problem in (x for page in pages for x in problems(page)):
        row = harness.run_case(case_of(problem, library), rounds=rounds, seconds=seconds)
        rows.append(numbers(row, problem))
        print(said(rows[-1]) + (f"  ({row.notes})" if row.notes else ""), flush=True)
        torch.cuda.empty_cache()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.decode`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description="Decoding attention against its peers."
    )
    parser.add_argument("--page", type=int, action="append", help="keys of a page (16); may be repeated")
    parser.add_argument("--fa3", type=Path, help="FlashAttention-3's library (default: an installed vLLM's)")
    parser.add_argument("--rounds", type=int, default=10, help="replays of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.05, help="time each row so long (%(default)s)")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for <gpu>/decode*.json")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    facts = machine.header()
    print(*machine.header_lines(facts), sep="\n", flush=True)
    library = flash3_library(args.fa3)
    rows = run(args.page or (16,), library, args.rounds, args.seconds)
    fp8 = fp8_rows(rows)
    names = {f"{row['name']}, fp8 KV" for row in fp8}
    print(f"wrote {harness.write('decode', facts, [r for r in rows if r['name'] not in names], args.out)}")
    print(f"wrote {harness.write('decode_fp8', facts, fp8, args.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
