"""The sample of long tests that continuous integration runs."""

from __future__ import annotations

import ast

from tests import sampling

ROOT = sampling.LIST.parents[1]
CASES = [f"tests/a.py::test_long[{n}]" for n in range(30)] + [
    f"tests/a.py::test_short[{n}]" for n in range(9)
]
LONG = ["tests/a.py::test_long"]


def test_a_fifth_of_a_long_test_and_all_of_the_others():
    kept = sampling.chosen(CASES, LONG, 1)
    assert sum("long" in case for case in kept) == 6
    assert sum("short" in case for case in kept) == 9


def test_a_file_with_few_long_cases_keeps_two():
    assert len(sampling.chosen(CASES[:4], LONG, 1)) == 2
    assert sampling.chosen(CASES[:1], LONG, 1) == set(CASES[:1])
    others = [case.replace("a.py", "b.py") for case in CASES[:4]]
    kept = sampling.chosen(CASES[:4] + others, [*LONG, "tests/b.py::test_long"], 1)
    assert sum("a.py" in case for case in kept) == sum("b.py" in case for case in kept) == 2


def test_the_seed_chooses_and_every_case_has_its_turn():
    samples = [sampling.chosen(CASES, LONG, seed) for seed in range(40)]
    assert samples[0] == sampling.chosen(list(reversed(CASES)), LONG, 0)
    assert samples[0] != samples[1]
    assert set().union(*samples) == set(CASES)


def test_the_list_is_written_from_a_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a.test_b" name="test_c[1]" time="2.5"/>'
        '<testcase classname="tests.a.test_b" name="test_c[2]" time="1"/>'
        '<testcase classname="tests.a.test_b" name="test_d" time="0"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert sampling.seconds_by_function(report) == {"tests/a/test_b.py::test_c": [2.5, 1.0]}


def test_every_long_test_exists():
    """A test that was renamed or removed must leave the list, or its new name must enter it."""
    missing = []
    for name in sorted(sampling.long_functions()):
        path, _, function = name.partition("::")
        source = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        defined = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        if function.rpartition("::")[2] not in defined:
            missing.append(name)
    assert not missing
