"""A cache folder for each test, and processes that use it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from user_project import process_environment

from lowering import cache, function


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, with nothing in memory either."""
    folder = tmp_path / "cache"
    function.forget_loaded()
    monkeypatch.setattr(cache, "_enabled", None)  # whatever a test switches off is on again afterwards
    monkeypatch.setattr(cache, "_refuse", None)
    with cache.use(folder):
        yield folder
    function.forget_loaded()


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a new process, with ``tmp_path`` first on its path and its cache there."""

    def run(script: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=process_environment(tmp_path, **environment),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run
