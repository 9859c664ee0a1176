"""Other packages that the installed versions turn off: by their requirements, and in PyTorch itself.

vLLM, flash-attn-4, quack, cudnn-frontend and others ask for versions of the DSL, of tvm-ffi and of torch,
some for exactly one. Their metadata says so, whichever releases they are.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kernels_dsl.cli.packages import DSL, Finding

SHARED = (DSL, "apache-tvm-ffi", "torch")
OWN = "kernels-dsl"  # its ranges are `packages.TESTED`


class Package(NamedTuple):
    """An installed package and what its metadata asks for."""

    name: str
    version: str
    requires: tuple[str, ...]


def installed_packages() -> list[Package]:
    """Every installed package that asks for one of SHARED."""
    found: dict[str, Package] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        requires = tuple(r for r in distribution.requires or () if _name(r) in SHARED)
        if name and requires and _normal(name) != OWN:
            found.setdefault(_normal(name), Package(name, distribution.version, requires))
    return [found[name] for name in sorted(found)]


def unmet(packages: Iterable[Package], versions: Mapping[str, str]) -> list[Finding]:
    """A warning for each requirement that an installed version does not meet, optional parts included."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [Finding(False, "packaging is not installed: other packages' requirements are not checked")]
    found = []
    for package in packages:
        for text in package.requires:
            requirement = Requirement(text)
            name = _normal(requirement.name)
            extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", text)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra[1] if extra else ""}):
                continue
            missing = _missing(requirement.specifier, requirement.extras, name, versions)
            if missing is not None:
                part = f"the part {extra[1]!r} of {package.name}" if extra else package.name
                wanted = text.partition(";")[0].strip()
                found.append(
                    Finding(False, f"{part} {package.version} asks for {wanted}, {missing}: it may not work")
                )
    return found


def _missing(specifier: Any, extras: Iterable[str], name: str, versions: Mapping[str, str]) -> str | None:
    """The fault of the installed version; None where it is right, or the package is absent."""
    if name not in versions:
        return None
    if not specifier.contains(versions[name], prereleases=True):
        return f"here is {versions[name]}"
    if name == DSL and "cu13" in extras and f"{DSL}-libs-cu13" not in versions:
        return "here it has no CUDA 13 libraries"
    return None


def torch_operators(accepted: Iterable[str], versions: Mapping[str, str]) -> list[Finding]:
    """A warning where PyTorch's own operators in the DSL do not accept it; `accepted`: versions they do."""
    accepted = list(accepted)
    if not accepted or DSL not in versions or "torch" not in versions or versions[DSL] in accepted:
        return []
    text = (
        f"torch {versions['torch']} has CuTe DSL operators of its own, for {DSL} {', '.join(accepted)}: with "
        f"{versions[DSL]} they are off"
    )
    return [Finding(False, text)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(requirement: str) -> str:
    """The package that a requirement is for."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)", requirement)
    return _normal(match[1]) if match else ""
