"""Examples run on the GPU where there is one, else in the emulator on the CPU, at toy sizes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lowering import emulator

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def running() -> AbstractContextManager[Any]:
    """A block in which calls of `kernels_dsl` run on DEVICE's tensors."""
    return nullcontext() if GPU else emulator.run(arch="sm_90a")


def size(on_gpu: int, toy: int) -> int:
    """Extent for the GPU, or the toy one for the emulator."""
    return on_gpu if GPU else toy


def report(name: str, error: float, limit: float) -> None:
    """Prints how far a result is from its reference. AssertionError beyond `limit`."""
    place = torch.cuda.get_device_name() if GPU else "a CPU"
    print(f"{name}: error {error:.2g}, at most {limit:.2g}, on {place}")
    assert error <= limit, f"{name} is wrong"
