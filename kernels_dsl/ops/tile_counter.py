"""Counters that kernels hand out their work tiles with or meet at: zero before a launch and again after it.

Launches that can run at the same time need counters of their own. Those of one stream run one after the
other, so they share one. A launch that a CUDA graph captures may be replayed on any stream, so it gets one
that nobody else has, for good.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from lowering import Address

Addresses = tuple[Address, Address]
"""Of a workspace, of its counter."""
SLOTS = 1 << 16
"""Counters of a device that are made at once."""
SPACING = 4
"""Elements from one to the next: kernels are compiled for 16-byte aligned addresses."""
LEAST = 1 << 14
"""Elements of a workspace that is kept."""

_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None: PyTorch is a CPU build
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_slabs: dict[int, list[torch.Tensor]] = {}
"""All of a device, as graphs know the addresses alone; counters of the last one are free."""
_taken: dict[int, int] = {}
_taking = threading.Lock()
_by_stream: dict[tuple[int, int], torch.Tensor] = {}
_with_workspace: dict[Any, tuple[tuple[torch.Tensor, torch.Tensor], int, int, Addresses]] = {}


def serial_stream(device: int) -> int | None:
    """The current stream of CUDA device `device`; None where a graph captures, which any may replay."""
    stream: int = _raw_stream(device)
    # 0, PyTorch's default one, CUDA refuses to capture, so that it need not be asked.
    return None if stream != 0 and _is_capturing() else stream


def tile_counter(device: int) -> torch.Tensor:
    """int32 (1,), 0, for the next launch on the current stream of CUDA device `device`; -1: emulator."""
    if device < 0:
        return torch.zeros(1, dtype=torch.int32)
    stream = serial_stream(device)
    if stream is None:
        return _fresh(device)
    counter = _by_stream.get((device, stream))
    if counter is None:
        counter = _by_stream[device, stream] = _fresh(device)
    return counter


def counter_and_workspace(device: int, elements: int, words: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 of `words` counters or more, as of `tile_counter`, float32 (elements or more,) not initialised)
    for the next launch.
    """
    if device < 0:
        return torch.zeros(words, dtype=torch.int32), torch.empty(elements)
    stream = serial_stream(device)
    if stream is None:
        return _fresh(device, words), torch.empty(elements, device=f"cuda:{device}")
    found = _with_workspace.get((device, stream))
    if found is None or found[1] < words or found[2] < elements:
        (counters, workspace), old_words, old_elements = found[:3] if found else ((None, None), 0, 0)
        words, elements = max(words, old_words), max(elements, old_elements, LEAST)
        if counters is None or words > old_words:
            counters = _fresh(device, words)
        if workspace is None or elements > old_elements:
            workspace = torch.empty(elements, device=f"cuda:{device}")
        both = Address(workspace), Address(counters)
        found = _with_workspace[device, stream] = (counters, workspace), words, elements, both
    return found[0]


def addresses(device: int, elements: int, words: int = 1) -> Addresses:
    """The addresses of what `counter_and_workspace` gives, workspace first, for parameters `Int64`.

    They keep the memory: hold them until the launch is enqueued.
    """
    if device >= 0:
        found = _with_workspace.get((device, serial_stream(device)))  # none of None
        if found is not None and found[1] >= words and found[2] >= elements:
            return found[3]
    counter, workspace = counter_and_workspace(device, elements, words)
    return Address(workspace), Address(counter)


def _fresh(device: int, words: int = 1) -> torch.Tensor:
    """So many counters that nobody else uses."""
    with _taking:
        return _take(device, words)


def _take(device: int, words: int) -> torch.Tensor:
    slabs, taken = _slabs.setdefault(device, []), _taken.get(device, 0)
    slots = -(-words // SPACING)
    if not slabs or taken + slots > SLOTS:
        if _is_capturing():
            # Zeroed by the graph itself, at every replay.
            return torch.zeros(words, dtype=torch.int32, device=f"cuda:{device}")
        size = max(SLOTS, slots) * SPACING
        slabs.append(torch.zeros(size, dtype=torch.int32, device=f"cuda:{device}"))
        torch.cuda.current_stream(device).synchronize()  # other streams will use it; once in a process
        taken = 0
    _taken[device] = taken + slots
    return slabs[-1][taken * SPACING : taken * SPACING + words]
