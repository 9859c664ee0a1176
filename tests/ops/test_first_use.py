"""The first use of a public name imports what it needs: no compiler, of PyTorch's or the DSL's."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels_dsl
from benchmarks import first_call, public_calls
from kernels_dsl.ops.attention.functions import name_of
from kernels_dsl.ops.tracing import constant_result

ROOT = Path(__file__).parents[2]
# Each name in a process that has imported torch alone: forks, which spare torch's own import.
EACH_NAME = """
import dataclasses, json, multiprocessing
from benchmarks import public_calls

process, written = dataclasses._process_class, []

def counted(cls, init, *rest, **more):
    if init:  # its methods are written and compiled
        written.append(f"{cls.__module__}.{cls.__qualname__}")
    return process(cls, init, *rest, **more)

def measure(name):
    dataclasses._process_class = counted
    return {**public_calls.measure(name, False), "written": written}

with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(measure, list(public_calls.CALLS), chunksize=1)))
"""
WARM = """
from benchmarks import public_calls
print(*public_calls.measure("gemm")["modules"])
"""
GARBAGE = """
import gc, sys
import torch, kernels_dsl

if sys.argv[1] == "frozen":
    gc.freeze()
elif sys.argv[1] == "off":
    gc.disable()
frozen, runs = gc.get_freeze_count(), []
gc.callbacks.append(lambda phase, info: runs.append(phase))
kernels_dsl.gemm
print(len(runs), gc.get_count()[0], gc.get_freeze_count() > frozen // 2, gc.isenabled())
"""
MODULES = 83  # of this library some 60, of tvm_ffi 3; lowering.kept in the emulator alone
WRITTEN_CLASSES = 4  # dataclasses whose methods Python compiles, 0.6 ms each; frozen ones: lowering.records
OWN = ("kernels_dsl", "lowering", "tvm_ffi", "cuda", "_cython")


def _python(program: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def uses() -> dict[str, dict]:
    """The first use of each public name, up to its launch, after torch."""
    return {made["name"]: made for made in json.loads(_python(EACH_NAME))}


def test_every_public_name_is_measured():
    assert {*public_calls.CALLS, *public_calls.NOT_CALLED} == {*kernels_dsl.__all__} - {"__version__"}


@pytest.mark.parametrize("name", public_calls.CALLS)
def test_first_use_imports_no_compiler(name, uses):
    modules = uses[name]["modules"]
    assert "kernels_dsl" in modules
    assert first_call.first_use_row(name, [_sample(name, modules)])["unwanted"] == []
    foreign = [m for m in modules if not m.startswith(OWN) and m.split(".")[0] not in sys.stdlib_module_names]
    assert len(foreign) <= 5, foreign  # a few small ones of torch's own, by its version
    assert len(modules) <= MODULES


@pytest.mark.parametrize("name", public_calls.CALLS)
def test_first_use_compiles_few_methods(name, uses):
    ours = [cls for cls in uses[name]["written"] if cls.startswith(("kernels_dsl.", "lowering."))]
    assert len(ours) <= WRITTEN_CLASSES, ours


def _sample(name: str, modules: list[str]) -> dict:
    times = dict.fromkeys(("import_ms", "call_ms", "total_ms", "cpu_ms"), 1.0)
    return {"name": name, "modules": modules, **times}


def test_an_unwanted_module_is_named():
    row = first_call.first_use_row("gemm", [_sample("gemm", ["torch._dynamo.utils", "sympyx", "cutlass"])])
    assert row["unwanted"] == ["torch._dynamo", "cutlass"]
    assert "torch._dynamo" in first_call.first_use_line(row)


def test_a_kernel_from_the_cache_is_loaded_without_a_compiler(tmp_path):
    variables = {"KERNELS_DSL_CACHE_DIR": str(tmp_path)}
    assert "cutlass" in _python(WARM, **variables).split()
    modules = _python(WARM, **variables, KERNELS_DSL_NO_COMPILE="1").split()
    assert first_call.first_use_row("gemm", [_sample("gemm", modules)])["unwanted"] == []


def test_the_import_looks_for_no_garbage_and_puts_none_off():
    runs, young, frozen, enabled = _python(GARBAGE, "on").split()
    assert (runs, frozen, enabled) == ("0", "False", "True")
    assert int(young) < gc.get_threshold()[0]


def test_the_import_leaves_what_the_caller_told_the_collector():
    assert _python(GARBAGE, "frozen").split()[2:] == ["True", "True"]
    assert _python(GARBAGE, "off").split()[3] == "False"


def test_marked_functions_are_what_pytorch_calls_constant():
    theirs = torch.compiler.assume_constant_result(lambda: 0)
    ours = constant_result(lambda: 0)
    assert vars(theirs) == vars(ours) != {}
    assert vars(name_of)["_dynamo_marked_constant"] is True


def test_the_compiler_calls_a_marked_function_while_it_traces():
    calls = []

    @constant_result
    def number() -> int:
        calls.append(1)
        return len(os.environ) * 0 + 3  # not traceable to a constant otherwise

    compiled = torch.compile(lambda x: x + number(), backend="eager", fullgraph=True)
    x = torch.ones(2)
    assert torch.equal(compiled(x), x + 3)
    assert torch.equal(compiled(x), x + 3)
    assert calls == [1]
