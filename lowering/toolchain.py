"""The compiler that made a kernel, and its runtime library. Nothing here imports the compiler."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from lowering import arch
from lowering.errors import LoweringError

RUNTIME_NAME = "libcute_dsl_runtime.so"
# The modules of this package whose source shapes what is compiled and stored.
SHAPING_MODULES = ("compile.py", "launches.py", "link.py", "signature.py", "toolchain.py")
# The DSL's own variables that change its output. Its arch and TVM-FFI settings are always passed as options.
SHAPING_VARIABLES = tuple(
    f"CUTE_DSL_{name}"
    for name in (
        "AUTO_M2S",
        "COMPILER_BACKEND",
        "COMPILER_OPT",
        "DEBUG",
        "DRYRUN",
        "ENABLE_ASSERTIONS",
        "ENABLE_PYIR",
        "LINEINFO",
        "TOLERATE_M2M",
    )
)


def _version(distribution: str, module: str) -> str:
    """The version of the distribution that a module comes from.

    It is in the folder that pip leaves beside the module, in one of the first lines of a file that goes on
    with the package's README. To ask `importlib.metadata` takes a millisecond.
    """
    spec = importlib.util.find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    folder = os.path.dirname(places[0]) if places else ""
    start = distribution.replace("-", "_") + "-"
    for name in _names(folder) if folder else ():
        if name.startswith(start) and name.endswith(".dist-info"):
            with suppress(OSError), open(os.path.join(folder, name, "METADATA"), "rb") as lines:
                for line in lines:
                    if line.startswith(b"Version:"):
                        return line.partition(b":")[2].strip().decode()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise LoweringError(f"the package {distribution} is not installed") from None


@lru_cache(maxsize=2)
def _names(folder: str) -> list[str]:
    return os.listdir(folder)


@lru_cache(maxsize=1)
def root() -> Path:
    """The folder of the installed ``nvidia_cutlass_dsl`` package.

    :raises LoweringError: if it is not installed.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise LoweringError("the package nvidia-cutlass-dsl is not installed")
    return Path(places[0])


@lru_cache(maxsize=1)
def flavour() -> str:
    """The CUDA flavour of the compiler that would be used: ``cu12`` or ``cu13``.

    The DSL takes the newest installed one that the driver supports, and without a driver the newest.
    """
    numbers = {name: name.removeprefix("cu") for name in os.listdir(root()) if name.startswith("cu")}
    found = [int(n) for name, n in numbers.items() if n.isdecimal() and (root() / name / "lib").is_dir()]
    if not found:
        raise LoweringError(
            f"{root()} holds no CUDA flavour: install nvidia-cutlass-dsl or nvidia-cutlass-dsl[cu13]"
        )
    if len(found) > 1 and (version := arch.driver_version()) is not None:
        found = [f for f in found if f <= version[0]] or found
    return f"cu{max(found)}"


def runtime_library() -> Path:
    """The DSL's runtime library, which every compiled host function calls."""
    for named in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep):
        if named.endswith(RUNTIME_NAME):
            return Path(named)
    path = root() / flavour() / "lib" / RUNTIME_NAME
    if not path.exists():
        raise LoweringError(f"{path} is missing: reinstall nvidia-cutlass-dsl")
    return path


@lru_cache(maxsize=1)
def host_isa() -> str:
    """The instruction level of this CPU: the compiler uses all of it in the host function.

    An object made on a CPU with AVX-512 holds AVX-512 instructions, and would be an illegal instruction on
    one without; so this is part of a kernel's key.
    """
    machine = platform.machine()
    if machine != "x86_64":
        return machine
    try:
        # Of the first CPU alone: the system writes the text as it is read, which takes long for hundreds.
        with open("/proc/cpuinfo") as lines:
            flags = next(set(line.split()) for line in lines if line.startswith("flags"))
    except (OSError, StopIteration):
        return "x86-64"
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        return "x86-64-v4"
    return "x86-64-v3" if {"avx2", "bmi1", "bmi2", "fma", "movbe"} <= flags else "x86-64-v2"


def isa_runs_here(isa: str) -> bool:
    """True if a host function compiled for the CPU level ``isa`` runs on this CPU."""
    here = host_isa()
    return isa == here or (isa.startswith("x86-64") and here.startswith("x86-64") and isa <= here)


def environment() -> dict[str, str]:
    """The variables set for this process that change what the DSL compiles."""
    return {name: os.environ[name] for name in SHAPING_VARIABLES if os.environ.get(name)}


def _source(name: str) -> bytes:
    with open(os.path.join(os.path.dirname(__file__), name), "rb") as file:
        return file.read()


@lru_cache(maxsize=1)
def identity() -> dict[str, str]:
    """Part of a kernel's key that names the tools that make it."""
    own = hashlib.sha256(b"\0".join(map(_source, SHAPING_MODULES)))
    ffi = _version("apache-tvm-ffi", "tvm_ffi").split(".")
    return {
        "dsl": _version("nvidia-cutlass-dsl", "nvidia_cutlass_dsl"),
        "tvm_ffi": ".".join(ffi[:2]),  # the ABI of an object holds within a minor version
        "flavour": flavour(),
        "host": host_isa(),
        "lowering": own.hexdigest()[:16],
    }
