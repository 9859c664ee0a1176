"""No kernel touches memory that is not its own: small calls of each family under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = Path(__file__).with_name("calls.py")
TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
NAMES = ("gemm", "grouped", "attention", "backward", "attention_fp8", "bsr")
BOTH = [(name, family) for name in NAMES for family in ("sm90", "sm80")]
HOPPER = [("scaled", "sm90"), ("quantize", "sm90"), ("decode", "sm90")]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.skipif(TOOL is None, reason="no compute-sanitizer here: it comes with the CUDA toolkit")
@pytest.mark.parametrize(("name", "family"), BOTH + HOPPER)
def test_memcheck_has_no_report(name: str, family: str) -> None:
    command = [str(TOOL), "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "77"]
    done = subprocess.run(
        [*command, sys.executable, str(CALLS), name, family], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{name} {family}: right" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
