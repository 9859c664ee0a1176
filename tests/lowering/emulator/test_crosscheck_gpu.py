"""Single instructions, emulator against hardware: on a GPU now, or against results that one recorded earlier.

On a Hopper GPU `python -m lowering.emulator.crosscheck --record DIR` makes a recording, and
`python -m lowering.emulator.crosscheck --condense DIR tests/lowering/emulator/recorded` the one that is kept.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from lowering.emulator.crosscheck import cases, record, runner

RECORDED = Path(__file__).parent / "recorded"
CASES = list(cases.all_cases())
FAMILIES = sorted({case.name.split("/")[0] for case in CASES})


def _bad(outcomes) -> list[str]:
    return [f"{o.name}: {o.error or f'{o.different} differ, {o.example}'}" for o in outcomes if not o.ok]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("family", FAMILIES)
def test_emulator_agrees_with_this_gpu(family, tmp_path):
    """The GPU's part runs in processes of its own: a fault in one case ends no other."""
    chosen = [case for case in CASES if case.name.startswith(family + "/")]
    bad = record.record(tmp_path, chosen, jobs=3)
    results = record.recorded(tmp_path)
    failed = {line.split(": ")[0] for line in bad}
    for case in chosen:
        if case.name not in failed:
            bad += _bad(runner.evaluate(case, results(case), lambda c: runner.run_case(c, "cpu")))
    assert not bad, "\n".join(bad)


def _not_recorded() -> list[cases.Case]:
    if not (RECORDED / "instructions.json").exists():
        return []
    kept = record.Condensed(RECORDED)
    return [case for case in CASES if not kept.knows(case)]


@pytest.mark.parametrize("case", _not_recorded(), ids=lambda case: case.name)
def test_emulator_runs_what_no_gpu_has_run_yet(case):
    """ptxas takes the instructions and the emulator executes them."""
    assert runner.run_case(case, "cpu").any()
    pytest.skip("no GPU has run it: record it with python -m lowering.emulator.crosscheck")


@pytest.mark.skipif(not (RECORDED / "instructions.json").exists(), reason="no recording is kept")
@pytest.mark.parametrize("family", FAMILIES)
def test_emulator_agrees_with_the_recorded_gpu(family):
    kept = record.Condensed(RECORDED)
    bad = []
    for case in CASES:
        if case.name.startswith(family + "/") and kept.knows(case):
            assert kept.has(case), f"{case.name} changed since the recording: record it again"
            bad += _bad(kept.evaluate(case, runner.run_case(case, "cpu")))
    assert not bad, "\n".join(bad)
