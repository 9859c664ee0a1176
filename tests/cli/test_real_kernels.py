"""The commands with real kernels: compiled here, carried in a bundle, looked at, emulated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels_dsl.cli import kernels

ROOT = Path(__file__).parents[2]
# The smallest tiles compile fastest; with the split there are two kernels of this name.
NAME = "sm90 64x32"
KIND = "bf16 nn"


def _cli(*arguments, cache, **environment):
    command = [sys.executable, "-m", "kernels_dsl", *map(str, arguments)]
    variables = {**os.environ, "KERNELS_DSL_CACHE_DIR": str(cache), **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables)


@pytest.fixture(scope="module")
def names():
    """The two kernels that these tests compile."""
    found = [kernel.name for kernel in kernels.shipped("sm_90a", name=NAME) if kernel.name.endswith(KIND)]
    return [name for name in found if "along-n" not in name]


def test_compile_bundle_load_inspect(tmp_path, names):
    here, there, bundle = tmp_path / "here", tmp_path / "there", tmp_path / "kernels.zip"
    compile_args = ["compile", "--arch", "sm_90a", "--name", names[0]]
    done = _cli(*compile_args, "--jobs", 2, "--check", "--bundle", bundle, cache=here)
    assert done.returncode == 0, done.stderr
    assert "1 compiled, 0 already there, 0 failed" in done.stdout
    assert f"wrote {bundle}: 1 kernels" in done.stdout
    again = _cli(*compile_args, cache=here)
    assert "0 compiled, 1 already there, 0 failed" in again.stdout

    refused = _cli("inspect", "gemm", "--name", names[0], cache=there, KERNELS_DSL_NO_COMPILE="1")
    assert refused.returncode == 1
    assert "compiling is refused" in refused.stderr
    assert "Traceback" not in refused.stderr
    loaded = _cli("load", bundle, cache=there)
    assert loaded.returncode == 0, loaded.stderr
    assert "1 kernels loaded, 0 refused" in loaded.stdout
    shown = _cli("inspect", "gemm", "--name", names[0], cache=there, KERNELS_DSL_NO_COMPILE="1")
    assert shown.returncode == 0, shown.stderr
    assert "no spills" in shown.stdout
    assert "HGMMA" in shown.stdout
    assert "UTMALDG" in shown.stdout


def test_unknown_arch_and_name_exit_with_two(tmp_path):
    for arch in ("sm_42", "sm_90"):  # WGMMA and TMA need sm_90a
        done = _cli("compile", "--arch", arch, cache=tmp_path)
        assert done.returncode == 2
        assert f"arch is '{arch}', must be one of sm_80, " in done.stderr
    done = _cli("inspect", "gemm", "--name", "no such kernel", cache=tmp_path)
    assert done.returncode == 2
    assert "no kernel for sm_90a has 'no such kernel' in its name; --list names all 669" in done.stderr
    done = _cli("inspect", "gemm", "--name", "sm90 128x256 cluster 2x1 bf16 tn", cache=tmp_path)
    assert "the nearest are:\n  gemm sm90 128x256 cluster 2x1 bf16 " in done.stderr


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_kernels_have_names_of_their_own(arch):
    names = [kernel.name for kernel in kernels.shipped(arch)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_common_kernels_are_as_many_as_the_documentation_says(arch):
    found = kernels.shipped(arch, listing="common")
    assert len({kernel.name for kernel in found}) == len({kernel.key(arch) for kernel in found}) == len(found)
    page = (ROOT / "docs/reference/command_line.md").read_text()
    documented = re.search(rf"^\| {arch} \| (\d+) \|", page, re.M)
    assert documented is not None and 0.9 < len(found) / int(documented[1]) < 1.1


def test_spread_takes_first_and_last():
    assert kernels.spread(list(range(10)), 3) == [0, 4, 9]
    assert kernels.spread(list(range(3)), 5) == [0, 1, 2]
    assert kernels.spread(list(range(3)), 1) == [0]
    assert kernels.spread([], 2) == []


def test_demo_without_a_gpu_from_start_to_end(tmp_path):
    done = _cli("demo", "--compile-only", "--kernels", 1, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "none is run on a GPU" in done.stdout
    assert done.stdout.count("no spills") == 2
    assert done.stdout.count("from disk") == 2
    assert done.stdout.count("the compiler was not imported") == 2
    assert done.stdout.count("equal to the float64 reference, bit for bit") == 2
    assert "mbarrier" in done.stdout


@pytest.mark.gpu
def test_demo_on_a_gpu_from_start_to_end(tmp_path):
    done = _cli("demo", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right: rms error") == 4
    assert "the compiler was not imported" in done.stdout
