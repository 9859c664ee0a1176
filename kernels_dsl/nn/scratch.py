"""Memory for what one call makes and reads: a call like an earlier one makes no tensors for it."""

from __future__ import annotations

import threading
from typing import Any

import torch

from kernels_dsl.ops.tile_counter import serial_stream

MOST = 1 << 23
"""Bytes of a part. Each stays for a thread and a stream, where calls have use for it."""
_STEP = 256
"""Tensors begin at multiples of this."""
_of_thread = threading.local()
"""By device, stream and part: MOST bytes."""


def is_dense(x: torch.Tensor) -> bool:
    """True for a new tensor without gaps."""
    return x.untyped_storage().nbytes() == x.nbytes


class Scratch:
    """Dense tensors like `like`, in memory that all calls of a thread on a stream share: what a call leaves
    there is right until the next one. What a call has there at one time is in several parts.

    A call that a CUDA graph captures gets None, as the graph may be replayed beside other calls, and so does
    every call whose tensors are too large.
    """

    def __init__(self, like: tuple[torch.Tensor, ...], index: int, part: int = 0) -> None:
        self._forms = [(tuple(x.shape), x.stride(), x.dtype) for x in like]
        self._device, self._index, self._part = like[0].device, index, part
        sizes = [-(-x.nbytes // _STEP) * _STEP for x in like]
        self._starts = [sum(sizes[:n]) for n in range(len(sizes))]
        self._fits = sum(sizes) <= MOST
        self._made = threading.local()

    def __call__(self) -> tuple[torch.Tensor, ...] | None:
        """This thread's tensors for the current stream."""
        if not self._fits:
            return None
        stream = serial_stream(self._index) if self._index >= 0 else 0
        if stream is None:
            return None
        kept: dict[Any, tuple[torch.Tensor, ...]] = self._made.__dict__
        found = kept.get(stream)
        if found is None:
            found = kept[stream] = self._tensors(stream)
        return found

    def _tensors(self, stream: int) -> tuple[torch.Tensor, ...]:
        kept: dict[Any, torch.Tensor] = _of_thread.__dict__
        key = (self._index, stream, self._part)
        if key not in kept:
            kept[key] = torch.empty(MOST, dtype=torch.uint8, device=self._device)
        return tuple(
            kept[key].view(dtype).as_strided(shape, strides, start // dtype.itemsize)
            for start, (shape, strides, dtype) in zip(self._starts, self._forms)
        )
