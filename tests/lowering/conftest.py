"""A cache folder for each test, and processes that use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowering import cache, function

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def cache_dir(tmp_path: Path) -> Iterator[Path]:
    """An empty cache, with nothing in memory either."""
    folder = tmp_path / "cache"
    function.forget_loaded()
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


def process_environment(tmp_path: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(tmp_path), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "KERNELS_DSL_CACHE_DIR": str(tmp_path / "cache"), **more}
