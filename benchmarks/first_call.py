"""Time of the first call in a new process: cold (compiles) and warm (the kernel is on disk).

`python -m benchmarks.first_call --out FILE` times every public name, warm, each in processes of its own: from
`import kernels_dsl` to the result, after `import torch`. Without a GPU, up to the launch.

Each measurement is a process of its own. The CUDA context and torch's own start-up are brought up first, so
that what is left is this project's share: the import of `kernels_dsl` and the first `gemm`, GPU included.

All modules have their byte code, as pip leaves them, this project's too, whatever PYTHONDONTWRITEBYTECODE
says; for public names it is in a folder of its own, so that source folders may be read-only. Without it, each
process compiles each module that it imports: 50 ms for `gemm`, and two seconds where the DSL is imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.harness import DTYPES

_CHILD = """
import json, sys, time
import torch
kind = getattr(torch, sys.argv[1])
a, b = (torch.randn(1024, 1024, device="cuda", dtype=kind) for _ in range(2))
out = torch.empty(1024, 1024, device="cuda", dtype=kind)
torch.mm(a, b, out=out)
torch.cuda.synchronize()
start = time.perf_counter()
import kernels_dsl
kernels_dsl.gemm
imported = time.perf_counter()
kernels_dsl.gemm(a, b, out=out)
torch.cuda.synchronize()
first = time.perf_counter()
kernels_dsl.gemm(a, b, out=out)
torch.cuda.synchronize()
second = time.perf_counter()
print(json.dumps({
    "import_ms": (imported - start) * 1e3,
    "first_ms": (first - imported) * 1e3,
    "second_ms": (second - first) * 1e3,
    "compiler_imported": "cutlass" in sys.modules,
}))
"""
CORES = len(os.sched_getaffinity(0))
START_SECONDS = 6.0  # of a core, until a process has torch and the GPU,
GPU_SECONDS = 1.0  # for which processes wait in turn
PROCESS_BYTES = 1 << 30  # of memory that it takes
WARM_RUNS = 3
WARM_LIMIT_MS = 50.0
REPEATS = 10
PACKAGES = ("cutlass", "kernels_dsl", "lowering", "benchmarks", "tvm_ffi", "cuda")
# What no first use should wait for: the compilers of PyTorch and of the DSL, and what they import.
NOT_NEEDED = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy", "networkx", "cutlass")


def compile_packages() -> None:
    """Byte code of PACKAGES in place, which pip writes when it installs them. Quick where it is there."""
    folders: list[str] = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        folders += list(spec.submodule_search_locations or ()) if spec else []
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", *folders], check=False)


def with_bytecode(folder: Path) -> dict[str, str]:
    """The environment of processes that keep all modules' byte code in a folder."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def child(dtype: str, cache: str, refuse_compile: bool = False) -> dict[str, Any]:
    """Run one process with the cache folder `cache`; times in milliseconds. RuntimeError where it fails."""
    environment = {**os.environ, "KERNELS_DSL_CACHE_DIR": cache}
    if refuse_compile:
        environment["KERNELS_DSL_NO_COMPILE"] = "1"
    command = [sys.executable, "-c", _CHILD, DTYPES[dtype]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the first-call process failed:\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(dtype: str) -> list[dict[str, Any]]:
    """One cold process in an empty cache, then WARM_RUNS warm ones that may not compile."""
    compile_packages()
    with tempfile.TemporaryDirectory() as cache:
        rows = [{"name": "cold", **child(dtype, cache)}]
        for i in range(WARM_RUNS):
            rows.append({"name": f"warm {i + 1}", **child(dtype, cache, refuse_compile=True)})
    return rows


def line(row: dict[str, Any]) -> str:
    """One process for the terminal."""
    compiler = "compiler imported" if row["compiler_imported"] else "no compiler imported"
    return (
        f"{row['name']:>8}  import {row['import_ms']:7.1f} ms  first call {row['first_ms']:7.1f} ms  "
        f"second {row['second_ms']:6.2f} ms  {compiler}"
    )


def _command(name: str, *options: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "benchmarks.public_calls", name, *options]


def _environment(folder: Path) -> dict[str, str]:
    """The environment of processes with kernels and byte code in a folder."""
    return {**with_bytecode(folder / "bytecode"), "KERNELS_DSL_CACHE_DIR": str(folder / "kernels")}


def _failed(name: str, said: str) -> RuntimeError:
    return RuntimeError(f"the first use of {name} failed:\n{said.strip()[-2000:]}")


def fill(name: str, folder: Path) -> None:
    """Use a public name in a process that may compile. RuntimeError where it fails."""
    done = subprocess.run(
        _command(name), capture_output=True, text=True, env=_environment(folder), check=False
    )
    if done.returncode:
        raise _failed(name, done.stderr)


def in_turns(names: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """The first use of each, in new processes: forked ones would copy pages meanwhile.

    They start side by side. Once torch and the GPU are there in all, each measures while the others wait.
    RuntimeError where one fails.
    """
    environment = {**_environment(folder), "KERNELS_DSL_NO_COMPILE": "1"}
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in names]
        children = [
            stack.enter_context(
                subprocess.Popen(
                    _command(name, "--turns"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=error,
                    text=True, env=environment,
                )
            )
            for name, error in zip(names, errors)
        ]  # fmt: skip

        def said(at: int) -> str:
            stdout = children[at].stdout
            found = stdout.readline() if stdout is not None else ""
            if not found:
                errors[at].seek(0)
                raise _failed(names[at], errors[at].read())
            return found

        for at in range(len(names)):
            said(at)  # that it is ready
        made = []
        for at, child in enumerate(children):
            if child.stdin is not None:
                child.stdin.write("go\n")
                child.stdin.flush()
            made.append(json.loads(said(at)))
        return made


def first_use_row(name: str, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the processes of one name, in milliseconds; the longest one; what was imported."""
    times = ("import_ms", "call_ms", "total_ms", "cpu_ms")
    row = {time: statistics.median(sample[time] for sample in samples) for time in times}
    modules = samples[-1]["modules"]
    unwanted = [part for part in NOT_NEEDED if any(f"{m}.".startswith(f"{part}.") for m in modules)]
    longest = max(sample["total_ms"] for sample in samples)
    return {"name": name, **row, "longest_ms": longest, "modules": len(modules), "unwanted": unwanted}


def together() -> int:
    """Processes that start at a time: three a core, which wait for each other's files, as memory allows."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(3 * CORES, free // PROCESS_BYTES))


def first_uses(
    names: Sequence[str], repeats: int, jobs: int, keep: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Make kernels and byte code of public names, then give each name `repeats` processes, `jobs` at a time.

    `keep` gets the rows of all that is measured after each batch of processes.
    """
    queue = [*names] * repeats
    batches = [queue[at : at + jobs] for at in range(0, len(queue), jobs)]
    seconds = len(queue) * max(GPU_SECONDS, START_SECONDS / min(jobs, CORES))
    print(
        f"{len(queue)} processes, {len(batches)} batches of {jobs} at most: about {seconds:.0f} s once all "
        f"kernels of {len(names)} names are compiled",
        flush=True,
    )
    made: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = time.monotonic()
        with ThreadPoolExecutor(min(jobs, CORES)) as pool:
            list(pool.map(lambda name: fill(name, folder), names))
        print(f"kernels: {time.monotonic() - start:.0f} s", flush=True)
        for number, batch in enumerate(batches, 1):
            start = time.monotonic()
            made += in_turns(batch, folder)
            print(f"batch {number} of {len(batches)}: {time.monotonic() - start:.0f} s", flush=True)
            uses = {name: [use for use in made if use["name"] == name] for name in names}
            keep([first_use_row(name, samples) for name, samples in uses.items() if samples])


def first_use_line(row: dict[str, Any]) -> str:
    """One name for the terminal."""
    over = "" if row["total_ms"] <= WARM_LIMIT_MS else f"  over {WARM_LIMIT_MS:.0f} ms"
    return (
        f"{row['name']:<32} import {row['import_ms']:6.1f}  call {row['call_ms']:6.1f}  "
        f"both {row['total_ms']:6.1f} ms (longest {row['longest_ms']:.1f}, of the CPU {row['cpu_ms']:.1f})  "
        f"{row['modules']} modules{over}  {' '.join(row['unwanted'])}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.first_call`; 1 where a median is above WARM_LIMIT_MS."""
    from benchmarks import public_calls

    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_call", description=__doc__)
    parser.add_argument("--out", type=Path, help="the rows as JSON")
    parser.add_argument("--names", nargs="+", default=list(public_calls.CALLS), help="public names; all")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="processes for each name")
    parser.add_argument("--jobs", type=int, default=together(), help="started at a time; one measures")
    given = parser.parse_args(argv)
    for name in given.names:
        if name not in public_calls.CALLS:
            parser.error(f"--names has {name!r}, must be of: {', '.join(public_calls.CALLS)}")
    rows: list[dict[str, Any]] = []
    facts = machine.header() if public_calls.has_gpu() else {"gpu": "none: up to the launch"}

    def keep(found: list[dict[str, Any]]) -> None:
        rows[:] = found
        if given.out is not None:
            stored = {"suite": "first_use", "header": facts, "rows": rows}
            given.out.write_text(json.dumps(stored, indent=1) + "\n")

    first_uses(given.names, given.repeats, given.jobs, keep)
    print("warm first use of each public name, with byte code, in ms after `import torch`: ", end="")
    print(f"medians of {given.repeats}")
    for row in rows:
        print(first_use_line(row))
    return int(any(row["total_ms"] > WARM_LIMIT_MS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
