"""The wheel that carries compiled kernels: built, installed, and run by a process that may not compile."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNEL = "bsr row_lists"
ARCH = "sm_80"


def _run(*command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """One with two kernels."""
    out = tmp_path_factory.mktemp("wheel")
    made = _run(
        "tools/wheel.py", str(out), "--arch", ARCH, "--name", KERNEL, "--jobs", "1",
        KERNELS_DSL_CACHE_DIR=str(out / "made"), PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (built,) = out.glob("kernels_dsl-*-py3-none-any.whl")
    assert f"{built}: " in made.stdout and f"2 kernels for {ARCH}: " in made.stdout
    return built


@pytest.fixture
def installed(wheel, tmp_path):
    """Runs a command of the installed wheel, with an empty cache, where compiling is refused."""
    site = tmp_path / "site"
    done = _run("-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel))
    assert done.returncode == 0, done.stderr

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return _run(
            "-m", "kernels_dsl", *arguments, cwd=tmp_path, PYTHONPATH=str(site), KERNELS_DSL_NO_COMPILE="1",
            KERNELS_DSL_CACHE_DIR=str(tmp_path / "empty"),
        )  # fmt: skip

    return site, run


MAKE = ("compile", "--arch", ARCH, "--core", "--name", KERNEL, "--jobs", "1")


def test_the_wheel_has_bundles_and_no_other_file_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".py")]
    assert [name for name in names if "dist-info" not in name and not name.endswith("py.typed")] == [
        f"kernels_dsl/precompiled/{ARCH}.zip"
    ]
    assert not (ROOT / "kernels_dsl" / "precompiled").exists()


def test_a_process_that_may_not_compile_runs_on_it(installed):
    _, run = installed
    made = run(*MAKE)
    assert made.returncode == 0, made.stderr
    assert "was in the cache" in made.stdout and made.stderr == ""
    assert f"kernels    {ARCH} compiled already: 2 of 2 kernels fit" in run("doctor").stdout


def test_kernels_of_other_sources_are_of_no_effect(installed):
    site, run = installed
    for path in (site / "kernels_dsl" / "kernels").rglob("*.py"):
        path.write_text(path.read_text() + "\n# changed\n")
    made = run(*MAKE)
    assert made.returncode == 1 and "compiling is refused" in made.stdout + made.stderr
    assert "is not used" not in made.stderr
    assert "0 of 2 kernels fit: the others' sources have changed since" in run("doctor").stdout
