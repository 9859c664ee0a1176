"""`doctor`: what this machine has and lacks: GPU, driver, packages, cache. Exits with 1 for a problem."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

from kernels_dsl.cli import ecosystem, kernels, packages
from kernels_dsl.cli.errors import CheckFailed, UsageError


def add_command(commands: Any) -> None:
    """Add `doctor` to the parser."""
    parser = commands.add_parser("doctor", help="what this machine has and lacks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for; None for a CPU build or no torch."""
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def torch_dsl_versions() -> list[str]:
    """Versions of the DSL that PyTorch's own operators written in it accept; none where it has none."""
    if torch_cuda() is None:
        return []
    try:
        from torch._native import cutedsl_utils
    except ImportError:
        return []
    accepted = getattr(cutedsl_utils, "_CUTEDSL_REQUIRED_VERSIONS", ())
    return sorted(str(version) for version in accepted)


def gpu_facts() -> list[dict[str, Any]]:
    """Every GPU that this process sees, from the driver; none where the driver or cuda-python is missing."""
    try:
        from lowering import arch

        devices = [arch.device(index) for index in range(arch.device_count())]
    except ImportError:
        return []
    return [
        {
            "name": device.name,
            "arch": device.arch,
            "sms": device.sm_count,
            "smem_per_block": device.smem_per_block,
            "memory_gib": device.memory_bytes / 2**30,
            "families": families(device.arch),
        }
        for device in devices
    ]


def families(arch: str) -> list[str]:
    """The kernel families that run on an arch, the fastest first."""
    from kernels_dsl.config.problem import Device
    from lowering.arch import capability

    return list(Device("", capability(arch), 0, 0).families())


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports; None without a driver or cuda-python."""
    try:
        from lowering import arch
    except ImportError:
        return None
    return arch.driver_version()


def cache_facts() -> dict[str, Any]:
    """The kernel cache: its folder, what is in it, and whether it is used."""
    from lowering import cache

    stats = cache.stats()
    usable = cache.enabled() and cache.store() is not None
    state = "in use" if usable else ("cannot be used" if cache.enabled() else "switched off")
    return {
        "folder": str(stats["dir"]),
        "state": state,
        "kernels": stats["entries"],
        "mib": round(int(stats["bytes"]) / 2**20, 1),
        "limit_mib": cache.size_limit() // 2**20,
        "compiling": "refused" if cache.compiling_refused() else "allowed",
    }


def precompiled() -> dict[str, str]:
    """Texts on the compiled kernels that this installation carries, by architecture."""
    from lowering import shipped
    from lowering.errors import LoweringError

    said = {}
    for path in shipped.carried():
        try:
            said[path.stem] = _fit(path.stem, *shipped.keys_of(path))
        except (LoweringError, UsageError, ImportError, OSError) as error:
            said[path.stem] = f"not used: {error}"
    return said


def _fit(arch: str, keys: set[str], reason: str | None) -> str:
    """Says how many kernels with these keys a call would take, or why it takes none."""
    if reason is not None:
        return f"none of {len(keys)} kernels is used: {reason}"
    wanted = {kernel.key(arch) for kernel in kernels.shipped(arch, listing="core")}
    stale = "" if keys <= wanted else ": the others' sources have changed since"
    return f"{len(keys & wanted)} of {len(keys)} kernels fit{stale}"


def examine() -> dict[str, Any]:
    """All facts and findings, as JSON-able data."""
    versions = packages.installed()
    gpus = gpu_facts()
    machine = packages.Machine(bool(gpus), driver_cuda(), torch_cuda())
    found = packages.findings(versions, machine)
    found += ecosystem.torch_operators(torch_dsl_versions(), versions)
    found += ecosystem.unmet(ecosystem.installed_packages(), versions)
    for gpu in gpus:
        if not gpu["families"]:
            text = (
                f"{gpu['name']} ({gpu['arch']}) runs none of the kernels: compute capability 8.0 is the least"
            )
            found.append(packages.Finding(True, text))
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "gpus": gpus,
        "driver_cuda": machine.driver_cuda,
        "torch_cuda": machine.torch_cuda,
        "packages": versions,
        "dsl_flavour": packages.flavour_in_use(versions, machine.driver_cuda),
        "cache": cache_facts(),
        "precompiled": precompiled(),
        "errors": [finding.text for finding in found if finding.is_error],
        "warnings": [finding.text for finding in found if not finding.is_error],
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """`examine` for people."""
    text = [f"Python     {facts['python']}  {facts['executable']}"]
    for gpu in facts["gpus"]:
        text.append(
            f"GPU        {gpu['name']}, {gpu['arch']}, {gpu['sms']} SMs, {gpu['memory_gib']:.0f} GiB, "
            f"kernel families: {', '.join(gpu['families']) or 'none'}"
        )
    if not facts["gpus"]:
        text.append("GPU        none: kernels can be compiled, inspected and emulated, not run")
    driver = facts["driver_cuda"]
    text.append("driver     " + (f"supports CUDA {driver[0]}.{driver[1]}" if driver else "none"))
    text.append(
        f"torch      built for {'CUDA ' + facts['torch_cuda'] if facts['torch_cuda'] else 'the CPU alone'}"
    )
    flavour = facts["dsl_flavour"]
    text.append(f"DSL        libraries in use: {f'CUDA {flavour}' if flavour else 'none'}")
    text += [f"package    {name} {version}" for name, version in facts["packages"].items()]
    text += [f"cache      {key}: {value}" for key, value in facts["cache"].items()]
    text += [f"kernels    {arch} compiled already: {said}" for arch, said in facts["precompiled"].items()]
    text += [f"warning    {warning}" for warning in facts["warnings"]]
    text += [f"ERROR      {error}" for error in facts["errors"]]
    return text


def run(args: argparse.Namespace) -> int:
    """Print the facts; CheckFailed where one of them keeps kernels from compiling or running."""
    facts = examine()
    print(json.dumps(facts, indent=1) if args.json else "\n".join(lines(facts)))
    if facts["errors"]:
        raise CheckFailed(f"{len(facts['errors'])} problems found")
    return 0
