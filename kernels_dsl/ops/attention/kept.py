"""Tensors that were made of block lists, kept as long as those live and stay as they are."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lowering.records import NamedTuple

T = TypeVar("T")
_MAX_KEPT = 256
"""Patterns of which it is kept; of more the oldest are forgotten."""
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None: PyTorch is a CPU build
_KEPT: OrderedDict[Any, _Kept] = OrderedDict()


class _Kept(NamedTuple):
    """Tensors that were made, and what they were made of, whose memory nothing else can have meanwhile."""

    made: Any
    versions: tuple[int, ...]
    sources: tuple[torch.Tensor, ...]
    watches: tuple[Any, ...]


def kept(key: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], make: Callable[[], T]) -> T:
    """The result of `make`, which is made of `tensors` and of `key` alone, from now or from before.

    A graph that is captured makes its own at each replay; so it sees changes of the tensors in place.
    """
    sources = tuple(x for x in tensors if x is not None)
    device = sources[0].device
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or any(x.is_inference() for x in sources):  # which have no version
        return make()
    # Another stream would have to wait for what this one makes.
    stream = _raw_stream(device.index) if device.type == "cuda" else None
    key = (stream, *key, *map(_place, tensors))
    versions = tuple(x._version for x in sources)
    found = _KEPT.get(key)
    if found is None or found.versions != versions:
        made = make()
        watches = tuple(weakref.ref(x, lambda _: _KEPT.pop(key, None)) for x in sources)
        found = _KEPT[key] = _Kept(made, versions, tuple(x.detach() for x in sources), watches)
        while len(_KEPT) > _MAX_KEPT:
            _KEPT.popitem(last=False)
    return found.made


def kept_when_seen_again(
    key: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], make: Callable[[], T]
) -> T | None:
    """`kept`, for what pays only if it is used many times: None where tensors are seen as they are for the
    first time. Those that have no version, and a graph that is captured, always get None."""
    sources = [x for x in tensors if x is not None]
    device = sources[0].device
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or any(x.is_inference() for x in sources):
        return None
    first: list[bool] = []
    kept((*key, "seen"), tensors, lambda: first.append(True))
    return None if first else kept(key, tensors, make)


def _place(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), x.device)
