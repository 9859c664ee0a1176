"""A process that may not compile runs common calls on the GPU, with a bundle as the only source of kernels.

TEST_ALL_KERNELS=1 takes all calls, whose kernels take minutes to compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowering.arch import arch_of_device
from tests.samples import ALL

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.parametrize("match", [""] if ALL else ["merge_states", "append_kv"])
def test_a_process_that_may_not_compile(tmp_path, match):
    bundle = tmp_path / "kernels.zip"
    making = ["kernels_dsl", "compile", "--arch", arch_of_device(0), "--common", "--bundle", str(bundle)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    _run(*making, *(["--name", match] if match else []), **variables)
    of_server = {"KERNELS_DSL_NO_COMPILE": "1", "KERNELS_DSL_BUNDLES": str(bundle)}
    variables |= {"KERNELS_DSL_CACHE_DIR": str(tmp_path / "empty"), **of_server}
    assert ", 0 failed" in _run("tests.aot.worker", "--match", match, **variables)


def _run(*module: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *module], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
