"""The benchmark of cold first calls: its rows, and a run in which kernels are compiled, not launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import cold_calls

ROOT = Path(__file__).parents[2]
# Tensors on the CPU; the call compiles what it would launch on a GPU.
RUN = """
import torch
from benchmarks import cold_calls

def lists():
    def call(library):
        from kernels_dsl.aot.bsr import list_kernels
        kernel = next(list_kernels("sm_80"))
        kernel.function.compile(*kernel.args, arch="sm_80", **kernel.constants)
        return [torch.ones(1)]
    return call, lambda: [torch.ones(1)]

cold_calls.CASES["lists"] = lists
cold_calls._begin = torch.cuda.synchronize = lambda: None
for row in cold_calls.rows(list(cold_calls.samples(["lists"], 2))):
    print(row["name"], row["state"], row["repeats"], row["compiles"], row["kernels"], row["error_of_largest"])
"""


def _sample(state: str, total: float) -> dict:
    seconds = {"import_s": 0.1, "total_s": total, "cpu_s": total}
    return {"name": "gemm", "state": state, **seconds, "compiles": 0, "kernels": 1, "error_of_largest": 0.0}


def test_a_row_has_the_least_and_the_median():
    found = [_sample("compiled", 3.0), _sample("compiled", 1.0), _sample("compiled", 2.0)]
    compiled, precompiled = cold_calls.rows([*found, _sample("precompiled", 0.2)])
    assert (compiled["least_s"], compiled["median_s"], compiled["repeats"]) == (1.0, 2.0, 3)
    assert (precompiled["state"], precompiled["repeats"]) == ("precompiled", 1)
    assert "0 of 1 kernels compiled" in cold_calls.line(precompiled)


def test_a_bundle_of_what_was_compiled_serves_the_second_state(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["lists compiled 2 1 1 0.0", "lists precompiled 2 0 1 0.0"]
