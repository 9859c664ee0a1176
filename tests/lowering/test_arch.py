"""Architectures, and the driver where there is one."""

from __future__ import annotations

import importlib.metadata
import platform

import pytest

from lowering import ArgumentValueError, LoweringError, arch, toolchain


def test_limits_agree_with_the_compilers_table():
    from cutlass.memory import get_smem_capacity_in_bytes

    for name in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"):
        assert arch.limits(name).smem_per_block == get_smem_capacity_in_bytes(name), name


@pytest.mark.parametrize(
    ("code", "gpu", "runs"),
    [
        ("sm_80", "sm_89", True),
        ("sm_89", "sm_80", False),
        ("sm_90a", "sm_90a", True),
        ("sm_90", "sm_90a", True),
        ("sm_80", "sm_90a", False),
        ("sm_90a", "sm_100a", False),
        ("sm_100a", "sm_103a", False),
        ("sm_100", "sm_103a", True),
        ("sm_120", "sm_121a", True),
    ],
)
def test_what_runs_where(code, gpu, runs):
    assert arch.runs_on(code, gpu) == runs


def test_names():
    assert arch.capability("sm_90a") == (9, 0)
    assert arch.capability("sm_103a") == (10, 3)
    assert arch.of_capability(9, 0) == "sm_90a"
    assert arch.of_capability(8, 9) == "sm_89"
    for wrong in ("sm90", "90", ""):
        with pytest.raises(ArgumentValueError, match=r"sm_90a"):
            arch.check(wrong)


def test_a_device_that_is_not_there():
    with pytest.raises(LoweringError, match=r"device 99 does not exist"):
        arch.device(99)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 levels")
def test_processor_levels():
    assert toolchain.host_isa() in ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")
    assert toolchain.isa_runs_here("x86-64")
    assert toolchain.isa_runs_here(toolchain.host_isa())
    assert not toolchain.isa_runs_here("x86-64-v9")
    assert not toolchain.isa_runs_here("aarch64")


def test_toolchain_is_known_without_importing_the_compiler(run_python):
    script = (
        "import sys\nfrom lowering import toolchain\n"
        "print(toolchain.identity(), toolchain.runtime_library().exists())\n"
        "assert 'cutlass' not in sys.modules and 'torch' not in sys.modules"
    )
    done = run_python(script)
    assert done.stdout.rstrip().endswith("True")


def test_a_first_call_asks_torch_where_that_has_the_gpu_in_use(run_python):
    script = (
        "import sys, types\n"
        "cuda = types.SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2)\n"
        "cuda.get_device_capability = lambda index: (9, index)\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)\n"
        "from lowering import arch\n"
        "print(arch.device_count(), arch.arch_of_device(0), 'cuda.bindings.driver' in sys.modules)"
    )
    assert run_python(script).stdout.split() == ["2", "sm_90a", "False"]


def test_a_version_is_read_without_the_rest_of_its_metadata():
    for name, module in (("nvidia-cutlass-dsl", "nvidia_cutlass_dsl"), ("apache-tvm-ffi", "tvm_ffi")):
        assert toolchain._version(name, module) == importlib.metadata.version(name)
    with pytest.raises(LoweringError, match="no-such-package is not installed"):
        toolchain._version("no-such-package", "no_such_package")


def test_a_version_that_pip_did_not_leave_beside_the_module_is_asked_for(monkeypatch, tmp_path):
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert toolchain._version("torch", "elsewhere") == importlib.metadata.version("torch")


@pytest.mark.gpu
def test_the_gpu_agrees_with_torch():
    import torch

    found = arch.device(0)
    properties = torch.cuda.get_device_properties(0)
    assert found.name == properties.name
    assert found.sm_count == properties.multi_processor_count
    assert found.memory_bytes == properties.total_memory
    assert found.arch == arch.arch_of_device(0) == arch.of_capability(properties.major, properties.minor)
    assert found.smem_per_block == arch.limits(found.arch).smem_per_block
    assert found.l2_bytes == properties.L2_cache_size
