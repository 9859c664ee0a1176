"""Memory for partial results that stays from call to call."""

from __future__ import annotations

import threading
from typing import Any

import torch

from kernels_dsl.ops.tile_counter import LEAST, serial_stream
from lowering import Address

_of_thread = threading.local()
"""By device and stream: elements of a workspace, and its address."""


def own_workspace(device: int, elements: int) -> Address:
    """The address of float32 (elements or more,), not initialised, for the next launch of several kernels on
    CUDA device `device`; -1: emulator.

    Another thread may launch between these on the same stream, so that each thread has its own for each. A
    launch that a CUDA graph captures has memory of the graph.
    """
    if device < 0:
        return Address(torch.empty(elements))
    stream = serial_stream(device)
    if stream is None:
        return Address(torch.empty(elements, device=f"cuda:{device}"))
    kept: dict[Any, tuple[int, Address]] = _of_thread.__dict__
    found = kept.get((device, stream))
    if found is None or found[0] < elements:
        elements = max(elements, LEAST)
        found = kept[device, stream] = elements, Address(torch.empty(elements, device=f"cuda:{device}"))
    return found[1]
