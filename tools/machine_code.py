"""Compares the machine code of the ahead-of-time kernels between two versions of the project, without a GPU.

    python tools/machine_code.py take NEW.jsonl --arch sm_90a --sample 120
    python tools/machine_code.py compare OLD.jsonl NEW.jsonl
    python tools/machine_code.py against main --match bsr --sample 12

`take` compiles kernels and writes one JSON line for each: its key, the SHA-256 of its machine code,
registers, stack, spills and shared memory. `against` takes the same kernels of this working tree and of a
revision, and compares them. The exit status is 1 where a kernel differs, is missing, is new, or does not
compile.

The digest covers the instructions and constants of the cubin. It leaves out symbols, names and line
information, so that renaming a function, moving a file or editing a comment does not change it. A kernel's
key says what a call asks for (operator, tile, dtypes, options) and holds no name of a module or function.
Kernels with the same key are compared as a set, and kernels with another key but the same code are reported
as renamed.

The compiler runs in processes that import a copy of the tree in question, so that it may be edited meanwhile,
with the kernel cache off. Results are kept in a folder of their own (--cache), named after the digest
of all sources of the tree, the compiler's version and this file: a repeated run, or another person's run
against the same revision, takes seconds.

Of the tree in question this file uses `kernels_dsl.cli.kernels.shipped` and, of what its `compile` returns,
`cubin()`, `launches` and `resources()`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import io
import json
import math
import os
import queue
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels_dsl", "lowering")  # what kernels are made from
TOOL = Path(__file__).name
ARCHS = ("sm_90a", "sm_80")  # one of each family
CHUNK = 40  # kernels a process compiles before it ends: the compiler keeps memory of each
TYPICAL_SECONDS = 4.0  # that a kernel takes, for the estimate before anything is measured
FACTS = ("sha256", "registers", "stack_bytes", "spills", "static_smem", "dynamic_smem", "threads")
SHAPING_PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi", "torch")
SHAPING_VARIABLES = ("CUTE_DSL_", "CUTLASS_", "KERNELS_DSL_", "NVVM_", "CUDA_HOME")

# ---- what is hashed ----------------------------------------------------------------------------------------

_HASHED = (".text.", ".nv.constant", ".nv.global")
_NOBITS = 8


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, contents) of each section of an ELF file; a section without contents has as many zeros."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: it is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names_index = struct.unpack_from("<HH", cubin, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * i) for i in range(count)]
    names_at = headers[names_index][4]
    for name, kind, _, _, offset, size, *_ in headers:
        at = names_at + name
        text = cubin[at : cubin.index(b"\0", at)].decode()
        yield text, bytes(size) if kind == _NOBITS else cubin[offset : offset + size]


def digest(cubin: bytes) -> str:
    """The SHA-256 of a cubin's instructions and constants, whatever its entries are called.

    Each section counts with its kind and contents, in sorted order: the file's order may follow the names.
    """
    parts = []
    for name, data in sections(cubin):
        if name.startswith(_HASHED):
            kind = ".".join(name.split(".")[:3]) if name.startswith(".nv.") else ".text"
            parts.append(f"{kind} {len(data)} {hashlib.sha256(data).hexdigest()}")
    if not any(part.startswith(".text ") for part in parts):
        raise ValueError("the cubin has no machine code")
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def facts(compiled: Any) -> dict[str, Any]:
    """The record of a compiled kernel; where it has several entries, those of each, sorted."""
    entries = compiled.resources()
    return {
        "sha256": digest(compiled.cubin()),
        "registers": sorted(entry.registers for entry in entries),
        "stack_bytes": sorted(entry.stack_bytes for entry in entries),
        "spills": sum(entry.spill_loads + entry.spill_stores for entry in entries),
        "static_smem": sorted(entry.static_smem for entry in entries),
        "dynamic_smem": sorted((launch.dynamic_smem for launch in compiled.launches), key=str),
        "threads": sorted(math.prod(n or 0 for n in launch.block) for launch in compiled.launches),
    }


# ---- which kernels -----------------------------------------------------------------------------------------

_FUNCTION = re.compile(r", \w+((?: \d+x\d+)?) #\d+$")


def key_of(name: str) -> str:
    """A kernel's name without the function and the number that some carry: "fp8 scaled_gemm row 64x64"."""
    return _FUNCTION.sub(r"\1", name)


