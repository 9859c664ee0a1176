"""The packages that are installed, and combinations of them that are known not to work.

`findings` is a pure function of versions and machine, so that every bad combination has a test.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass

DSL = "nvidia-cutlass-dsl"
DSL_PARTS = (
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)
OF_INTEREST = (
    DSL,
    *DSL_PARTS,
    "apache-tvm-ffi",
    "cuda-python",
    "cuda-bindings",
    "nvidia-cuda-nvdisasm",
    "nvidia-cuda-cuobjdump",
    "torch",
    "numpy",
    "nvidia-cutlass",
    "quack-kernels",
    "flash-attn-4",
)
# name: (first version of the range, first one beyond it), as in pyproject.toml; docs/support.md says which
# of them were tested
TESTED = {
    DSL: ((4, 8, 0), (4, 9)),
    "apache-tvm-ffi": ((0, 1, 11), (0, 2)),
    "cuda-bindings": ((12, 8), (14,)),  # the part of cuda-python that is used
    "torch": ((2, 11), (2, 16)),
    "numpy": ((1, 26), (3,)),
}
REQUIRED = (DSL, "apache-tvm-ffi", "cuda-bindings", "torch", "numpy")


@dataclass(frozen=True)
class Machine:
    """Facts of the machine that findings depend on beside the packages.

    driver_cuda: the newest CUDA version that the driver supports. torch_cuda: what torch was built for.
    """

    has_gpu: bool
    driver_cuda: tuple[int, int] | None = None
    torch_cuda: str | None = None


@dataclass(frozen=True)
class Finding:
    """One line of advice. An error means that kernels will not compile or not run here."""

    is_error: bool
    text: str


def installed() -> dict[str, str]:
    """Versions of the packages of interest, by name; those that are absent are left out."""
    found = {}
    for name in OF_INTEREST:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def release(version: str) -> tuple[int, ...]:
    """The numeric release of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def flavours(versions: Mapping[str, str]) -> list[int]:
    """CUDA majors for which the DSL's libraries are installed, such as [12, 13]."""
    return [major for major in (12, 13) if f"nvidia-cutlass-dsl-libs-cu{major}" in versions]


def flavour_in_use(versions: Mapping[str, str], driver_cuda: tuple[int, int] | None) -> int | None:
    """The flavour that the DSL loads: the newest that the driver supports. None: none fits."""
    candidates = flavours(versions)
    if driver_cuda is not None:
        candidates = [major for major in candidates if major <= driver_cuda[0]]
    return max(candidates, default=None)


def findings(versions: Mapping[str, str], machine: Machine) -> list[Finding]:
    """Everything that is wrong with this combination, errors first."""
    found = [*_absent(versions), *_mixed_dsl(versions), *_untested(versions), *_cuda(versions, machine)]
    return sorted(found, key=lambda finding: not finding.is_error)


def _absent(versions: Mapping[str, str]) -> list[Finding]:
    found = [
        Finding(True, f"{name} is not installed: pip install {name}")
        for name in REQUIRED
        if name not in versions
    ]
    if "nvidia-cuda-nvdisasm" not in versions:
        text = "nvidia-cuda-nvdisasm is not installed: no SASS, no spill counts"
        found.append(Finding(False, text))
    return found


def _mixed_dsl(versions: Mapping[str, str]) -> list[Finding]:
    if DSL not in versions:
        return []
    found = []
    for part in DSL_PARTS:
        if part in versions and versions[part] != versions[DSL]:
            fix = f"pip install --force-reinstall {DSL}=={versions[DSL]}"
            text = f"{part} is {versions[part]} but {DSL} is {versions[DSL]}; they share files. {fix}"
            found.append(Finding(True, text))
    if not flavours(versions):
        text = f"{DSL} has neither its CUDA 12 nor its CUDA 13 libraries: pip install '{DSL}[cu13]'"
        found.append(Finding(True, text))
    if "nvidia-cutlass" in versions:
        text = "nvidia-cutlass is installed too and has its own module cutlass: pip uninstall nvidia-cutlass"
        found.append(Finding(True, text))
    return found


def _untested(versions: Mapping[str, str]) -> list[Finding]:
    found = []
    for name, (first, end) in TESTED.items():
        if name in versions and not first <= release(versions[name]) < end:
            low, high = (".".join(str(part) for part in bound) for bound in (first, end))
            text = f"{name} {versions[name]} is outside of the supported range, {low} to below {high}"
            found.append(Finding(False, text))
    bindings, python = (versions.get(name, "") for name in ("cuda-bindings", "cuda-python"))
    if bindings and python and release(bindings)[:1] != release(python)[:1]:
        text = f"cuda-python {python} with cuda-bindings {bindings}: the majors must agree"
        found.append(Finding(True, text))
    return found


def _cuda(versions: Mapping[str, str], machine: Machine) -> list[Finding]:
    if not machine.has_gpu:
        return []
    found = []
    if "torch" in versions and machine.torch_cuda is None:
        text = f"torch {versions['torch']} is a CPU build on a machine with a GPU: install its CUDA build"
        found.append(Finding(True, text))
    flavour = flavour_in_use(versions, machine.driver_cuda)
    if DSL in versions and flavours(versions) and flavour is None:
        supported = ".".join(str(part) for part in machine.driver_cuda or ())
        text = (
            f"the driver supports CUDA {supported}, too old for the DSL's libraries here (CUDA "
            f"{flavours(versions)[0]}): pip install {DSL} for CUDA 12, or update the driver"
        )
        found.append(Finding(True, text))
    if machine.torch_cuda is not None and flavour is not None and release(machine.torch_cuda)[0] != flavour:
        text = (
            f"torch is built for CUDA {machine.torch_cuda} and the DSL loads its CUDA {flavour} libraries: "
            "it works, but is not what was measured"
        )
        if flavour == 12:
            text += f"; pip install '{DSL}[cu13]'"
        found.append(Finding(False, text))
    return found
