"""Fingerprints from an earlier process: taken while nothing changed, and never otherwise."""

from __future__ import annotations

import logging
import os
import sys
import time
import types
from pathlib import Path

import pytest

from lowering import places, reach, sources

FILES = {
    "rpkg/__init__.py": "",
    "rpkg/host.py": "import json\nfrom rpkg.blocks import tile, SIZE\ndef host(mA: cute.Tensor, n=1): ...\n",
    "rpkg/blocks/__init__.py": "SIZE = 1\n",
    "rpkg/blocks/tile.py": "from rpkg import optional\n",
    "rpkg/unrelated.py": "",
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    for name, body in FILES.items():
        path = tmp_path / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    _age(tmp_path / "code")
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setattr(reach, "_folder", [])
    monkeypatch.setattr(reach, "_known", {})
    _new_process(tmp_path)
    yield tmp_path
    _forget_places()


def _age(folder: Path) -> None:
    old = time.time() - 100
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (old, old))


def _forget_places() -> None:
    places._find_spec.cache_clear()
    places.is_foreign.cache_clear()


def _new_process(project: Path) -> None:
    _forget_places()
    reach.remember_in(project / "cache")


def _digest(project: Path) -> str:
    _new_process(project)
    return reach.module_fingerprint("rpkg.host").digest


@pytest.fixture
def followed(monkeypatch) -> list[str]:
    """Modules whose imports were followed."""
    calls, follow = [], sources.follow
    monkeypatch.setattr(sources, "follow", lambda module: calls.append(module) or follow(module))
    return calls


def test_a_later_process_follows_no_imports(project, followed):
    before = _digest(project)
    assert len(followed) == 1
    _new_process(project)
    found = reach.module_fingerprint("rpkg.host")
    parameters = reach.function_parameters("rpkg.host", "host")
    assert len(followed) == 1
    assert found == sources.module_fingerprint("rpkg.host") and found.digest == before
    assert parameters == sources.function_parameters("rpkg.host", "host")
    assert [p.name for p in parameters] == ["mA", "n"]


CHANGES = {
    "a file that it reaches": ("rpkg/blocks/tile.py", "x = 2\n"),
    "a module where there was none": ("rpkg/optional.py", ""),
    "a module in place of a name": ("rpkg/blocks/SIZE.py", ""),
    "a package in place of a module": ("rpkg/blocks/tile/__init__.py", ""),
}


@pytest.mark.parametrize("aged", (False, True))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(project, change, aged):
    before = _digest(project)
    name, body = change
    path = project / "code" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(body)
    if aged:
        os.utime(path, (1e9, 1e9))
    after = _digest(project)
    assert after == sources.module_fingerprint("rpkg.host").digest != before


def test_a_module_that_came_from_elsewhere_is_seen(project, monkeypatch):
    before = _digest(project)
    other = project / "other.py"
    other.write_text("x = 3\n")
    loaded = types.ModuleType("rpkg.blocks.tile")
    loaded.__file__ = str(other)
    monkeypatch.setitem(sys.modules, "rpkg.blocks.tile", loaded)
    assert _digest(project) == sources.module_fingerprint("rpkg.host").digest != before


def test_another_package_of_that_name_is_another(project, monkeypatch):
    before = _digest(project)
    copy = project / "first_on_the_path"
    for name, body in FILES.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(body + "# a copy\n")
    monkeypatch.syspath_prepend(copy)
    assert _digest(project) != before


def test_not_remembered(project, followed):
    """Files that may change again unseen; a module of another project; a module that is no package's."""
    (project / "code/rpkg/blocks/tile.py").write_text("x = 2\n")
    _digest(project)
    assert not list((project / "cache").iterdir())
    (project / "code/beside.py").write_text("")
    (project / "code/rpkg/blocks/tile.py").write_text("import beside\n")
    _age(project / "code")
    _digest(project)
    reach.module_fingerprint("beside")
    assert not list((project / "cache").iterdir())


@pytest.mark.parametrize("damage", ("{damaged", "[]", '["0", {"rpkg.host": 1}, {}, [], {}]'))
def test_a_damaged_record_is_made_anew(project, followed, damage):
    before = _digest(project)
    (path,) = (project / "cache").iterdir()
    path.write_text(damage)
    assert _digest(project) == before
    assert len(followed) == 2


def test_a_record_that_others_can_write_is_not_taken(project, followed, caplog):
    before = _digest(project)
    (path,) = (project / "cache").iterdir()
    path.write_text(path.read_text().replace(before, "0" * 64))
    path.chmod(0o666)
    with caplog.at_level(logging.WARNING, "lowering"):
        assert _digest(project) == before
    assert str(path) in caplog.text


def test_one_look_takes_each_time_once_and_sees_changes_afterwards(project, monkeypatch):
    reach.module_fingerprint("rpkg.host"), reach.module_fingerprint("rpkg.blocks.tile")
    looked, stamp = [], reach.file_stamp
    monkeypatch.setattr(reach, "file_stamp", lambda path: looked.append(path) or stamp(path))
    with reach.one_look():
        before = reach.module_fingerprint("rpkg.host").digest
        reach.function_parameters("rpkg.host", "host")
        reach.module_fingerprint("rpkg.blocks.tile")
        with reach.one_look():  # within another it is the same look
            reach.module_fingerprint("rpkg.host")
    assert looked and len(looked) == len(set(looked))
    tile = project / "code" / "rpkg" / "blocks" / "tile.py"
    tile.write_text("from rpkg import optional\nSIZE = 2\n")
    assert reach.module_fingerprint("rpkg.host").digest != before
