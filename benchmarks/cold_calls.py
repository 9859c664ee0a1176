"""Time of a cold first call, from `import kernels_dsl` to the result: nothing is in the cache.

`python -m benchmarks.cold_calls --out FILE` times some calls on a GPU, each in processes of its own with an
empty cache: with the compiler alone (`compiled`), then with bundles of what was compiled, as a wheel carries
one (`precompiled`). Processes are forks of one that has torch; they get their operands side by side, and take
turns for what is timed. Results are checked afterwards.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.fx.experimental.symbolic_shapes  # with sympy, which the first gradient in a process waits for
import torch.nn.functional as F

STATES = ("compiled", "precompiled")
BYTE_CODE = "from benchmarks.first_call import compile_packages; compile_packages()"
"""In a process of its own: nothing of this project may be imported where the forks come from."""
_N, _BLOCK, _PAGE = 1024, 64, 16
Outputs = Sequence[torch.Tensor]
Pair = tuple[Callable[[Any], Outputs], Callable[[], Outputs]]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _gemm() -> Pair:
    a, b = _random(_N, _N), _random(_N, _N)
    return lambda library: [library.gemm(a, b)], lambda: [a @ b]


def _scaled_gemm() -> Pair:
    a, b = (_random(_N, _N).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return lambda library: [library.scaled_gemm(a, b.mT, one, one)], lambda: [a.bfloat16() @ b.bfloat16().mT]


def _bsr_gemm() -> Pair:
    rows = _N // _BLOCK
    first = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    across, values, x = first[:-1].clone(), _random(rows, _BLOCK, _BLOCK), _random(_N, _N)

    def call(library: Any) -> Outputs:
        return [library.bsr_gemm(library.BsrTensor(first, across, values, (_N, _N)), x)]

    return call, lambda: [torch.block_diag(*values) @ x]


def _attention(causal: bool, gradients: bool = False) -> Pair:
    q, k, v = (_random(1, 4096, 16, 128).requires_grad_(gradients) for _ in range(3))

    def outputs(o: torch.Tensor) -> Outputs:
        return [o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))] if gradients else [o]

    def reference() -> Outputs:
        a, b, c = (x.transpose(1, 2) for x in (q, k, v))
        return outputs(F.scaled_dot_product_attention(a, b, c, is_causal=causal).transpose(1, 2))

    return lambda library: outputs(library.attention(q, k, v, causal=causal)), reference


def _decode() -> Pair:
    batch, keys, q_heads, heads, dim = 16, 4096, 32, 8, 128
    pages = batch * keys // _PAGE
    q = _random(batch, 1, q_heads, dim)
    k, v = (_random(pages, _PAGE, heads, dim) for _ in range(2))
    table = torch.arange(pages, device="cuda", dtype=torch.int32).view(batch, -1)
    used = torch.full((batch,), keys, device="cuda", dtype=torch.int32)

    def reference() -> Outputs:
        a, b = (x.view(batch, keys, heads, dim).transpose(1, 2) for x in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), a, b, enable_gqa=True)
        return [o.transpose(1, 2)]

    return lambda library: [library.attention_decode(q, k, v, block_table=table, seqused_k=used)], reference


CASES: dict[str, Callable[[], Pair]] = {
    "gemm": _gemm,
    "attention": lambda: _attention(False),
    "attention causal": lambda: _attention(True),
    "attention causal, backward": lambda: _attention(True, gradients=True),
    "scaled_gemm": _scaled_gemm,
    "bsr_gemm": _bsr_gemm,
    "attention_decode": _decode,
}
"""Names of rows -> what makes operands, and with them the call and its reference."""


class Worker(NamedTuple):
    """A process that waits for its turn."""

    name: str
    state: str
    process: Any
    ours: Connection


def start(name: str, state: str, folder: str) -> Worker:
    """Fork a process for one measurement, whose cache is an empty folder in `folder`; bundles lie there."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    cache = tempfile.mkdtemp(dir=folder)
    process = context.Process(target=_answer, args=(theirs, name, state, cache, folder), daemon=True)
    process.start()
    return Worker(name, state, process, ours)


def _answer(theirs: Connection, name: str, state: str, cache: str, folder: str) -> None:
    os.environ["KERNELS_DSL_CACHE_DIR"] = cache
    os.environ["KERNELS_DSL_BUNDLES"] = folder
    try:
        call, reference = CASES[name]()
        _begin()
        theirs.send(None)
        theirs.recv()
        found = _timed(call, reference, state)
        if state == "compiled":
            from lowering import bundle

            bundle.export(Path(folder, f"{name}.zip"))
        theirs.send(found)
    except BaseException as error:  # it goes to the process that waits for an answer
        with suppress(OSError):
            theirs.send({"error": f"{type(error).__name__}: {error}"})


