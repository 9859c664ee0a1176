"""The DSL is imported without jax, and takes generic annotations on Python 3.10."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lowering import dsl_import

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.path.insert(0, {fake!r})
{before}
import torch
import lowering
from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.config.gemm import EntryLayout
from kernels_dsl.ops.gemm import kernels as gemm_kernels

x, d, w = (torch.empty(shape, device="meta") for shape in ((2, 64, 64), (64, 64), (64, 64)))
layout = EntryLayout((), False)
gemm_kernels.FUNCTIONS["splitk_reduce"].compile(
    x, d, None, arch="sm_80", split_k=2, epilogue=LinearEpilogue(), layout=layout, early=False
)
assert "cutlass" in sys.modules
print("jax" in sys.modules)
import jax
print(jax.marker)
"""


def _run(tmp_path: Path, before: str) -> list[str]:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("marker = 'a stand-in for jax'\n")
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "KERNELS_DSL_CACHE_DIR": str(tmp_path / "cache"),
    }
    program = PROGRAM.format(fake=str(tmp_path), before=before)
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_compile_leaves_jax_alone_and_importable(tmp_path: Path) -> None:
    assert _run(tmp_path, "") == ["False", "a stand-in for jax"]


def test_a_jax_that_is_there_already_stays(tmp_path: Path) -> None:
    assert _run(tmp_path, "import jax; jax.version = None; jax.__path__.append('x')")[0] == "True"


def test_generic_tuples_are_tuples_where_python_takes_them_for_types(monkeypatch) -> None:
    assert dsl_import._isinstance((1, 2), tuple[int, int]) and not dsl_import._isinstance(3, tuple[int, int])
    assert dsl_import._isinstance(3, (int, str)) and not dsl_import._isinstance("x", int)
    with pytest.raises(TypeError):
        dsl_import._isinstance(3, 4)
    module = ModuleType("cutlass.cutlass_dsl.cutlass")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with dsl_import.without_jax():
        pass
    assert module.isinstance is dsl_import._isinstance


COLD = """
import gc
import torch
import lowering
from lowering.dsl_import import without_jax
from user_kernels import Config, affine, same

looks = []
gc.callbacks.append(lambda phase, info: looks.append(phase))
with without_jax():
    import cutlass.cute
print(len(looks), gc.isenabled(), gc.get_freeze_count())
from cutlass.base_dsl.compiler import Compiler

def refused(self, *rest, **more):
    raise AssertionError("the DSL makes an engine")

Compiler.jit = refused
x = torch.empty(64, device="meta")
constants = {"config": Config(threads=64), "function": same}
print(lowering.jit(affine).compile(x, x, (2.0, x), 64, arch="sm_80", **constants).source)
"""


def test_a_cold_compile_makes_no_engine_and_the_import_looks_for_no_garbage(run_python) -> None:
    # CUTE_DSL_ARCH: as if a GPU of this architecture were there, for which the DSL would make an engine.
    done = run_python(COLD, CUTE_DSL_ARCH="sm_80")
    assert done.stdout.splitlines() == ["0 True 0", "compiled"]
