"""Architectures and devices: names, limits, and what the driver says, through cuda-python.

An architecture is named as the compiler names it: ``sm_80``, ``sm_89``, ``sm_90a`` (the ``a`` marks the
instructions of one generation alone: WGMMA and TMA features that a later GPU does not run).
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import Any

from lowering.errors import ArgumentValueError, LoweringError
from lowering.records import frozen


@frozen
class ArchLimits:
    """Limits of one thread block. Bytes and counts, from the CUDA programming guide's table."""

    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255
    max_threads_per_block: int = 1024
    max_threads_per_sm: int = 2048
    max_cluster: int = 1


_KIB = 1024
LIMITS = {
    "sm_80": ArchLimits(163 * _KIB, 164 * _KIB),
    "sm_86": ArchLimits(99 * _KIB, 100 * _KIB, max_threads_per_sm=1536),
    "sm_87": ArchLimits(163 * _KIB, 164 * _KIB, max_threads_per_sm=1536),
    "sm_89": ArchLimits(99 * _KIB, 100 * _KIB, max_threads_per_sm=1536),
    "sm_90": ArchLimits(227 * _KIB, 228 * _KIB, max_cluster=16),
    "sm_90a": ArchLimits(227 * _KIB, 228 * _KIB, max_cluster=16),
    "sm_100": ArchLimits(227 * _KIB, 228 * _KIB, max_cluster=16),
    "sm_100a": ArchLimits(227 * _KIB, 228 * _KIB, max_cluster=16),
    "sm_103": ArchLimits(227 * _KIB, 228 * _KIB, max_cluster=16),
    "sm_103a": ArchLimits(227 * _KIB, 228 * _KIB, max_cluster=16),
    "sm_120": ArchLimits(99 * _KIB, 100 * _KIB, max_threads_per_sm=1536, max_cluster=8),
    "sm_120a": ArchLimits(99 * _KIB, 100 * _KIB, max_threads_per_sm=1536, max_cluster=8),
    "sm_121": ArchLimits(99 * _KIB, 100 * _KIB, max_threads_per_sm=1536, max_cluster=8),
    "sm_121a": ArchLimits(99 * _KIB, 100 * _KIB, max_threads_per_sm=1536, max_cluster=8),
}


def check(arch: str) -> str:
    """The name, if it is that of a known architecture.

    :raises ArgumentValueError: naming the ones that are known.
    """
    if arch not in LIMITS:
        raise ArgumentValueError(f"arch must be one of {', '.join(LIMITS)}; got {arch!r}")
    return arch


def limits(arch: str) -> ArchLimits:
    """The limits of an architecture."""
    return LIMITS[check(arch)]


def capability(arch: str) -> tuple[int, int]:
    """Compute capability of an architecture's name: ``sm_90a`` is (9, 0)."""
    digits = arch.removeprefix("sm_")
    digits = digits[:-1] if digits.endswith(("a", "f")) else digits
    if not arch.startswith("sm_") or len(digits) < 2 or not digits.isdecimal():
        raise ArgumentValueError(f"arch must look like sm_90a, got {arch!r}")
    return int(digits[:-1]), int(digits[-1])


def of_capability(major: int, minor: int) -> str:
    """The architecture to compile for on a GPU of this compute capability, its own instructions included."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def runs_on(arch: str, gpu: str) -> bool:
    """True if code compiled for ``arch`` runs on a GPU whose own architecture is ``gpu``.

    Machine code runs within one major version, from its minor version up; that of an ``a`` target on the
    very same capability only.
    """
    if arch.endswith("a"):
        return capability(arch) == capability(gpu)
    (major, minor), (gpu_major, gpu_minor) = capability(arch), capability(gpu)
    return major == gpu_major and minor <= gpu_minor


@frozen
class Device:
    """One GPU, as the driver describes it. Bytes, counts, kHz."""

    index: int
    name: str
    arch: str
    sm_count: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    memory_bytes: int
    clock_khz: int
    memory_clock_khz: int


def _torch_cuda() -> Any:
    """`torch.cuda` where this process uses it already, and None elsewhere.

    It knows what a first call has to ask, and cuda-python takes 15 ms to import where torch has not done so.
    """
    if "cuda.bindings.driver" in sys.modules:
        return None
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def ask_driver(function: str, *args: Any) -> Any:
    """Call a function of the CUDA driver by name, such as ``cuDeviceGetCount``.

    :returns: its result; a tuple of them where there are several, None where there is none.
    :raises LoweringError: naming the call and the driver's error, or that there is no driver.
    """
    driver = _driver()
    try:
        status, *results = getattr(driver, function)(*args)
    except (RuntimeError, OSError) as error:
        raise LoweringError(f"no CUDA driver: {error}") from error
    if int(status) != 0:
        raise LoweringError(f"{function} failed: {driver.CUresult(int(status)).name}")
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


@lru_cache(maxsize=1)
def _initialise(process: int) -> bool:
    try:
        ask_driver("cuInit", 0)
    except (LoweringError, ImportError):
        return False
    return True


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports, or None without a driver."""
    try:
        version = int(ask_driver("cuDriverGetVersion"))
    except (LoweringError, ImportError):
        return None
    return (version // 1000, version % 1000 // 10) if version else None


def device_count() -> int:
    """Number of GPUs this process can use; 0 where there is no driver."""
    if (cuda := _torch_cuda()) is not None:
        return int(cuda.device_count())
    return int(ask_driver("cuDeviceGetCount")) if _initialise(os.getpid()) else 0


def attribute(device: int, name: str) -> int:
    """One of the driver's device attributes, by the end of its name, such as ``MULTIPROCESSOR_COUNT``."""
    if not _initialise(os.getpid()):
        raise LoweringError("no usable CUDA driver or GPU in this process")
    key = getattr(_driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(ask_driver("cuDeviceGetAttribute", key, ask_driver("cuDeviceGet", device)))


@lru_cache(maxsize=64)
def device(index: int = 0) -> Device:
    """Facts about one GPU.

    :param index: as PyTorch counts them; ``CUDA_VISIBLE_DEVICES`` holds for both.
    :raises LoweringError: if there is no such GPU.
    """
    count = device_count()
    if not 0 <= index < count:
        raise LoweringError(f"device {index} does not exist: this process sees {count} GPUs")
    handle = ask_driver("cuDeviceGet", index)
    name = bytes(ask_driver("cuDeviceGetName", 128, handle)).split(b"\0")[0].decode()
    major, minor = (attribute(index, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return Device(
        index=index,
        name=name,
        arch=of_capability(major, minor),
        sm_count=attribute(index, "MULTIPROCESSOR_COUNT"),
        smem_per_block=attribute(index, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        smem_per_sm=attribute(index, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        l2_bytes=attribute(index, "L2_CACHE_SIZE"),
        memory_bytes=int(ask_driver("cuDeviceTotalMem", handle)),
        clock_khz=attribute(index, "CLOCK_RATE"),
        memory_clock_khz=attribute(index, "MEMORY_CLOCK_RATE"),
    )


@lru_cache(maxsize=64)
def arch_of_device(index: int) -> str:
    """The architecture of one GPU."""
    if (cuda := _torch_cuda()) is not None:
        return of_capability(*cuda.get_device_capability(index))
    return of_capability(*(attribute(index, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR")))