def _begin() -> None:
    """Torch's own first steps, which are not to be timed: a product and a gradient."""
    a = _random(64, 64).requires_grad_()
    torch.autograd.grad(torch.mm(a, a), a, _random(64, 64))
    torch.cuda.synchronize()


def _timed(call: Callable[[Any], Outputs], reference: Callable[[], Outputs], state: str) -> dict[str, Any]:
    start_s, cpu = time.perf_counter(), time.process_time()
    import kernels_dsl
    from lowering import cache, shipped

    imported = time.perf_counter()
    if state == "compiled":
        shipped.paths = lambda: ()
    made = call(kernels_dsl)
    torch.cuda.synchronize()
    end, cpu_end = time.perf_counter(), time.process_time()
    counts = cache.stats()
    return {
        "import_s": imported - start_s,
        "total_s": end - start_s,
        "cpu_s": cpu_end - cpu,
        "compiles": counts["compiles"],
        "kernels": counts["stores"],
        "error_of_largest": max(
            float((x.float() - y.float()).abs().max() / y.float().abs().max())
            for x, y in zip(made, reference(), strict=True)
        ),
    }


def measured(worker: Worker) -> dict[str, Any]:
    """Let a process that is ready have its turn. RuntimeError where it fails."""
    worker.ours.send(None)
    found: dict[str, Any] = worker.ours.recv()
    worker.process.join(10)
    if "error" in found:
        raise RuntimeError(f"{worker.name}, {worker.state}: {found['error']}")
    return {"name": worker.name, "state": worker.state, **found}


def wait(workers: Sequence[Worker]) -> None:
    """Until all of them have their operands. RuntimeError where one fails."""
    for worker in workers:
        if (said := worker.ours.recv()) is not None:
            raise RuntimeError(f"{worker.name}, {worker.state}: {said['error']}")


def samples(names: Sequence[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Each call `repeats` times in each state, round after round."""
    with tempfile.TemporaryDirectory() as folder:
        for state in STATES:
            workers = [start(name, state, folder) for _ in range(repeats) for name in names]
            try:
                wait(workers)
                yield from map(measured, workers)
            finally:
                for worker in workers:
                    worker.process.kill()


def rows(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Least and median of each call in each state, in the order in which they were measured first."""
    made = []
    for name, state in dict.fromkeys((x["name"], x["state"]) for x in found):
        own = [x for x in found if (x["name"], x["state"]) == (name, state)]
        totals = [x["total_s"] for x in own]
        made.append({
            "name": name, "state": state, "repeats": len(own), "least_s": min(totals),
            "median_s": statistics.median(totals),
            **{key: statistics.median(x[key] for x in own) for key in ("import_s", "cpu_s")},
            **{key: max(x[key] for x in own) for key in ("compiles", "kernels", "error_of_largest")},
        })  # fmt: skip
    return made


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    return (
        f"{row['name']:<28} {row['state']:<12} least {row['least_s']:6.2f} s  median {row['median_s']:6.2f}  "
        f"(of a core {row['cpu_s']:.2f}, import {row['import_s']:.3f})  {row['repeats']} runs, "
        f"{row['compiles']} of {row['kernels']} kernels compiled, error {row['error_of_largest']:.0e}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.cold_calls`; 1 where a precompiled kernel was compiled."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_calls", description=__doc__)
    parser.add_argument("--out", type=Path, help="the rows as JSON")
    parser.add_argument("--names", nargs="+", choices=CASES, default=list(CASES), help="calls; all")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each call and state")
    given = parser.parse_args(argv)
    subprocess.run([sys.executable, "-c", BYTE_CODE], check=True)
    found = []
    for sample in samples(given.names, given.repeats):
        found.append(sample)
        print(f"{sample['name']}, {sample['state']}: {sample['total_s']:.2f} s", flush=True)
    made = rows(found)
    print("\n".join(map(line, made)))
    if given.out is not None:
        from benchmarks import machine

        stored = {"suite": "cold_calls", "header": machine.header(), "rows": made}
        given.out.write_text(json.dumps(stored, indent=1) + "\n")
    return int(any(row["compiles"] for row in made if row["state"] == "precompiled"))


if __name__ == "__main__":
    sys.exit(main())
