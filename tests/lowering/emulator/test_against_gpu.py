"""Whole kernels against the real thing: the same calls on a GPU and in the emulator.

On a Hopper GPU every case of `benchmarks.emulator_vs_gpu`; without one, a share of them against the digests
of an H200's results that benchmarks/results/h200 keeps.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from benchmarks import emulator_vs_gpu as suite  # noqa: E402

RESULTS = Path(suite.__file__).parent / "results" / "h200" / f"{suite.NAME}.json"
CASES = suite.cases()
SHARE = range(1, len(CASES), 6)


def _name(case: suite.Case) -> str:
    kind = "integers" if case.exact else "random"
    return f"{case.name} {str(case.dtype).removeprefix('torch.')} {kind}"


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_emulator_agrees_with_this_gpu(case: suite.Case) -> None:
    row = suite.compare(case, suite.call(case, "cpu"), suite.call(case, "cuda"))
    assert row.ok, row


def test_every_case_agreed_with_the_h200_bit_for_bit() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [r["name"] for r in rows] == [c.name for c in CASES], "the cases changed: run the suite again"
    assert all(r["ok"] and r["equal"] == r["elements"] for r in rows)


@pytest.mark.parametrize("index", SHARE, ids=lambda i: _name(CASES[i]))
def test_emulator_still_has_the_bits_of_the_h200(index: int) -> None:
    row = json.loads(RESULTS.read_text())["rows"][index]
    assert suite.digest(suite.call(CASES[index], "cpu", row["seed"])) == row["gpu"]


def test_the_rules_notice_a_difference() -> None:
    case = next(c for c in CASES if not c.exact and c.out_dtype == torch.float32)
    tensors = suite.inputs(case)
    result = (tensors["a"].double() @ tensors["b"].double()).float()
    allowed = suite.allowed(case, result)
    for share, ok in ((0.5, True), (2.0, False)):
        other = (result.double() + share * allowed).float()
        assert suite.compare(case, other, result).ok == ok
    off = result.clone()
    off.view(torch.int32)[3, 5] ^= 1
    row = suite.compare(dataclasses.replace(case, exact=True), off, result)
    assert (row.ok, row.elements - row.equal) == (False, 1)
