"""Energy of calls: what a GPU at its power limit is short of, where its clocks follow the power."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from kernels_dsl.measure import Call

BURST_S = 0.7
"""NVML's counter moves every 20 to 100 ms."""


@cache
def _device() -> tuple[Any, Any] | None:
    """NVML's library and the handle of PyTorch's first GPU; None where there is no such library."""
    import torch

    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    by_uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(by_uuid, ctypes.byref(handle)):
        return None
    return library, handle


def joules() -> float | None:
    """Energy that the GPU has used since the driver was loaded; None where NVML does not say."""
    device = _device()
    if device is None:
        return None
    library, handle = device
    used = ctypes.c_ulonglong()
    return (
        None if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used)) else used.value / 1e3
    )


def picojoules(call: Call, flops: float, sets: int = 1, seconds: float = BURST_S) -> float | None:
    """Energy of one operation of `call`, which has `flops`, repeated for `seconds`; None as of `joules`."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(0)
    end.record()
    torch.cuda.synchronize()
    calls = max(1, int(seconds * 1e3 / max(start.elapsed_time(end), 1e-3)))
    before = joules()
    if before is None:
        return None
    for i in range(calls):
        call(i % sets)
    torch.cuda.synchronize()
    after = joules()
    return None if after is None else (after - before) * 1e12 / (calls * flops)
