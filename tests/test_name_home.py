"""The README on a package index: every link and picture is a whole address, of a file that exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOME = "https://github.com/someone/kernels-dsl"


@pytest.fixture
def checkout(tmp_path):
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def _run(folder, *arguments):
    command = [sys.executable, ROOT / "tools" / "name_home.py", *arguments, "--folder", folder]
    return subprocess.run(command, capture_output=True, text=True)


def test_links_and_urls(checkout):
    done = _run(checkout, HOME, "v1.2.3")
    assert done.returncode == 0, done.stderr
    text, before = (folder / "README.md" for folder in (checkout, ROOT))
    text, before = text.read_text(), before.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?ms)^```.*?^```", "", text))
    assert len(links) > 30 and all(re.match(r"https://|#", link) for link in links)
    ours = [link for link in links if link.startswith(HOME)]
    for link in ours:
        path = re.fullmatch(rf"{HOME}/(?:blob|raw)/v1\.2\.3/([^#]+)(#.*)?", link)[1]
        assert (ROOT / path).exists(), link
    assert f"{HOME}/raw/v1.2.3/docs/plots/h200_overview.svg" in ours
    assert re.findall(r"(?ms)^```.*?^```", text) == re.findall(r"(?ms)^```.*?^```", before)
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and later read TOML")
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Source"] == HOME and project["scripts"]


def test_twice_is_refused_and_changes_nothing(checkout):
    assert _run(checkout, HOME, "v1").returncode == 0
    text = (checkout / "README.md").read_text()
    again = _run(checkout, HOME, "v2")
    assert again.returncode != 0 and "already" in again.stderr
    assert (checkout / "README.md").read_text() == text


def test_no_address_is_refused(checkout):
    done = _run(checkout, "kernels-dsl", "v1")
    assert done.returncode == 2 and "is no address" in done.stderr
