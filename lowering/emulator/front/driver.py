"""The CUDA driver and runtime as a program without a GPU sees them here: one device, streams in order.

Only the functions of ``cuda.bindings`` that set up devices, streams, events and memory are answered. Launches
do not come through here; the host code that the DSL compiles makes them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from lowering.emulator.capture import DeviceFacts

from .memory import Extent
from .patches import Patches

MEMORY_BYTES = 80 << 30
L2_BYTES = 50 << 20
ELAPSED_MS = 1.0  # of every pair of events: time is not modelled
_L2_CACHE_SIZE = 38
_CLOCK_RATES = {13: 1_755_000, 36: 2_619_000}  # kHz: SM, memory


class Driver:
    """The emulated device, and the memory that was allocated through the driver."""

    def __init__(self, facts: DeviceFacts, name: str) -> None:
        self.facts, self.name = facts, name
        self.memory: dict[int, Any] = {}
        self.handles = itertools.count(0x100)

    def allocations(self) -> Iterator[Extent]:
        """Memory allocated now."""
        for address, buffer in self.memory.items():
            yield Extent(f"memory of {len(buffer)} bytes from the driver", address, len(buffer))

    def attribute(self, number: Any) -> int:
        """A device attribute; driver and runtime number them alike."""
        known = {_L2_CACHE_SIZE: L2_BYTES, **_CLOCK_RATES}
        return known.get(int(number)) or self.facts.attribute(int(number))

    def allocate(self, size: int) -> int:
        """Memory aligned as the driver aligns it."""
        buffer = (ctypes.c_uint8 * (int(size) + 256))()
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self.memory[address] = (ctypes.c_uint8 * int(size)).from_buffer(
            buffer, address - ctypes.addressof(buffer)
        )
        return address

    def free(self, address: Any) -> None:
        """Give memory back."""
        self.memory.pop(int(address), None)

    def install(self, patches: Patches) -> None:
        """Replace the functions of ``cuda.bindings.driver`` and ``.runtime``."""
        from cuda.bindings import driver, runtime

        for name, answer in {**self._common("cu", driver), **self._driver_functions(driver)}.items():
            if hasattr(driver, name):
                patches.set(driver, name, _answering(driver.CUresult.CUDA_SUCCESS, answer))
        for name, answer in {**self._common("cuda", runtime), **self._runtime_functions(runtime)}.items():
            if hasattr(runtime, name):
                patches.set(runtime, name, _answering(runtime.cudaError_t.cudaSuccess, answer))

    def _common(self, prefix: str, module: Any) -> dict[str, Callable[..., Any]]:
        """Functions of both libraries, whose names differ in their prefix."""
        letters = "CU" if prefix == "cu" else "cuda"
        stream = getattr(module, f"{letters}stream" if prefix == "cu" else "cudaStream_t")
        event = getattr(module, f"{letters}event" if prefix == "cu" else "cudaEvent_t")
        nothing = (
            "StreamDestroy", "StreamSynchronize", "StreamQuery", "StreamWaitEvent", "EventRecord",
            "EventSynchronize", "EventDestroy", "EventQuery",
        )  # fmt: skip
        found: dict[str, Callable[..., Any]] = {prefix + name: lambda *_: None for name in nothing}
        for name in ("StreamCreate", "StreamCreateWithFlags", "StreamCreateWithPriority"):
            found[prefix + name] = lambda *_: stream(next(self.handles))
        for name in ("EventCreate", "EventCreateWithFlags"):
            found[prefix + name] = lambda *_: event(next(self.handles))
        found[prefix + "EventElapsedTime"] = lambda *_: ELAPSED_MS
        found[prefix + "DriverGetVersion"] = lambda: getattr(module, "CUDA_VERSION", 13000)
        found[prefix + "DeviceGetAttribute"] = lambda number, *_: self.attribute(number)
        return found

    def _driver_functions(self, driver: Any) -> dict[str, Callable[..., Any]]:
        def context(*_: Any) -> Any:
            return driver.CUcontext(1)

        def device(*_: Any) -> Any:
            return driver.CUdevice(0)

        def nothing(*_: Any) -> None:
            return None

        def malloc(size: int, *_: Any) -> Any:
            return driver.CUdeviceptr(self.allocate(size))

        return {
            "cuInit": nothing,
            "cuDeviceGetCount": lambda: 1,
            "cuDeviceGet": device,
            "cuDeviceGetName": lambda size, _: self.name.encode().ljust(size, b"\0"),
            "cuDeviceTotalMem": lambda _: MEMORY_BYTES,
            "cuDeviceComputeCapability": lambda _: (self.facts.attribute(75), self.facts.attribute(76)),
            "cuCtxGetCurrent": context,
            "cuCtxCreate": context,
            "cuDevicePrimaryCtxRetain": context,
            "cuDevicePrimaryCtxRelease": nothing,
            "cuCtxGetDevice": device,
            "cuCtxSetCurrent": nothing,
            "cuCtxPushCurrent": nothing,
            "cuCtxPopCurrent": context,
            "cuCtxDestroy": nothing,
            "cuCtxSynchronize": nothing,
            "cuMemAlloc": malloc,
            "cuMemAllocAsync": malloc,
            "cuMemFree": self.free,
            "cuMemFreeAsync": lambda pointer, *_: self.free(pointer),
            "cuMemcpyHtoD": _copy,
            "cuMemcpyHtoDAsync": _copy,
            "cuMemcpyDtoH": _copy,
            "cuMemcpyDtoHAsync": _copy,
            "cuMemcpyDtoD": _copy,
            "cuMemcpyDtoDAsync": _copy,
            "cuMemsetD8": _fill(1),
            "cuMemsetD8Async": _fill(1),
            "cuMemsetD32": _fill(4),
            "cuMemsetD32Async": _fill(4),
        }

    def _runtime_functions(self, runtime: Any) -> dict[str, Callable[..., Any]]:
        def nothing(*_: Any) -> None:
            return None

        return {
            "cudaGetDevice": lambda: 0,
            "cudaSetDevice": nothing,
            "cudaGetDeviceCount": lambda: 1,
            "cudaDeviceSynchronize": nothing,
            "cudaRuntimeGetVersion": lambda: getattr(runtime, "CUDART_VERSION", 13000),
            "cudaMalloc": self.allocate,
            "cudaFree": self.free,
            "cudaMemcpy": _copy,
            "cudaMemcpyAsync": _copy,
            "cudaMemset": _fill(1),
            "cudaMemsetAsync": _fill(1),
        }


def _answering(success: Any, function: Callable[..., Any]) -> Callable[..., tuple]:
    """``function`` with the status in front of its result, as the bindings return it."""

    def call(*args: Any, **kwargs: Any) -> tuple:
        result = function(*args, **kwargs)
        if result is None:
            return (success,)
        return (success, *result) if isinstance(result, tuple) else (success, result)

    return call


def _place(value: Any) -> int:
    """An address from a pointer object, an array or a number."""
    if hasattr(value, "__array_interface__"):
        return int(value.__array_interface__["data"][0])
    return int(value)


def _copy(target: Any, source: Any, size: int, *_: Any) -> None:
    raw = bytes(source) if isinstance(source, (bytes, bytearray)) else None
    ctypes.memmove(_place(target), raw if raw is not None else _place(source), int(size))


def _fill(width: int) -> Callable[..., None]:
    def fill(target: Any, value: int, count: int, *_: Any) -> None:
        pattern = int(value).to_bytes(4, "little")[:width]
        ctypes.memmove(_place(target), pattern * int(count), width * int(count))

    return fill
