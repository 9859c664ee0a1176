"""One run for all steps."""

from __future__ import annotations

import types

import pytest


def test_each_step_is_checked_measured_and_written(tmp_path, monkeypatch):
    import common
    import measure_all

    seen = []

    def load(name):
        check, measure = (lambda lab: seen.append(name)), (lambda bench: bench.remarks.append(name))
        return types.SimpleNamespace(check=check, measure=measure)

    monkeypatch.setattr(common, "load", load)
    monkeypatch.setattr(common.Bench, "save", lambda bench, path: path.write_text(bench.remarks[0]))
    measure_all.main(tmp_path / "new", [])
    written = {path.stem: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == measure_all.STEPS
    assert seen == list(measure_all.STEPS.values())


def test_some_steps_only(tmp_path, monkeypatch):
    import common
    import measure_all

    monkeypatch.setattr(common, "load", lambda name: pytest.fail("nothing is to be measured here"))
    with pytest.raises(KeyError):
        measure_all.main(tmp_path, ["13"])
