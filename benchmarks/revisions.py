"""Our kernels now against those of an earlier version of the project, in turns on one GPU.

    python -m benchmarks.revisions 26cd507 --suite sparse
    python -m benchmarks.revisions ../older --suite gemm --suite attention --out FILE.json

The earlier version is a revision, or a folder that holds it where there is no repository. Each version has a
process of its own; they time the same case one after the other, in a new order each turn, so that clocks and
heat are the same for both. A ratio above 1 says that the kernel of this tree is faster. The exit status is 1
where a case became slower than `--allow` says.

Where the machine code is identical (`tools/machine_code.py against`), there is nothing to measure.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "benchmarks" / "revisions_worker.py"


class Suite(NamedTuple):
    """Cases of a benchmark: an expression in the namespace of a module, without peers where it may be."""

    module: str
    expression: str


SUITES = {
    "gemm": Suite("benchmarks.gemm", 'cases(SHAPES, "bf16", ())'),
    "ragged": Suite("benchmarks.gemm", 'cases(RAGGED, "bf16", ())'),
    "attention": Suite("benchmarks.attention", "forward_cases()"),
    "sm80": Suite("benchmarks.attention", "sm80_cases()"),
    "sparse": Suite("benchmarks.attention_sparse", "sparse_cases()"),
    "fp8": Suite("benchmarks.fp8_gemm", "cases()"),
    "fp8_attention": Suite("benchmarks.fp8", "attention_cases()"),
    "bsr": Suite("benchmarks.bsr", "cases([square(*row) for row in ROWS], ())"),
    "bsr_pieces": Suite(
        "benchmarks.bsr",
        'cases([Shape((e, e), 256 // e, (SIZE // e, SIZE // e), n, "one_heavy_row")'
        " for e in BLOCKS for n in (128, 512, 2048)], ())",
    ),
    "bsr_fp8_pieces": Suite("benchmarks.bsr", "map(fp8_case, map(one_heavy_row, BLOCKS))"),
}


@dataclass(frozen=True)
class Compared:
    """A case in both versions: medians over the turns, and the lowest and highest ratio of a turn."""

    name: str
    old_ms: float
    new_ms: float
    ratio: float
    low: float
    high: float


class Version:
    """The process of one version of the project."""

    def __init__(self, tree: Path, suite: Suite, clock: str) -> None:
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(tree), *others)))}
        command = [sys.executable, str(WORKER), *suite, clock]
        self.tree = tree
        self.process = subprocess.Popen(
            command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, question: str) -> Any:
        """The answer to `next` or `time`. Raises RuntimeError if the process has ended."""
        sender, answers = self.process.stdin, self.process.stdout
        assert sender is not None and answers is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            sender.write(f"{question}\n")
            sender.flush()
            line = answers.readline()
        if not line:
            raise RuntimeError(f"the process of {self.tree} ended, status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()


@contextlib.contextmanager
def tree_of(version: str) -> Iterator[Path]:
    """The folder of a version: itself if it is one, else a revision's files in a temporary folder."""
    if Path(version).is_dir():
        yield Path(version).resolve()
        return
    archive = subprocess.run(["git", "archive", version], cwd=ROOT, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"{version!r} is no folder and no revision: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extraction_filter = getattr(tarfile, "data_filter", None)  # None before 3.11.4
            files.extractall(folder)
        yield Path(folder)


def compare(old: Path, new: Path, suite: Suite, turns: int, clock: str = "gpu") -> Iterator[Compared]:
    """The cases of a suite, one by one. Raises RuntimeError where the versions have different cases."""
    versions = {"old": Version(old, suite, clock), "new": Version(new, suite, clock)}
    order = list(versions)
    shuffle = random.Random(0).shuffle
    try:
        while True:
            names = {key: version.ask("next") for key, version in versions.items()}
            if names["old"] != names["new"]:
                raise RuntimeError(f"the versions have different cases: {names['old']}, {names['new']}")
            if names["new"] is None:
                return
            ms: dict[str, list[float]] = {key: [] for key in versions}
            for _turn in range(turns):
                shuffle(order)
                for key in order:
                    ms[key].append(versions[key].ask("time"))
            yield _compared(names["new"], ms)
    finally:
        for version in versions.values():
            version.close()


def _compared(name: str, ms: Mapping[str, Sequence[float]]) -> Compared:
    ratios = [before / after for before, after in zip(ms["old"], ms["new"])]
    old, new = (statistics.median(ms[key]) for key in ("old", "new"))
    return Compared(name, old, new, statistics.median(ratios), min(ratios), max(ratios))


def line(row: Compared) -> str:
    return (
        f"{row.name:>40}  old {row.old_ms:8.4f} ms  new {row.new_ms:8.4f} ms  "
        f"x{row.ratio:.3f} (turns x{row.low:.3f} to x{row.high:.3f})"
    )


def _report(rows: Sequence[Compared], allowed: float, out: IO[str]) -> int:
    slower = [row for row in rows if row.ratio < 1 - allowed]
    print(f"{len(rows)} cases, {len(slower)} slower by more than {100 * allowed:g} %", file=out)
    for row in slower:
        print(line(row), file=out)
    return 1 if slower else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.revisions`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.revisions", description="Our kernels against an earlier version of them."
    )
    parser.add_argument("old", help="a revision, or the folder of an earlier version")
    parser.add_argument("--suite", action="append", choices=SUITES, help="may be repeated; default: all")
    parser.add_argument(
        "--turns", type=int, default=9, help="of each version at a case (default %(default)s)"
    )
    parser.add_argument("--allow", type=float, default=0.01, help="slower by this is equal (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the rows and the machine to this JSON file")
    args = parser.parse_args(argv)
    if args.turns < 1:
        parser.error(f"--turns is {args.turns}, must be at least 1")
    import torch

    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    from benchmarks import machine

    rows: list[Compared] = []
    with tree_of(args.old) as old:
        for name in args.suite or SUITES:
            for row in compare(old, ROOT, SUITES[name], args.turns):
                rows.append(row)
                print(line(row), flush=True)
    if args.out is not None:
        stored = {"header": {**machine.header(), "old": args.old}, "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(stored, indent=1) + "\n")
    return _report(rows, args.allow, sys.stdout)


if __name__ == "__main__":
    raise SystemExit(main())
