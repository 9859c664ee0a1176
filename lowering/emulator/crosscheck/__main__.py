"""Command line of the comparison; exit status 1 where emulator and GPU disagree."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from . import cases, record, runner


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m lowering.emulator.crosscheck", description=__doc__)
    parser.add_argument("--record", type=Path, metavar="DIR", help="run on the GPU, keep its results in DIR")
    parser.add_argument("--recorded", type=Path, metavar="DIR", help="compare with those in DIR, no GPU")
    parser.add_argument(
        "--condense", type=Path, nargs=2, metavar=("FROM", "TO"),
        help="keep of the results in FROM what comparisons need: digests of exact results",
    )  # fmt: skip
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--jobs", type=int, default=4, help="processes on the GPU at a time (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    options = parser.parse_args(argv)
    if options.condense:
        print(f"{record.condense(*options.condense)} rows kept in {options.condense[1]}")
        return 0
    chosen = [case for case in cases.all_cases() if re.search(options.only, case.name)]
    if options.recorded:
        return _compare(chosen, options.recorded, options.json)
    if options.record:
        return _record(chosen, options.record, options.jobs)
    with tempfile.TemporaryDirectory() as folder:
        failed = _record(chosen, Path(folder), options.jobs)
        return _compare(chosen, Path(folder), options.json) or failed


def _record(chosen: list[cases.Case], folder: Path, jobs: int) -> int:
    failed = record.record(folder, chosen, jobs)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} cases ran on the GPU")
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


def _compare(chosen: list[cases.Case], folder: Path, file: Path | None) -> int:
    results = record.recorded(folder)
    outcomes, started = [], time.perf_counter()
    for case in chosen:
        try:
            theirs = results(case)
        except KeyError:
            print(f"{case.name}: not recorded")
            continue
        outcomes += runner.evaluate(case, theirs, lambda c: runner.run_case(c, "cpu"))
    bad = [o for o in outcomes if not o.ok]
    for o in bad:
        print(f"{o.name}: {o.error or f'{o.different} of {o.elements} differ ({o.rule}), {o.example}'}")
    seconds = time.perf_counter() - started
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} instructions agree ({seconds:.0f} s)")
    if file:
        rows = [dataclasses.asdict(o) for o in outcomes]
        facts = json.loads((folder / "machine.json").read_text())
        file.write_text(json.dumps({"machine": facts, "rows": rows}, indent=0) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
