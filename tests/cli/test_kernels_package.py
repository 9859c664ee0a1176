"""The wheel of compiled kernels: made, unpacked, and found by a process that may not compile."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNEL = "bsr row_lists int32"
ARCH = "sm_80"


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_a_process_that_may_not_compile_runs_on_the_wheel(tmp_path):
    out, site = tmp_path / "out", tmp_path / "site"
    made = _run(
        "tools/kernels_package.py", str(out), "--arch", ARCH, "--name", KERNEL, "--jobs", "1",
        KERNELS_DSL_CACHE_DIR=str(tmp_path / "made"),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (wheel,) = out.glob("kernels_dsl_kernels-*-py3-none-any.whl")
    assert wheel.name in made.stdout
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        text = archive.read(metadata).decode()
    assert "Requires-Dist: nvidia-cutlass-dsl==" in text and "Requires-Dist: kernels-dsl==" in text
    command = ("-m", "kernels_dsl", "compile", "--arch", ARCH, "--name", KERNEL, "--jobs", "1")
    empty = {"KERNELS_DSL_CACHE_DIR": str(tmp_path / "empty"), "KERNELS_DSL_NO_COMPILE": "1"}
    without = _run(*command, **empty)
    assert without.returncode == 1 and "compiling is refused" in without.stdout + without.stderr
    found = _run(*command, **empty, PYTHONPATH=os.pathsep.join((str(ROOT), str(site))))
    assert found.returncode == 0, found.stderr
    assert "compiling" not in found.stderr