def sampled(keys: Iterable[str], count: int | None, seed: int) -> set[str]:
    """About `count` of the keys, spread over the operators (a key's first two words).

    An operator's share goes by the square root of how many keys it has, and is one at least. The choice
    within an operator hardly changes where keys are added or removed.
    """
    strata: dict[str, list[str]] = defaultdict(list)
    for key in sorted(set(keys)):
        strata[" ".join(key.split()[:2])].append(key)
    if count is None or count >= sum(map(len, strata.values())):
        return {key for stratum in strata.values() for key in stratum}
    for stratum in strata.values():
        stratum.sort(key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    total = sum(math.sqrt(len(stratum)) for stratum in strata.values())
    chosen: set[str] = set()
    for stratum in strata.values():
        chosen |= set(stratum[: max(1, round(count * math.sqrt(len(stratum)) / total))])
    return chosen


class Choice(NamedTuple):
    """The kernels of an architecture that are wanted: a sample of those whose name has one of `match`."""

    match: tuple[str, ...]
    sample: int | None
    seed: int

    def matching(self, listed: Sequence[str]) -> list[str]:
        """Those of these names that have one of `match`; all where it is empty."""
        return [name for name in listed if not self.match or any(part in name for part in self.match)]

    def names(self, listed: Sequence[str]) -> list[str]:
        """The chosen ones of these names."""
        wanted = self.matching(listed)
        keys = sampled(map(key_of, wanted), self.sample, self.seed)
        return [name for name in wanted if key_of(name) in keys]


# ---- compiling in a tree -----------------------------------------------------------------------------------


class Job(NamedTuple):
    """Compiles of one tree: a `snapshot` of it, what to call it, the architecture, how many processes, the
    folder that keeps results."""

    tree: Path
    label: str
    arch: str
    jobs: int
    cache: Path

    def kept(self) -> Path:
        """The file of earlier results for exactly these sources, compiler and settings."""
        state = hashlib.sha256((self.tree / TOOL).read_bytes())
        for package in PACKAGES:
            for path in sorted((self.tree / package).rglob("*.py")):
                state.update(f"\n{path.relative_to(self.tree)}\n".encode() + path.read_bytes())
        for name in SHAPING_PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                state.update(f"\n{name} {importlib.metadata.version(name)}".encode())
        for name, value in sorted(_environment(self.tree).items()):
            if name.startswith(SHAPING_VARIABLES):
                state.update(f"\n{name}={value}".encode())
        return self.cache / f"{state.hexdigest()[:24]}-{self.arch}.jsonl"


def _environment(tree: Path) -> dict[str, str]:
    """The environment of the processes that compile: the kernel cache could hide a change, so it is off."""
    ignored = (
        "KERNELS_DSL_CACHE",
        "KERNELS_DSL_CACHE_DIR",
        "KERNELS_DSL_CACHE_BYTES",
        "KERNELS_DSL_NO_COMPILE",
    )
    kept = {name: value for name, value in os.environ.items() if name not in ignored}
    return {**kept, "KERNELS_DSL_CACHE": "0", "PYTHONPATH": str(tree)} | {"PYTHONDONTWRITEBYTECODE": "1"}


def work(tree: Path, arch: str) -> int:
    """The child process: names come by standard input, results go to standard output, a JSON line each.

    Without names it lists those that there are.
    """
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the compiler may print
    sys.path[0] = str(tree)
    import kernels_dsl
    from kernels_dsl.cli import kernels

    found = Path(kernels_dsl.__file__).resolve().parents[1]
    if found != tree.resolve():
        print(f"kernels_dsl was imported from {found}, must be from {tree}", file=sys.stderr)
        return 1
    wanted = [line.rstrip("\n") for line in sys.stdin]
    shipped = {kernel.name: kernel for kernel in kernels.shipped(arch)}
    if not wanted:
        results.write(json.dumps(list(shipped)) + "\n")
    for name in wanted:
        started = time.perf_counter()
        try:
            result = facts(shipped[name].compile(arch))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        seconds = round(time.perf_counter() - started, 2)
        results.write(json.dumps({"name": name, **result, "seconds": seconds}) + "\n")
    return 0


def _child(tree: Path, arch: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(tree / TOOL), "work", str(tree), arch]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=tree, env=_environment(tree), **pipes)  # type: ignore[call-overload]


