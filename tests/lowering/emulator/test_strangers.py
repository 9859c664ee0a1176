"""Kernels of packages from the index run in the emulator: `strangers.py`, in a process of its own.

quack replaces methods of the DSL's tensors when it is imported, for all that runs in the process afterwards.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("quack", "flash_attn")


def test_strangers() -> None:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra `strangers`)")
    tests = Path(__file__).with_name("strangers.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(tests)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout
