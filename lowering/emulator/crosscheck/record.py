"""Keeps what a GPU computes: each process runs a share of the cases, and a fault ends that process alone.

A fault on the GPU (an illegal instruction, an illegal address) poisons the process it happens in, so a case
that faults is named, and a new process takes the cases after it. `record` writes all results of a GPU;
`condense` shrinks them to what a comparison needs: a digest where results must agree bit for bit, and the
words where they need not. The inputs follow from the cases' names and are not kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from . import cases, runner
from .cases import Case
from .compare import Outcome, compare, settled

SECONDS = 150.0
"""Time that one process may take before the case that it is at counts as hanging."""


def record(folder: Path, chosen: Sequence[Case], jobs: int = 1) -> list[str]:
    """Run on the GPU, in `jobs` processes at a time, and keep the results in `folder`/results.npz.

    Returns the names of the cases that failed, with the error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max(jobs, 1)) as pool:
        parts = Path(name)
        shares = [share for i in range(jobs) if (share := list(chosen[i::jobs]))]
        answers = pool.map(lambda share: _run_share(share, parts), shares)
        failed = [line for lines in answers for line in lines]
        arrays = {path.stem: np.load(path) for path in sorted(parts.glob("*.npy"))}
        np.savez_compressed(folder / "results.npz", **arrays)  # type: ignore[arg-type]
        facts = parts / "machine.json"
        text = facts.read_text() if facts.exists() else "{}\n"
        (folder / "machine.json").write_text(text)
    return failed


def _run_share(share: list[Case], parts: Path) -> list[str]:
    failed: list[str] = []
    pending = share
    while pending:
        command = [sys.executable, "-m", "lowering.emulator.crosscheck.record", str(parts)]
        names = json.dumps([case.name for case in pending])
        try:
            done = subprocess.run(command, input=names, capture_output=True, text=True, timeout=SECONDS)
            lines = [line for line in done.stderr.splitlines() if "Error" in line]
            error = lines[-1] if lines else f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            error = f"no result within {SECONDS:.0f} s"
        pending = [case for case in pending if not (parts / f"{key(case)}.npy").exists()]
        if pending:
            failed.append(f"{pending[0].name}: {error}"[:1500])
            pending = pending[1:]
    return failed


def _child(parts: Path, names: list[str]) -> None:
    """Run the cases on the GPU one after another; the first failure ends the process."""
    known = {case.name: case for case in cases.all_cases()}
    for name in names:
        result = runner.run_case(known[name], "cuda")
        unfinished = parts / f"{key(known[name])}.unfinished"
        with unfinished.open("wb") as file:
            np.save(file, result)
        unfinished.replace(unfinished.with_suffix(".npy"))
    (parts / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")


def recorded(folder: Path) -> Callable[[Case], np.ndarray]:
    """Function from a case to its recorded results; KeyError where there are none."""
    stored = np.load(folder / "results.npz")
    return lambda case: stored[key(case)]


def condense(source: Path, target: Path) -> int:
    """Write what comparisons need of the results in `source` to `target`; returns the number of rows."""
    results, digests, words = recorded(source), {}, {}
    stored = set(np.load(source / "results.npz"))
    for case in cases.all_cases():
        if key(case) not in stored:
            continue
        theirs = results(case)
        for i, (name, rule, part) in enumerate(case.rows):
            exact = settled(theirs[part], rule)
            digests[name] = [key(case), "" if exact is None else _digest(exact)]
            if exact is None:
                words[f"{key(case)}_{i}"] = theirs[part]
    target.mkdir(parents=True, exist_ok=True)
    facts = {"machine": json.loads((source / "machine.json").read_text()), "rows": digests}
    (target / "instructions.json").write_text(json.dumps(facts, indent=0) + "\n")
    np.savez_compressed(target / "instructions.npz", **words)  # type: ignore[arg-type]
    return len(digests)


class Condensed:
    """Recording that `condense` wrote, and comparisons with it."""

    def __init__(self, folder: Path) -> None:
        self.rows: dict[str, list[str]] = json.loads((folder / "instructions.json").read_text())["rows"]
        self.words = np.load(folder / "instructions.npz")

    def has(self, case: Case) -> bool:
        """True if the results of this very case were kept."""
        return all(self.rows.get(name, [""])[0] == key(case) for name, _, _ in case.rows)

    def knows(self, case: Case) -> bool:
        """True if a GPU has run any row of this case, in this form or in another."""
        return any(name in self.rows for name, _, _ in case.rows)

    def evaluate(self, case: Case, ours: np.ndarray) -> list[Outcome]:
        """Outcomes of each row of a case, given the emulator's results."""
        outcomes = []
        for i, (name, rule, part) in enumerate(case.rows):
            exact = settled(ours[part], rule)
            if exact is None:
                outcomes.append(compare(name, rule, ours[part], self.words[f"{key(case)}_{i}"]))
            else:
                same = _digest(exact) == self.rows[name][1]
                text = "" if same else "the digests differ"
                outcomes.append(Outcome(name, rule, exact.size, 0 if same else exact.size, example=text))
        return outcomes


def _digest(words: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(words, dtype="<u4").tobytes()).hexdigest()[:16]


def key(case: Case) -> str:
    """Name of a case's recorded array: changes with everything that its result depends on."""
    description = f"{case.name} {case.constants!r}"
    return hashlib.sha256(description.encode()).hexdigest()[:20]


def machine() -> dict[str, str]:
    """Facts of the machine for the reader of a recording."""
    import torch

    import lowering

    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "driver": str(lowering.arch.ask_driver("cuDriverGetVersion")),
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
    }


def _main(arguments: list[str]) -> Any:
    _child(Path(arguments[0]), json.load(sys.stdin))


if __name__ == "__main__":
    _main(sys.argv[1:])