def listed(tree: Path, arch: str) -> list[str]:
    """The names of all ahead-of-time kernels of an architecture in a tree."""
    out, err = (child := _child(tree, arch)).communicate("")
    if child.returncode != 0:
        raise SystemExit(f"the kernels of {tree} for {arch} cannot be listed:\n{err[-2000:]}")
    return json.loads(out)


class _Results(NamedTuple):
    """Results as they come. `interrupted`: nobody waits for more."""

    queue: queue.Queue[dict[str, Any]]
    interrupted: threading.Event


def _chunk(job: Job, names: Sequence[str], results: _Results) -> None:
    """Compile these in one process after another: where one dies, the kernel that it was at has failed."""
    left = list(names)
    while left and not results.interrupted.is_set():
        child = _child(job.tree, job.arch)
        said: list[str] = []
        reader = threading.Thread(target=lambda pipe=child.stderr, said=said: said.extend(pipe))
        reader.start()
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write("".join(f"{name}\n" for name in left))
            child.stdin.close()
        for line in child.stdout:
            results.queue.put(result := json.loads(line))
            left.remove(result["name"])
            if results.interrupted.is_set():
                child.kill()
        child.wait()
        reader.join()
        if left:
            why = f"the process ended with {child.returncode}: {''.join(said)[-500:].strip()}"
            results.queue.put({"name": left.pop(0), "error": why, "seconds": 0.0})


def compiled(job: Job, names: Sequence[str]) -> list[dict[str, Any]]:
    """The records of these kernels, sorted; those that earlier runs made are not made again."""
    path = job.kept()
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    known = {result["name"]: result for result in map(json.loads, lines)}
    missing = [name for name in names if name not in known]
    typical = [result["seconds"] for result in known.values()] or [TYPICAL_SECONDS]
    seconds = len(missing) * sum(typical) / len(typical) / job.jobs
    _say(f"{job.arch} {job.label}: {len(names)} kernels, {len(names) - len(missing)} known, "
         f"{len(missing)} to compile: about {_time(seconds)} with {job.jobs} processes")  # fmt: skip
    with path.open("a") as kept:
        for result in _stream(job, missing):
            known[result["name"]] = result
            if "error" not in result:
                kept.write(json.dumps(result) + "\n")
                kept.flush()
    records = [_record(job.arch, known[name]) for name in names]
    return sorted(records, key=lambda record: json.dumps(record, sort_keys=True))


