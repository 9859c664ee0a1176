"""Two threads whose first call finds a kept kernel: the compiler is imported once, by one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

ROOT = Path(__file__).parents[3]
PROGRAM = """
import importlib.machinery, threading, time
import torch
import kernels_dsl
from lowering import cache

begun, found = threading.Event(), [None, None]
execute = importlib.machinery.SourceFileLoader.exec_module

def slowly(self, module):
    if module.__name__.startswith("cutlass._mlir"):
        pause = 0.01 if begun.is_set() else 0.5
        begun.set()
        time.sleep(pause)
    execute(self, module)

def call(index):
    a = torch.ones(16, 32, dtype=torch.float16)
    if index == 1:
        begun.wait(60)  # the compiler's import is under way
    try:
        found[index] = kernels_dsl.gemm(a, a.t())
    except Exception as error:
        found[index] = error

importlib.machinery.SourceFileLoader.exec_module = slowly
threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for result in found:
    if isinstance(result, Exception):
        raise result
    assert (result == 32).all()
assert begun.is_set()
print(cache.stats()["compiles"])
"""


def _compiles(folder: Path) -> str:
    environment = {**os.environ, "KERNELS_DSL_EMULATE": "sm_80", "KERNELS_DSL_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_both_run_a_kept_kernel(tmp_path: Path) -> None:
    assert _compiles(tmp_path) == "1"
    assert _compiles(tmp_path) == "0"
