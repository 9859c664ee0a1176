"""A seeded sample of the long tests, for continuous integration: `pytest --sample SEED`.

Of the cases of a file's long tests, which `tests/long_tests.txt` names, a fifth is run, at least two, chosen
by the seed: another seed, other cases. All other tests are run. `python -m tests.sampling REPORT.xml` writes
the list anew from the report of a whole run (`pytest --junitxml REPORT.xml`).
"""

from __future__ import annotations

import argparse
import hashlib
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

LIST = Path(__file__).with_name("long_tests.txt")
SHARE = 5
"""One of so many cases is run."""
FEWEST = 2
"""Cases of a file's long tests that are run at least."""
LONG_SECONDS = 8.0
"""A function is long whose cases take so many seconds together."""


def function_of(nodeid: str) -> str:
    """The test function of a case: its name without the parameters."""
    return nodeid.partition("[")[0]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def long_functions() -> frozenset[str]:
    return frozenset(line for line in LIST.read_text().splitlines() if line and not line.startswith("#"))


def chosen(nodeids: Iterable[str], long: Iterable[str], seed: int) -> set[str]:
    """The cases that are run with this seed, of those given."""
    wanted, kept = set(long), set()
    cases: dict[str, list[str]] = defaultdict(list)
    for nodeid in nodeids:
        if function_of(nodeid) in wanted:
            cases[file_of(nodeid)].append(nodeid)
        else:
            kept.add(nodeid)
    for of_file in cases.values():
        count = max(FEWEST, -(-len(of_file) // SHARE))
        kept.update(sorted(of_file, key=lambda nodeid: _rank(nodeid, seed))[:count])
    return kept


def _rank(nodeid: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {nodeid}".encode()).digest()


def seconds_by_function(report: Path) -> Mapping[str, list[float]]:
    """Seconds of the cases of each test function, from pytest's XML report."""
    found: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        module, name = case.get("classname", "").replace(".", "/"), case.get("name", "")
        if case.find("skipped") is None:
            found[function_of(f"{module}.py::{name}")].append(float(case.get("time", 0)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the list of long tests from a report of a whole run.")
    parser.add_argument("report", type=Path, help="what pytest --junitxml wrote")
    seconds = seconds_by_function(parser.parse_args().report)
    long = {name: sum(cases) for name, cases in seconds.items()}
    names = sorted(name for name, total in long.items() if total >= LONG_SECONDS)
    head = (
        f"# Test functions of which `pytest --sample SEED` runs a part: {LONG_SECONDS:.0f} seconds and more\n"
        "# in all their cases. `python -m tests.sampling` writes this file.\n"
    )
    LIST.write_text(head + "".join(f"{name}\n" for name in names))
    whole, saved = sum(map(sum, seconds.values())), sum(long[name] for name in names) * (1 - 1 / SHARE)
    print(f"{len(names)} of {len(seconds)} functions; of {whole:.0f} s some {saved:.0f} s are left out")


if __name__ == "__main__":
    main()
