"""Single instructions, emulator against hardware: on a GPU now, or against results that one recorded earlier.

`python -m lowering.emulator.crosscheck --record tests/lowering/emulator/recorded` on a Hopper GPU makes the
recording.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from lowering.emulator.crosscheck import cases, runner

RECORDED = Path(__file__).parent / "recorded"
CASES = list(cases.all_cases())


def _check(case: cases.Case, theirs) -> None:
    outcomes = runner.evaluate(case, theirs, lambda c: runner.run_case(c, "cpu"))
    bad = [f"{o.name}: {o.error or f'{o.different} differ, {o.example}'}" for o in outcomes if not o.ok]
    assert not bad, "\n".join(bad)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_emulator_agrees_with_this_gpu(case):
    _check(case, runner.run_case(case, "cuda"))


@pytest.mark.parametrize("case", CASES if (RECORDED / "results.npz").exists() else [], ids=lambda c: c.name)
def test_emulator_agrees_with_the_recorded_gpu(case):
    _check(case, runner.recorded(RECORDED)(case))
