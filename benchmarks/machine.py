"""The header of every result: GPU, clocks, power cap, driver, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_QUERY = {
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_cap_w": "power.limit",
    "power_draw_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "driver": "driver_version",
}
_PACKAGES = (
    "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "cuda-bindings", "quack-kernels",
    "flash-attn-4",
)  # fmt: skip


def commit() -> str:
    """The commit that is measured: KERNELS_DSL_COMMIT where a checkout came without .git, else git's word."""
    named = os.environ.get("KERNELS_DSL_COMMIT")
    if named:
        return named
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def driver_facts() -> dict[str, str]:
    """Clocks, power, temperature and driver of GPU 0 from nvidia-smi; empty where it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = f"--query-gpu={','.join(_QUERY.values())}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", "0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_QUERY, (part.strip() for part in answer.split(","))))


def header() -> dict[str, Any]:
    """Facts that a reader needs to judge a number: machine, state, versions, commit. Needs a GPU."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions.setdefault("torch", torch.__version__)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size // 2**20,
        "memory_gib": properties.total_memory // 2**30,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        **driver_facts(),
    }


def header_lines(facts: dict[str, Any]) -> list[str]:
    """`header` for people, in three lines."""
    absent = "?"
    clocks = (
        f"SM clock {facts.get('sm_clock_mhz', absent)} of {facts.get('sm_clock_max_mhz', absent)} MHz, "
        f"memory {facts.get('memory_clock_mhz', absent)} MHz, power cap {facts.get('power_cap_w', absent)} W"
    )
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    chip = f"{facts['gpu']} ({facts['sms']} SMs, L2 {facts['l2_mib']} MiB)"
    return [
        f"{chip}, driver {facts.get('driver', absent)}, {clocks}",
        f"CUDA {facts['cuda']}, Python {facts['python']}, {versions}",
        f"commit {facts['commit']}",
    ]


def short_header(facts: dict[str, Any]) -> str:
    """GPU, driver and the versions that matter, in one line."""
    versions = ", ".join(
        f"{name} {facts['versions'].get(name, '?')}" for name in ("torch", "nvidia-cutlass-dsl")
    )
    return f"{facts['gpu']}, driver {facts.get('driver', '?')}, {versions}"


def slug(gpu: str) -> str:
    """A folder's name from a GPU's: "NVIDIA H200" -> "h200"."""
    name = re.sub(r"^nvidia\s+", "", gpu.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
