"""`compile`: fill the cache for an architecture ahead of time. Needs no GPU."""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from kernels_dsl.cli import kernels
from kernels_dsl.cli.errors import CheckFailed, UsageError


def add_command(commands: Any) -> None:
    """Add `compile` to the parser."""
    parser = commands.add_parser(
        "compile", help="fill the cache for an arch, no GPU needed", description=__doc__
    )
    parser.add_argument(
        "--arch", required=True, help="sm_90a (Hopper), sm_89 (L4, L40S, RTX 4090), sm_80, ..."
    )
    parser.add_argument("--op", action="append", choices=kernels.OPS, help="may be repeated; default: all")
    parser.add_argument("--name", default="", help="only kernels whose name contains this")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes (%(default)s)"
    )
    parser.add_argument("--bundle", type=Path, help="also write the kernels to this file, to carry elsewhere")
    parser.add_argument("--sign", type=Path, help="an SSH key to sign the bundle with; needs ssh-keygen")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a kernel spills registers")
    parser.add_argument("--list", action="store_true", help="name the kernels, compile nothing")
    parser.set_defaults(run=run)


def compile_one(arch: str, ops: tuple[str, ...], name: str, index: int) -> dict[str, Any]:
    """Compile kernel `index` of the list that the arguments choose: its name, key, source, seconds, spills.

    Runs in a worker process, so arguments and result are plain data; an error comes back as text.
    """
    kernel = kernels.shipped(arch, ops, name)[index]
    start = time.perf_counter()
    try:
        compiled = kernel.compile(arch)
        result = {"key": compiled.key, "source": compiled.source, "spills": kernels.spilling(compiled)}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    return {"name": kernel.name, "seconds": time.perf_counter() - start, **result}


def _results(arch: str, ops: tuple[str, ...], name: str, count: int, jobs: int) -> Any:
    """The results as they come. Processes, not threads: the compiler is not thread-safe."""
    if jobs == 1 or count == 1:
        yield from (compile_one(arch, ops, name, index) for index in range(count))
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, count), mp_context=context) as pool:
        futures = [pool.submit(compile_one, arch, ops, name, index) for index in range(count)]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()


def progress_line(done: int, count: int, result: dict[str, Any]) -> str:
    """ "[ 3/24] gemm_sm90 ...  compiled in 1.2 s"."""
    words = {"compiled": "compiled", "disk": "was in the cache", "memory": "was in memory"}
    outcome = f"FAILED: {result['error']}" if "error" in result else words[result["source"]]
    spills = "  SPILLS" if result.get("spills") else ""
    width = len(str(count))
    return f"[{done:{width}}/{count}] {result['name']}  {outcome} ({result['seconds']:.1f} s){spills}"


def run(args: argparse.Namespace) -> int:
    """Compile, print progress, write the bundle. CheckFailed where a kernel could not be built."""
    from lowering import cache

    if args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}, must be at least 1")
    if args.sign is not None and args.bundle is None:
        raise UsageError("--sign is for the file that --bundle writes: name one")
    ops = tuple(args.op or kernels.OPS)
    chosen = kernels.shipped(args.arch, ops, args.name)
    if args.list:
        print("\n".join(kernel.name for kernel in chosen))
        return 0
    if not cache.enabled():
        raise UsageError("the kernel cache is switched off (KERNELS_DSL_CACHE=0): there is nothing to fill")
    print(f"{len(chosen)} kernels for {args.arch}, {args.jobs} processes, cache {cache.dir()}")
    start = time.perf_counter()
    results = []
    for result in _results(args.arch, ops, args.name, len(chosen), args.jobs):
        results.append(result)
        print(progress_line(len(results), len(chosen), result), flush=True)
    seconds = time.perf_counter() - start
    failed = [result["name"] for result in results if "error" in result]
    fresh = sum(result.get("source") == "compiled" for result in results)
    there = len(results) - fresh - len(failed)
    print(f"{fresh} compiled, {there} already there, {len(failed)} failed, {seconds:.1f} s")
    if args.bundle is not None and not failed:
        write_bundle(args.bundle, [result["key"] for result in results], args.sign)
    if failed:
        raise CheckFailed(f"{len(failed)} kernels could not be built: {', '.join(failed)}")
    spilling = [result["name"] for result in results if result["spills"]]
    if args.check and spilling:
        raise CheckFailed(f"{len(spilling)} kernels spill registers: {', '.join(spilling)}")
    return 0


def write_bundle(path: Path, keys: list[str], sign: Path | None) -> None:
    """Export the kernels with these keys to `path`, signed with the key file `sign`; say how large it is."""
    from lowering import bundle

    bundle.export(path, keys, sign=sign)
    print(f"wrote {path}: {len(keys)} kernels, {path.stat().st_size / 2**20:.1f} MiB")
