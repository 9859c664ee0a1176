"""The comparison of emulator and GPU itself: its rules must notice differences; records are read back."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lowering.emulator.crosscheck import cases, ops, record, runner
from lowering.emulator.crosscheck.compare import compare


def _bits(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


NAN, OTHER_NAN = np.array([0x7FFFFFFF], np.uint32), np.array([0xFFC00001], np.uint32)


def test_bits_rule():
    assert compare("x", "bits", _bits(1.0, 2.0), _bits(1.0, 2.0)).ok
    outcome = compare("x", "bits", _bits(1.0, 2.0), _bits(1.0, -2.0))
    assert (outcome.different, outcome.elements) == (1, 2)
    assert outcome.example == "[1] emulator 0x40000000, GPU 0xc0000000"
    assert not compare("x", "bits", NAN, OTHER_NAN).ok
    assert not compare("x", "bits", _bits(1.0), _bits(1.0, 1.0)).ok


def test_equal_but_for_nan():
    assert compare("x", "f32=", NAN, OTHER_NAN).ok
    assert not compare("x", "f32=", _bits(0.0), _bits(-0.0)).ok
    assert not compare("x", "f32=", NAN, _bits(1.0)).ok
    halves = np.array([0x7FFF3C00], np.uint32), np.array([0x7E003C00], np.uint32)
    assert compare("x", "f16x2=", *halves).ok
    assert not compare("x", "f16x2=", halves[0], np.array([0x7E003C01], np.uint32)).ok


def test_distances():
    one = _bits(1.0)
    for steps in range(1, 4):
        near = one + np.uint32(steps)
        assert compare("x", "f32:2", near, one).ok == (steps <= 2)
    assert compare("x", "f32:1", _bits(2.0**-149), _bits(0.0)).ok
    assert not compare("x", "f32:2", _bits(np.inf), _bits(3e38)).ok
    assert compare("x", "f32~-20", _bits(2.0**-21), _bits(0.0)).ok
    assert not compare("x", "f32~-20", _bits(2.0**-19), _bits(0.0)).ok
    assert compare("x", "f32/-10", _bits(1000.0, 0.5), _bits(1000.0, 0.0)).ok
    assert not compare("x", "f32/-10", _bits(1000.0, 1.5), _bits(1000.0, 0.0)).ok
    assert not compare("x", "f32/-10", NAN, one).ok


def test_inputs_follow_from_the_name():
    case = next(cases.all_cases())
    for first, second in zip(case.inputs()[0], case.inputs()[0], strict=True):
        np.testing.assert_array_equal(first, second)
    names = [case.name for case in cases.all_cases()]
    assert len(names) == len(set(names))


@pytest.fixture
def group():
    return cases.elementwise_case("integer", tuple(ops.INTEGER[:3]))


def _fake(case: cases.Case) -> np.ndarray:
    """Stands for a GPU: the first input, once for each instruction."""
    return np.concatenate([case.inputs()[0][0].view(np.uint32)] * len(case.rows))


def test_a_failing_member_does_not_hide_the_others(group):
    theirs = np.concatenate([_fake(group)[: cases.LANES]] * 3)

    def emulate(case):
        if len(case.rows) > 1 or case.rows[0][0] == group.rows[1][0]:
            raise RuntimeError("not modelled")
        return _fake(case)

    whole = cases.elementwise_case("integer", tuple(ops.INTEGER))
    theirs = np.concatenate([theirs[: cases.LANES]] * len(whole.rows))
    outcomes = runner.evaluate(whole, theirs, emulate)
    assert len(outcomes) == len(whole.rows)
    assert [o.ok for o in outcomes[:3]] == [True, False, True]
    assert outcomes[1].error == "RuntimeError: not modelled"


def _keep(folder, chosen: list[cases.Case]) -> None:
    """A recording of results that no GPU made."""
    np.savez(folder / "results.npz", **{record.key(case): _fake(case) for case in chosen})
    (folder / "machine.json").write_text('{"gpu": "none"}')


def test_records_are_read_back(group, tmp_path):
    _keep(tmp_path, [group])
    np.testing.assert_array_equal(record.recorded(tmp_path)(group), _fake(group))
    other = cases.elementwise_case("integer", tuple(ops.INTEGER[1:3]))
    with pytest.raises(KeyError):
        record.recorded(tmp_path)(other)


def test_a_condensed_recording_still_notices_one_bit(tmp_path, monkeypatch):
    exact = cases.elementwise_case("float", tuple(ops.FLOAT[:2]))
    near = cases.elementwise_case("approximate", tuple(ops.APPROXIMATE[:1]))
    monkeypatch.setattr(cases, "all_cases", lambda: iter([exact, near]))
    _keep(tmp_path, [exact, near])
    assert record.condense(tmp_path, tmp_path / "kept") == 3
    kept = record.Condensed(tmp_path / "kept")
    assert kept.has(exact) and kept.has(near)
    assert not kept.has(cases.elementwise_case("float", tuple(ops.FLOAT[1:3])))
    ours = _fake(exact)
    assert [o.ok for o in kept.evaluate(exact, ours)] == [True, True]
    at = int(np.flatnonzero(np.isfinite(ours[cases.LANES :].view(np.float32)))[0]) + cases.LANES
    ours[at] ^= 1
    assert [o.ok for o in kept.evaluate(exact, ours)] == [True, False]
    at = int(np.flatnonzero(np.isfinite(_fake(near).view(np.float32)))[0])
    for step, ok in ((1, True), (100, False)):
        ours = _fake(near)
        ours[at] += np.uint32(step)
        assert [o.ok for o in kept.evaluate(near, ours)] == [ok]


def test_a_case_that_ends_its_process_is_named_and_the_others_run(tmp_path, monkeypatch):
    """Stands for a GPU: a process that dies at one of its cases, as after an illegal instruction."""
    chosen = [cases.elementwise_case("integer", (op,)) for op in ops.INTEGER[:4]]
    chosen = [dataclasses.replace(case, name=f"case {i}") for i, case in enumerate(chosen)]
    by_name = {case.name: case for case in chosen}

    def process(command, input, **_):
        for name in json.loads(input):
            if name == "case 1":
                return subprocess.CompletedProcess(
                    command, 1, "", "Traceback\nAcceleratorError: illegal instruction\nhints"
                )
            np.save(Path(command[-1]) / f"{record.key(by_name[name])}.npy", _fake(by_name[name]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(record.subprocess, "run", process)
    assert record.record(tmp_path, chosen, jobs=2) == ["case 1: AcceleratorError: illegal instruction"]
    results = record.recorded(tmp_path)
    for i in (0, 2, 3):
        np.testing.assert_array_equal(results(chosen[i]), _fake(chosen[i]))
