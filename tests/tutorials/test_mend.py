"""Broken kernels to mend: the emulator names the fault of each, and a mended copy passes.

That the steps as they are pass is held by `test_steps.py`.
"""

from __future__ import annotations

import os
import re

import pytest

KINDS = {
    "02": "DEADLOCK",
    "03": "READ_BEFORE_ARRIVAL|DEADLOCK",
    "04": "OVERWRITE_IN_USE|RACE",
    "05": "MISSING_WGMMA_FENCE",
    "06": "OVERWRITE_IN_USE",
    "07": "OVERWRITE_IN_USE",
    "08": "PEER_ENDED",
    "09": "MISSING_PROXY_FENCE",
    "10": "PENDING_REGISTER|OVERWRITE_IN_USE",
    "11": "OUT_OF_BOUNDS",
    "12": "OVERWRITE_IN_USE|ARRIVE_COUNT",
}
SLOW = {"08", "10", "11", "12"}
EVERY = os.environ.get("TEST_ALL_KERNELS") == "1"


def test_each_hopper_step_has_one():
    import mend

    steps = sorted(path.stem.split("_")[0] for path in mend.FOLDER.glob("[01]*_*.py"))
    assert sorted(mend.FAULTS) == sorted(KINDS) == [step for step in steps if step != "01"]
    for number, fault in mend.FAULTS.items():
        assert fault.why in mend.solution(number) and mend.broken(number)


@pytest.mark.parametrize("number", [n for n in KINDS if EVERY or n not in SLOW])
def test_broken_copy_is_reported(number, tmp_path):
    import mend

    copy = tmp_path / f"{mend.FAULTS[number].step}.py"
    copy.write_text(mend.broken(number))
    assert re.match(KINDS[number], mend.findings(copy))


def test_mended_copy_passes(tmp_path, monkeypatch, capsys):
    """The command: a copy is written and found wrong; with the fault mended it is right."""
    import mend

    monkeypatch.setattr(mend, "COPIES", tmp_path / "mend")
    monkeypatch.setattr("sys.argv", ["mend.py", "03"])
    assert mend.main() == 1
    assert "Mend " in capsys.readouterr().out
    fault, copy = mend.FAULTS["03"], tmp_path / "mend" / "03_pipeline.py"
    copy.write_text(copy.read_text().replace(fault.by, fault.text))
    assert mend.main() == 0
    assert capsys.readouterr().out.endswith("Right.\n")
