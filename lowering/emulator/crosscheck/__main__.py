"""Command line of the comparison; exit status 1 where emulator and GPU disagree."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from pathlib import Path

from . import cases, runner


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowering.emulator.crosscheck", description=__doc__)
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="run on the GPU and keep its results in DIR"
    )
    parser.add_argument(
        "--recorded", type=Path, metavar="DIR", help="compare with the results kept in DIR, no GPU"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    options = parser.parse_args(argv)
    chosen = [case for case in cases.all_cases() if re.search(options.only, case.name)]
    if options.record:
        failed = runner.record(options.record, chosen)
        print(f"{len(chosen) - len(failed)} cases recorded in {options.record}")
        for line in failed:
            print(f"FAILED {line}")
        if failed:
            return 1
        options.recorded = options.record
    return _compare(chosen, options)


def _compare(chosen: list[cases.Case], options: argparse.Namespace) -> int:
    results = runner.recorded(options.recorded) if options.recorded else None
    outcomes, started = [], time.perf_counter()
    for case in chosen:
        theirs = results(case) if results else runner.run_case(case, "cuda")
        outcomes += runner.evaluate(case, theirs, lambda c: runner.run_case(c, "cpu"))
    bad = [o for o in outcomes if not o.ok]
    for o in bad:
        print(f"{o.name}: {o.error or f'{o.different} of {o.elements} differ ({o.rule}), {o.example}'}")
    seconds = time.perf_counter() - started
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} instructions agree ({seconds:.0f} s)")
    if options.json:
        rows = [dataclasses.asdict(o) for o in outcomes]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