def _stream(job: Job, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Compile these kernels; says how far it is."""
    chunks = -(-len(names) // max(1, min(CHUNK, -(-len(names) // job.jobs))))
    results, started = _Results(queue.Queue(), threading.Event()), time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(job.jobs) as pool:
        futures = [pool.submit(_chunk, job, names[i::chunks], results) for i in range(chunks)]
        try:
            for done in range(1, len(names) + 1):
                result = _next(results, futures)
                outcome = f"FAILED: {result['error']}" if "error" in result else f"{result['seconds']:.1f} s"
                left = (time.perf_counter() - started) / done * (len(names) - done)
                _say(f"[{done}/{len(names)}, {_time(left)} left] {result['name']}  {outcome}")
                yield result
        except BaseException:
            results.interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _next(results: _Results, futures: list[concurrent.futures.Future[None]]) -> dict[str, Any]:
    while True:
        with contextlib.suppress(queue.Empty):
            return results.queue.get(timeout=1.0)
        for future in futures:
            if future.done():
                future.result()  # raises what ended it


def _record(arch: str, result: dict[str, Any]) -> dict[str, Any]:
    measured = {"error": result["error"]} if "error" in result else {fact: result[fact] for fact in FACTS}
    return {"key": f"{arch} {key_of(result['name'])}", **measured}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# ---- comparing ---------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Records of two versions: pairs that agree, pairs that differ, those without a partner, renamed keys."""

    equal: int
    differing: list[tuple[dict[str, Any], dict[str, Any]]]
    missing: list[dict[str, Any]]
    new: list[dict[str, Any]]
    renamed: list[tuple[str, str]]

    @property
    def same(self) -> bool:
        """True where all kernels agree, renamed ones included."""
        return not (self.differing or self.missing or self.new)


def _agree(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return "error" not in old and {**old, "key": ""} == {**new, "key": ""}


def compared(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> Comparison:
    """Pair the records: equal ones of a key, then what is left of the key, then equal code of any key."""
    groups: dict[str, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for side, records in enumerate((old, new)):
        for record in records:
            groups[record["key"]][side].append(record)
    equal, differing, missing, fresh, renamed = 0, [], [], [], []
    for before, after in groups.values():
        equal += len(_take_pairs(before, after))
        while before and after:
            differing.append((before.pop(0), after.pop(0)))
        missing += before
        fresh += after
    for one, other in _take_pairs(missing, fresh):
        equal += 1
        renamed.append((one["key"], other["key"]))
    return Comparison(equal, differing, missing, fresh, renamed)


def _take_pairs(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Take pairs that agree out of both lists."""
    pairs = []
    for one in list(before):
        other = next((record for record in after if _agree(one, record)), None)
        if other is not None:
            before.remove(one)
            after.remove(other)
            pairs.append((one, other))
    return pairs


def report(found: Comparison) -> int:
    """Print a comparison; returns the exit status."""
    for before, after in found.renamed:
        print(f"renamed, same code: {before} -> {after}")
    for title, records in (("missing", found.missing), ("new", found.new)):
        for record in records:
            print(f"{title}: {record['key']}  {_shown(record)}")
    for old, new in found.differing:
        print(f"differs: {old['key']}\n    old: {_shown(old)}\n    new: {_shown(new)}")
        changed = [fact for fact in FACTS[1:] if old.get(fact) != new.get(fact)]
        print(f"    other than the code: {', '.join(changed) or 'nothing'}")
    counts = f"{found.equal} equal ({len(found.renamed)} renamed), {len(found.differing)} differ"
    print(f"{counts}, {len(found.missing)} missing, {len(found.new)} new")
    return 0 if found.same else 1


def _shown(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"does not compile: {record['error']}"
    if "sha256" not in record:
        return "not compiled"
    words = [f"code {record['sha256'][:12]}"]
    for fact in FACTS[1:]:
        value = record[fact]
        words.append(f"{fact} {'+'.join(map(str, value)) if isinstance(value, list) else value}")
    return ", ".join(words)


# ---- commands ----------------------------------------------------------------------------------------------


def take(args: argparse.Namespace) -> int:
    """Write the records of this tree's kernels."""
    choice, records = Choice(tuple(args.match), args.sample, args.seed), []
    with snapshot(args.tree) as tree:
        for arch in args.arch or ARCHS[:1]:
            names = choice.names(listed(tree, arch))
            records += compiled(Job(tree, str(args.tree), arch, args.jobs, args.cache), names)
    _check_some(records, args)
    args.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    failed = [record["key"] for record in records if "error" in record]
    _say(f"wrote {args.out}: {len(records)} kernels, {len(failed)} failed")
    return 1 if failed else 0


def _check_some(found: Sequence[Any], args: argparse.Namespace) -> None:
    if not found:
        raise SystemExit(f"no kernel for {', '.join(args.arch or ARCHS)} has any of {args.match} in its name")


def compare(args: argparse.Namespace) -> int:
    """Compare two files that `take` wrote."""
    old, new = ([json.loads(line) for line in path.read_text().splitlines()] for path in (args.old, args.new))
    return report(compared(old, new))


@contextlib.contextmanager
def snapshot(tree: Path) -> Iterator[Path]:
    """A temporary copy of what a tree's kernels are made from, with this file."""
    with tempfile.TemporaryDirectory(prefix="machine_code_") as folder:
        copy = Path(folder).resolve()
        for package in PACKAGES:
            shutil.copytree(tree / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(__file__, copy / TOOL)
        yield copy


@contextlib.contextmanager
def committed(revision: str, tree: Path = ROOT) -> Iterator[Path]:
    """A `snapshot` of a revision. It takes no worktree: an interrupted run leaves none behind."""
    command = ["git", "archive", revision, *PACKAGES]
    archive = subprocess.run(command, cwd=tree, capture_output=True, check=False)
    if archive.returncode != 0:
        raise SystemExit(archive.stderr.decode().strip())
    with tempfile.TemporaryDirectory(prefix="machine_code_") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extraction_filter = getattr(tarfile, "data_filter", None)  # None before 3.11.4
            files.extractall(folder)
        with snapshot(Path(folder)) as copy:
            yield copy


class Counterparts(NamedTuple):
    """The names to compile in the other tree, and the names that only one of the two trees lists."""

    names: list[str]
    missing: list[str]
    new: list[str]


def counterparts(names: Sequence[str], here: Sequence[str], there: Sequence[str]) -> Counterparts:
    """The names that the other tree's list `there` has for `names`, which are of this tree's list `here`.

    Kernels with keys of their own are taken for renamed, in order, where both trees have as many of them.
    """
    kept = Counter(map(key_of, here)) & Counter(map(key_of, there))
    missing, new = _beyond(there, kept), _beyond(here, kept)
    wanted = set(map(key_of, names))
    found = [name for name in there if key_of(name) in wanted]
    if len(missing) == len(new):
        partners = [old for old, fresh in zip(missing, new) if fresh in set(names)]
        return Counterparts(list(dict.fromkeys(found + partners)), [], [])
    return Counterparts(found, missing, new)


def _beyond(names: Sequence[str], kept: Counter[str]) -> list[str]:
    """Those names whose key occurs more often than in `kept`."""
    left, beyond = kept.copy(), []
    for name in names:
        if left[key_of(name)] > 0:
            left[key_of(name)] -= 1
        else:
            beyond.append(name)
    return beyond


def against(args: argparse.Namespace) -> int:
    """Compare this tree's kernels with those of a revision."""
    choice = Choice(tuple(args.match), args.sample, args.seed)
    old: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = []
    with snapshot(args.tree) as tree, committed(args.revision, args.tree) as other:
        for arch in args.arch or ARCHS:
            here, there = listed(tree, arch), listed(other, arch)
            names = choice.names(here)
            found = counterparts(names, here, there)
            new += compiled(Job(tree, str(args.tree), arch, args.jobs, args.cache), names)
            old += compiled(Job(other, args.revision, arch, args.jobs, args.cache), found.names)
            for side, records in ((found.missing, old), (found.new, new)):
                seen = {record["key"] for record in records}
                keys = (f"{arch} {key_of(name)}" for name in choice.matching(side))
                records += [{"key": key} for key in keys if key not in seen]
    _check_some(new, args)
    return report(compared(old, new))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    choice = argparse.ArgumentParser(add_help=False)
    choice.add_argument(
        "--arch", action="append", help=f"may be repeated; default: {ARCHS[0]}; against: {ARCHS}"
    )
    choice.add_argument(
        "--match", action="append", default=[], help="only kernels whose name has this; repeatable"
    )
    choice.add_argument("--sample", type=int, help="about so many an architecture, spread over the operators")
    choice.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    choice.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    choice.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout whose kernels these are (this one)"
    )
    choice.add_argument(
        "--cache", type=Path, default=Path(base) / "kernels_dsl_machine_code", help="%(default)s"
    )
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("take", parents=[choice], help=take.__doc__)
    command.add_argument("out", type=Path)
    command.set_defaults(run=take)
    command = commands.add_parser("against", parents=[choice], help=against.__doc__)
    command.add_argument("revision")
    command.set_defaults(run=against)
    command = commands.add_parser("compare", help=compare.__doc__)
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    command.set_defaults(run=compare)
    command = commands.add_parser("work")
    command.add_argument("tree", type=Path)
    command.add_argument("arch")
    command.set_defaults(run=lambda args: work(args.tree, args.arch))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = parser().parse_args(argv)
    if hasattr(args, "jobs"):
        args.tree = args.tree.resolve()
        if args.jobs < 1 or (args.sample is not None and args.sample < 1):
            raise SystemExit("--jobs and --sample must be at least 1")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        _say("interrupted: what was compiled is kept")
        return 130


if __name__ == "__main__":
    sys.exit(main())
