"""Kernels for the emulator that an earlier process kept: the same reports, and nothing compiled."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import report_kernels  # noqa: E402

from lowering import CompileRefused, cache, emulator  # noqa: E402
from lowering.emulator import call_stacks, kept, session  # noqa: E402
from lowering.emulator.reports import SourceLine  # noqa: E402

Forget = Callable[[], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache in use."""
    monkeypatch.setattr(cache, "_enabled", None)
    monkeypatch.setattr(cache, "_refuse", None)
    monkeypatch.setattr(cache, "_chosen_dir", tmp_path / "cache")
    return tmp_path / "cache" / "emulated"


@pytest.fixture
def another_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Forget:
    """From its call on, this process knows as little of what was compiled as another, which has traced other
    kernels of the same lines."""

    def forget(others: int = 3) -> None:
        monkeypatch.setattr(session, "_loaded", {})
        monkeypatch.setattr(call_stacks, "_recorded", call_stacks._Recorded())
        source = report_kernels.__file__
        for line, caller in itertools.product(range(1, 60), range(others)):
            call_stacks.column(call_stacks.CallStack((SourceLine(source, line), SourceLine(source, caller))))

    forget(others=0)
    return forget


def _reports() -> tuple[list[dict[str, object]], int]:
    """The findings of a kernel without its barrier, and how many kernels were compiled for them."""
    before = cache.stats()["compiles"]
    with emulator.run(raise_on_report=False) as run:
        report_kernels.run_exchange(torch.ones(128), torch.empty(128))
    return [report.as_dict() for report in run.reports], cache.stats()["compiles"] - before


def test_the_reports_are_the_same(another_process: Forget) -> None:
    first, compiled = _reports()
    assert compiled == 1
    assert any("exchange_kernel" in str(report) and "sX" in str(report) for report in first)
    another_process()
    again, compiled = _reports()
    assert compiled == 0
    assert again == first


def test_a_process_that_may_not_compile_runs_it(another_process: Forget) -> None:
    first, _ = _reports()
    another_process()
    cache.refuse_compile()
    assert _reports()[0] == first
    cache.clear()
    another_process()
    with pytest.raises(CompileRefused, match="for the emulator"):
        _reports()


def test_a_source_that_changed_means_compiling_again(
    another_process: Forget, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _reports()
    another_process()
    digests = kept._digests
    monkeypatch.setattr(kept, "_digests", lambda paths: dict.fromkeys(digests(paths), "changed"))
    assert _reports()[1] == 1


def test_a_source_at_another_place_means_compiling_again(tmp_path: Path) -> None:
    moved = tmp_path / "kernels.py"
    shutil.copy(report_kernels.__file__, moved)
    known = kept._digests([str(moved)])
    assert set(known) == {str(moved)} and len(known[str(moved)]) == 64
    moved.unlink()
    assert kept._digests([str(moved)]) == {str(moved): ""} != known


@pytest.mark.parametrize("damage", ["a byte", "others may write"])
def test_what_cannot_be_trusted_is_compiled_again(another_process: Forget, folder: Path, damage: str) -> None:
    first, _ = _reports()
    (entry,) = folder.glob("kernels/*/*.so")
    if damage == "a byte":
        data = bytearray(entry.read_bytes())
        data[10] ^= 1
        entry.write_bytes(bytes(data))
    else:
        entry.chmod(0o666)
    another_process()
    again, compiled = _reports()
    assert (again, compiled) == (first, 1)


def test_without_a_cache_nothing_is_kept(another_process: Forget, folder: Path) -> None:
    cache.disable()
    _reports()
    another_process()
    assert _reports()[1] == 1
    assert not folder.exists()
