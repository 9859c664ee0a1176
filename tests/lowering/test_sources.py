"""Fingerprints of source files: sensitive to what a module reaches, and to nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowering import places, sources
from lowering.errors import LoweringError

FILES = {
    "fpkg/__init__.py": "",
    "fpkg/host.py": (
        "from __future__ import annotations\nraise RuntimeError('this module must not be run')\n"
        "from .deep import helper\nfrom fpkg.blocks import (\n    tile,\n    copy,\n)\nimport torch, fother\n"
        "def host(mA: cute.Tensor, n: Int32, stream, config: cutlass.Constexpr = None):\n    pass\n"
    ),
    "fpkg/deep/__init__.py": "",
    "fpkg/deep/helper.py": "def f():\n    from .. import late\n",
    "fpkg/blocks/__init__.py": "",
    "fpkg/blocks/tile.py": "SIZE = 128\n",
    "fpkg/blocks/copy.py": "",
    "fpkg/late.py": "",
    "fpkg/unrelated.py": "",
    "fother.py": "",
}
REACHED = sorted(set(FILES) - {"fpkg/unrelated.py"})


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    for name, body in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    places._find_spec.cache_clear()
    yield tmp_path
    places._find_spec.cache_clear()


def digest() -> str:
    return sources.module_fingerprint("fpkg.host").digest


def test_reaches_exactly_the_modules_that_are_imported(project):
    fingerprint = sources.module_fingerprint("fpkg.host")
    assert sorted(os.path.relpath(p, project) for p in fingerprint.files) == REACHED
    assert "fpkg" not in sys.modules


@pytest.mark.parametrize("name", REACHED)
def test_every_reached_file_counts(project, name):
    before = digest()
    path = project / name
    path.write_text(path.read_text() + "\n# edited\n")
    assert digest() != before


FLAGGED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fpkg.unrelated\n"


@pytest.mark.parametrize(
    ("text", "counts"),
    (
        (FLAGGED, False),
        (f"{FLAGGED}else:\n    import fpkg.unrelated\n", True),
        (f"{FLAGGED}TYPE_CHECKING = True\n", True),
        (f"{FLAGGED}from fother import *\n", True),
        (FLAGGED.replace("typing", "fother"), True),
        (FLAGGED.replace("if TYPE", "if not TYPE"), True),
        (FLAGGED.replace("if TYPE", "if 1 or TYPE"), True),
    ),
)
def test_imports_for_type_checkers_do_not_count(project, text, counts):
    (project / "fpkg/late.py").write_text(text)
    before = digest()
    (project / "fpkg/unrelated.py").write_text("x = 1\n")
    assert (digest() != before) is counts


def test_other_files_and_places_do_not_count(project, tmp_path_factory, monkeypatch):
    before = digest()
    (project / "fpkg/unrelated.py").write_text("x = 1\n")
    assert digest() == before
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    os.rename(project, elsewhere)
    monkeypatch.syspath_prepend(elsewhere)
    places._find_spec.cache_clear()
    assert digest() == before


def test_same_size_same_second_edit_is_seen(project):
    """An edit that keeps the size, right after the first look, at a coarse clock's same time."""
    path = project / "fpkg/blocks/tile.py"
    stat = path.stat()
    before = digest()
    path.write_text("SIZE = 256\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest() != before


def test_changed_names_the_file(project):
    fingerprint = sources.module_fingerprint("fpkg.host")
    assert fingerprint.changed() == []
    path = project / "fpkg/late.py"
    path.write_text("x = 1\n")
    assert fingerprint.changed() == [str(path)]


def test_parameters_are_read_from_the_source(project):
    parameters = sources.function_parameters("fpkg.host", "host")
    assert [(p.name, p.annotation, p.has_default) for p in parameters] == [
        ("mA", "cute.Tensor", False),
        ("n", "Int32", False),
        ("stream", "", False),
        ("config", "cutlass.Constexpr", True),
    ]
    assert [p.is_runtime for p in parameters] == [True, True, False, False]


def test_unknown_modules_and_functions_are_named(project):
    with pytest.raises(LoweringError, match=r"'fpkg\.absent'"):
        sources.module_fingerprint("fpkg.absent")
    with pytest.raises(LoweringError, match=r"host\.py.*'guest'.*'host'"):
        sources.function_parameters("fpkg.host", "guest")


def test_facts_are_remembered_on_disk(project, tmp_path_factory):
    folder = tmp_path_factory.mktemp("memo")
    old = time.time() - 100
    for name in FILES:
        os.utime(project / name, (old, old))
    script = (
        "import sys\nfrom pathlib import Path\nfrom lowering import sources\n"
        f"folder = Path({str(folder)!r})\nsources.load_memo(folder)\n"
        "if sys.argv[1] == 'warm':\n    sources._read_facts = None\n"
        "print(sources.module_fingerprint('fpkg.host').digest)\nsources.save_memo(folder)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{root}"}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script, mode], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for mode in ("cold", "warm")
    ]
    assert outputs[0] == outputs[1] == digest() + "\n"
    (folder / sources.MEMO_NAME).write_text("{damaged")
    sources.load_memo(folder)  # ignored
