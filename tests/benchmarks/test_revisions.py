"""The comparison of two versions in turns: stand-ins for trees, timed on the host."""

from __future__ import annotations

import ast
import builtins
import importlib
import io
from pathlib import Path

import pytest

from benchmarks import revisions
from benchmarks.revisions import Compared, Suite

CASES = """
import time
from typing import NamedTuple


class Case(NamedTuple):
    name: str
    calls: dict
    sets: int = 1


def cases():
    print("what a case prints is no answer")
    for name, seconds in {seconds}.items():
        yield Case(name, dict(ours=lambda _set, seconds=seconds: time.sleep(seconds)))
"""
SUITE = Suite("bench.fake", "cases()")


def _tree(folder: Path, seconds: dict[str, float]) -> Path:
    (folder / "bench").mkdir(parents=True)
    (folder / "bench" / "fake.py").write_text(CASES.replace("{seconds}", repr(seconds)))
    return folder


def test_the_faster_version_is_seen(tmp_path):
    old = _tree(tmp_path / "old", {"a": 0.004, "b": 0.002})
    new = _tree(tmp_path / "new", {"a": 0.002, "b": 0.004})
    rows = list(revisions.compare(old, new, SUITE, turns=2, clock="host"))
    assert [row.name for row in rows] == ["a", "b"]
    assert rows[0].ratio > 1.3
    assert rows[1].ratio < 0.8
    assert rows[0].old_ms >= 4 and rows[1].new_ms >= 4


def test_versions_with_other_cases_are_refused(tmp_path):
    old, new = _tree(tmp_path / "old", {"a": 0}), _tree(tmp_path / "new", {"b": 0})
    with pytest.raises(RuntimeError, match="different cases: a, b"):
        list(revisions.compare(old, new, SUITE, turns=1, clock="host"))


def test_a_version_that_fails_is_named(tmp_path):
    old, new = _tree(tmp_path / "old", {"a": 0}), tmp_path
    with pytest.raises(RuntimeError, match=f"the process of {tmp_path} ended, status 1"):
        list(revisions.compare(old, new, SUITE, turns=1, clock="host"))


def test_a_slower_case_fails():
    rows = [Compared("same", 1.0, 1.005, 0.995, 0.99, 1.0), Compared("slow", 1.0, 1.1, 0.91, 0.9, 0.92)]
    out = io.StringIO()
    assert revisions._report(rows, 0.01, out) == 1
    assert "2 cases, 1 slower" in out.getvalue() and "slow" in out.getvalue()
    assert revisions._report(rows[:1], 0.01, out) == 0


def test_a_revision_is_laid_out_as_files():
    with revisions.tree_of(str(revisions.ROOT)) as tree:
        assert tree == revisions.ROOT
    with (
        pytest.raises(SystemExit, match="'nonsuch' is no folder and no revision"),
        revisions.tree_of("nonsuch"),
    ):
        pass


@pytest.mark.parametrize("name", revisions.SUITES)
def test_every_suite_names_what_exists(name):
    suite = revisions.SUITES[name]
    names = [node for node in ast.walk(ast.parse(suite.expression)) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    known = {**vars(builtins), **vars(importlib.import_module(suite.module))}
    assert {node.id for node in names} <= bound | known.keys()
