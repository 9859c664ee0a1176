"""Requirements of other packages, and those that a combination of versions turns off."""

from __future__ import annotations

import pytest

from kernels_dsl.cli import doctor
from kernels_dsl.cli.ecosystem import OWN, Package, installed_packages, torch_operators, unmet

HERE = {
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
    "torch": "2.15.0+cu130",
}
VLLM = Package("vllm", "0.33.0", ("torch==2.14.0", "nvidia-cutlass-dsl==4.8.0", "apache-tvm-ffi==0.1.11"))
FLASH = Package(
    "flash-attn-4", "4.0.0b36", ("nvidia-cutlass-dsl>=4.6.2", "apache-tvm-ffi>=0.1.5,<0.2", "torch")
)
CUDNN = Package("nvidia-cudnn-frontend", "1.32.0", ('nvidia-cutlass-dsl[cu13]>=4.8.0; extra == "cutedsl"',))


def _texts(package: Package, **changes: str) -> list[str]:
    found = unmet([package], {**HERE, **{name.replace("_", "-"): v for name, v in changes.items()}})
    assert not any(finding.is_error for finding in found)
    return [finding.text for finding in found]


def test_exact_requirements_are_named_one_by_one():
    assert _texts(VLLM) == [
        "vllm 0.33.0 asks for torch==2.14.0, here is 2.15.0+cu130: it may not work",
        "vllm 0.33.0 asks for nvidia-cutlass-dsl==4.8.0, here is 4.8.1: it may not work",
        "vllm 0.33.0 asks for apache-tvm-ffi==0.1.11, here is 0.1.15.post2: it may not work",
    ]
    wanted = {"torch": "2.14.0+cu130", "nvidia_cutlass_dsl": "4.8.0", "apache_tvm_ffi": "0.1.11"}
    assert _texts(VLLM, **wanted) == []


def test_ranges_and_prereleases():
    assert _texts(FLASH) == []
    assert _texts(FLASH, torch="2.16.0.dev20261001") == []
    assert _texts(FLASH, nvidia_cutlass_dsl="4.6.1") == [
        "flash-attn-4 4.0.0b36 asks for nvidia-cutlass-dsl>=4.6.2, here is 4.6.1: it may not work"
    ]


def test_an_optional_part_is_named_as_one():
    (text,) = _texts(CUDNN)
    assert text.startswith(
        "the part 'cutedsl' of nvidia-cudnn-frontend 1.32.0 asks for nvidia-cutlass-dsl[cu13]"
    )
    assert "here it has no CUDA 13 libraries" in text
    assert unmet([CUDNN], {**HERE, "nvidia-cutlass-dsl-libs-cu13": "4.8.1"}) == []


def test_what_is_absent_or_for_another_system_is_no_finding():
    other = Package("other", "1.0", ("torch<2; sys_platform == 'win32'", "cuda-python>=99"))
    assert _texts(other) == []


@pytest.mark.parametrize(("dsl", "off"), [("4.8.1", True), ("4.8.0", False)])
def test_operators_of_torch_that_do_not_accept_the_dsl(dsl, off):
    found = torch_operators(["4.6.2", "4.7.1", "4.8.0"], {**HERE, "nvidia-cutlass-dsl": dsl})
    assert bool(found) == off
    if off:
        assert "4.6.2, 4.7.1, 4.8.0: with 4.8.1 they are off" in found[0].text
    assert torch_operators([], HERE) == []


def test_what_is_installed_here_is_read():
    packages = installed_packages()
    assert all(package.requires for package in packages)
    assert OWN not in [package.name for package in packages]


def test_doctor_names_what_is_off(monkeypatch):
    """Whatever versions run the test, those that vLLM asks for among them."""
    here = {**doctor.packages.installed(), **HERE}
    monkeypatch.setattr(doctor.packages, "installed", lambda: here)
    monkeypatch.setattr(doctor.ecosystem, "installed_packages", lambda: [VLLM])
    monkeypatch.setattr(doctor, "torch_dsl_versions", lambda: ["4.6.2"])
    warnings = doctor.examine()["warnings"]
    assert any(warning.startswith("vllm 0.33.0 asks for torch==2.14.0") for warning in warnings)
    assert any(
        "CuTe DSL operators of its own, for nvidia-cutlass-dsl 4.6.2" in warning for warning in warnings
    )
