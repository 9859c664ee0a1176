"""`compile`: fill the cache for an architecture ahead of time. Needs no GPU."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernels_dsl.cli import kernels
from kernels_dsl.cli.errors import CheckFailed, UsageError

SECONDS_EACH, BYTES_EACH = 2.5, 120_000
"""Mean of a compile on one core of a server, and of an entry of the cache."""


def _jobs() -> int:
    """One process a core that this process may use, at most 16: each takes half a GiB."""
    return min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


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
    lists = parser.add_mutually_exclusive_group()
    lists.add_argument("--common", action="store_true", help="only what common calls launch")
    lists.add_argument("--core", action="store_true", help="only what a released wheel carries")
    parser.add_argument("--jobs", type=int, default=_jobs(), help="processes (%(default)s)")
    parser.add_argument("--bundle", type=Path, help="also write the kernels to this file, to carry elsewhere")
    parser.add_argument("--sign", type=Path, help="an SSH key to sign the bundle with; needs ssh-keygen")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a kernel spills registers")
    parser.add_argument("--list", action="store_true", help="name the kernels, compile nothing")
    parser.set_defaults(run=run)


class Selection(NamedTuple):
    """The kernels that the command line chooses. Plain data, since worker processes make the list again."""

    arch: str
    ops: tuple[str, ...]
    name: str
    listing: str  # a key of `kernels.LISTS`

    def kernels(self) -> list[kernels.Shipped]:
        """The list, in the same order in each process."""
        return kernels.shipped(self.arch, self.ops, self.name, self.listing)


_listed: list[kernels.Shipped] = []  # of a worker process


@contextlib.contextmanager
def _log_level(level: int) -> Iterator[None]:
    """Set the level of what `lowering` logs; progress lines say what is compiled already."""
    log = logging.getLogger("lowering")
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def _list(selection: Selection) -> None:
    import torch

    torch.set_num_threads(1)  # there are as many processes as cores
    logging.getLogger("lowering").setLevel(logging.ERROR)  # for the life of this worker process
    _listed[:] = selection.kernels()


def _compile_listed(index: int, arch: str, check: bool) -> dict[str, Any]:
    return compile_one(_listed[index], arch, check)


def compile_one(kernel: kernels.Shipped, arch: str, check: bool) -> dict[str, Any]:
    """Compile a kernel: its name, source, seconds, and with `check`, which disassembles it, its spills.

    Runs in a worker process, so the result is plain data; an error comes back as text.
    """
    start = time.perf_counter()
    try:
        compiled = kernel.compile(arch)
        result = {"source": compiled.source, "spills": check and kernels.spilling(compiled)}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    return {"name": kernel.name, "seconds": time.perf_counter() - start, **result}


def _results(
    selection: Selection, chosen: Sequence[kernels.Shipped], wanted: Sequence[int], jobs: int, check: bool
) -> Iterator[dict[str, Any]]:
    """Results of the kernels `wanted` as they come. The compiler is not thread-safe, so processes it is."""
    if jobs == 1 or len(wanted) <= 1:
        yield from (compile_one(chosen[index], selection.arch, check) for index in wanted)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(jobs, len(wanted)), mp_context=context, initializer=_list, initargs=(selection,)
    ) as pool:
        futures = [pool.submit(_compile_listed, index, selection.arch, check) for index in wanted]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()


def progress_line(done: int, count: int, result: dict[str, Any]) -> str:
    """ "[ 3/24] gemm_sm90 ...  compiled in 1.2 s"."""
    words = {"compiled": "compiled", "disk": "was in the cache", "memory": "was in memory"}
    outcome = f"FAILED: {result['error']}" if "error" in result else words[result["source"]]
    spills = "  SPILLS" if result.get("spills") else ""
    width = len(str(count))
    return f"[{done:{width}}/{count}] {result['name']}  {outcome} ({result['seconds']:.1f} s){spills}"


def forecast(missing: int, jobs: int) -> str:
    """The time and disk that so many compiles take: "about 33 min with 1 process and 196 MiB of disk"."""
    seconds = missing * SECONDS_EACH / min(jobs, missing)
    time_text = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    processes = "1 process" if min(jobs, missing) == 1 else f"{min(jobs, missing)} processes"
    return f"about {time_text} with {processes} and {missing * BYTES_EACH / 2**20:.0f} MiB of disk"


def _shown(results: Iterable[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """The results, each printed; on a terminal below them a bar with the time that is left."""
    if not sys.stdout.isatty():
        for done, result in enumerate(results, 1):
            print(progress_line(done, count, result), flush=True)
            yield result
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left:", TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=count)
        for done, result in enumerate(results, 1):
            bar.console.print(progress_line(done, count, result), highlight=False, markup=False)
            bar.advance(task)
            yield result


def run(args: argparse.Namespace) -> int:
    """Compile, print progress, write the bundle. CheckFailed where a kernel could not be built."""
    from lowering import cache

    if args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}, must be at least 1")
    if args.sign is not None and args.bundle is None:
        raise UsageError("--sign is for the file that --bundle writes: name one")
    listing = "core" if args.core else "common" if args.common else "all"
    selection = Selection(args.arch, tuple(args.op or kernels.OPS), args.name, listing)
    chosen = selection.kernels()
    if args.list:
        print("\n".join(kernel.name for kernel in chosen))
        return 0
    if not cache.enabled():
        raise UsageError("the kernel cache is switched off (KERNELS_DSL_CACHE=0): there is nothing to fill")
    there = [kernel.is_cached(args.arch) for kernel in chosen]
    # A check looks at those that are there, too.
    wanted = [index for index, found in enumerate(there) if args.check or not found]
    missing = len(chosen) - sum(there)
    work = f"{missing} to compile, {forecast(missing, args.jobs)}" if missing else "nothing to compile"
    print(f"{len(chosen)} kernels for {args.arch}: {sum(there)} in the cache {cache.dir()}, {work}")
    start = time.perf_counter()
    with _log_level(logging.INFO if args.verbose else logging.ERROR):
        results = list(_shown(_results(selection, chosen, wanted, args.jobs, args.check), len(wanted)))
    seconds = time.perf_counter() - start
    failed = [result["name"] for result in results if "error" in result]
    fresh = sum(result.get("source") == "compiled" for result in results)
    before = len(chosen) - fresh - len(failed)
    print(f"{fresh} compiled, {before} already there, {len(failed)} failed, {seconds:.1f} s")
    if args.bundle is not None and not failed:
        write_bundle(args.bundle, [kernel.key(args.arch) for kernel in chosen], args.sign)
    if failed:
        raise CheckFailed(f"{len(failed)} kernels could not be built: {', '.join(failed)}")
    spilling = [result["name"] for result in results if result["spills"]]
    if spilling:
        raise CheckFailed(f"{len(spilling)} kernels spill registers: {', '.join(spilling)}")
    return 0


def write_bundle(path: Path, keys: list[str], sign: Path | None) -> None:
    """Export the kernels with these keys to `path`, signed with the key file `sign`; say how large it is."""
    from lowering import bundle

    bundle.export(path, keys, sign=sign)
    print(f"wrote {path}: {len(keys)} kernels, {path.stat().st_size / 2**20:.1f} MiB")
