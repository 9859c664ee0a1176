"""Each bad combination of packages is named, and good ones give no finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels_dsl.cli.packages import TESTED, Machine, findings, flavour_in_use, installed, release

GOOD = {
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-core": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
    "cuda-python": "13.4.4",
    "cuda-bindings": "13.4.4",
    "nvidia-cuda-nvdisasm": "13.5.37",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
}
CPU = Machine(has_gpu=False)
HOPPER = Machine(has_gpu=True, driver_cuda=(13, 0), torch_cuda="13.0")


OLDEST = {
    **{name: version.replace("4.8.1", "4.8.0") for name, version in GOOD.items()},
    "apache-tvm-ffi": "0.1.11",
}


@pytest.mark.parametrize("machine", [CPU, HOPPER])
@pytest.mark.parametrize("changes", [{}, {"torch": "2.11.0"}, {"torch": "2.15.0"}])
def test_a_good_combination_has_no_findings(machine, changes):
    for good in (GOOD, OLDEST):
        assert findings({**good, **changes}, machine) == []


@pytest.mark.parametrize(
    ("changes", "machine", "text"),
    [
        ({"apache-tvm-ffi": None}, CPU, "apache-tvm-ffi is not installed"),
        ({"nvidia-cutlass-dsl": None}, CPU, "nvidia-cutlass-dsl is not installed"),
        ({"nvidia-cutlass-dsl-libs-base": "4.3.0"}, CPU, "libs-base is 4.3.0 but"),
        ({"nvidia-cutlass-dsl-libs-cu13": "4.7.0"}, HOPPER, "libs-cu13 is 4.7.0"),
        (
            {"nvidia-cutlass-dsl-libs-cu12": None, "nvidia-cutlass-dsl-libs-cu13": None},
            CPU,
            "neither its CUDA 12 nor its CUDA 13",
        ),
        ({"nvidia-cutlass": "4.2.0"}, CPU, "pip uninstall nvidia-cutlass"),
        ({"cuda-bindings": "12.9.1"}, CPU, "the majors must agree"),
        ({}, Machine(True, (13, 0), None), "CPU build on a machine with a GPU"),
        (
            {"nvidia-cutlass-dsl-libs-cu12": None},
            Machine(True, (12, 8), "12.6"),
            "the driver supports CUDA 12.8, too old for the DSL's libraries here (CUDA 13)",
        ),
    ],
)
def test_an_error_is_named(changes, machine, text):
    versions = {name: version for name, version in {**GOOD, **changes}.items() if version is not None}
    errors = [finding.text for finding in findings(versions, machine) if finding.is_error]
    assert len(errors) == 1, errors
    assert text in errors[0]


@pytest.mark.parametrize(
    ("changes", "machine", "text"),
    [
        ({"torch": "2.3.0"}, CPU, "torch 2.3.0 is outside of the supported range, 2.11 to below 2.16"),
        ({"torch": "2.16.0"}, CPU, "torch 2.16.0 is outside of the supported range, 2.11 to below 2.16"),
        ({"apache-tvm-ffi": "0.1.10"}, CPU, "apache-tvm-ffi 0.1.10 is outside of the supported"),
        ({"nvidia-cuda-nvdisasm": None}, CPU, "no SASS"),
        ({"nvidia-cutlass-dsl-libs-cu13": None}, HOPPER, "CUDA 13.0 and the DSL loads its CUDA 12"),
    ],
)
def test_a_warning_is_no_error(changes, machine, text):
    versions = {name: version for name, version in {**GOOD, **changes}.items() if version is not None}
    found = findings(versions, machine)
    assert [finding.is_error for finding in found] == [False]
    assert text in found[0].text


def test_flavour_follows_the_driver():
    assert flavour_in_use(GOOD, None) == 13
    assert flavour_in_use(GOOD, (13, 0)) == 13
    assert flavour_in_use(GOOD, (12, 8)) == 12


def test_release_of_odd_versions():
    assert release("0.1.15.post2") == (0, 1, 15)
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("unknown") == ()


def test_what_is_installed_here_is_a_good_combination():
    assert not [finding for finding in findings(installed(), CPU) if finding.is_error]


def test_tested_ranges_are_those_of_the_project_file():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, (first, end) in TESTED.items():
        low, high = (".".join(str(part) for part in bound) for bound in (first, end))
        listed = {"cuda-bindings": "cuda-python"}.get(name, name)
        assert f'"{listed}>={low},<{high}"' in text
