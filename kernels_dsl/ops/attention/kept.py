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


class _Sight(NamedTuple):
    """The place of what is made of tensors, and its entry if it is of them as they are now."""

    key: tuple[Any, ...]
    versions: tuple[int, ...]
    sources: tuple[torch.Tensor, ...]
    found: _Kept | None


def kept(key: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], make: Callable[[], T]) -> T:
    """The result of `make`, which is made of `tensors` and of `key` alone, from now or from before.

    A graph that is captured makes its own at each replay; so it sees changes of the tensors in place.
    """
    sight = _look(key, tensors)
    if sight is None:
        return make()
    return _keep(sight, make()) if sight.found is None else sight.found.made


def kept_when_seen_again(
    key: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], make: Callable[[], T]
) -> T | None:
    """`kept`, for what pays only if it is used many times: None where tensors are seen as they are for the
    first time. Those that have no version, and a graph that is captured, always get None."""
    sight = _look(key, tensors)
    if sight is None:
        return None
    if sight.found is None:
        return _keep(sight, None)
    return _keep(sight, make()) if sight.found.made is None else sight.found.made


def _look(key: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...]) -> _Sight | None:
    """The place of what is made of tensors; None in a capture, and for those that have no version."""
    sources = tuple(x for x in tensors if x is not None)
    device = sources[0].device
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or any(x.is_inference() for x in sources):
        return None
    # Another stream would have to wait for what this one makes.
    stream = _raw_stream(device.index) if device.type == "cuda" else None
    key = (stream, *key, *map(_place, tensors))
    versions = tuple(x._version for x in sources)
    found = _KEPT.get(key)
    return _Sight(key, versions, sources, None if found is None or found.versions != versions else found)


def _keep(sight: _Sight, made: T) -> T:
    """Keep a result at its place; returns it."""
    key = sight.key
    watches = tuple(weakref.ref(x, lambda _: _KEPT.pop(key, None)) for x in sight.sources)
    _KEPT[key] = _Kept(made, sight.versions, tuple(x.detach() for x in sight.sources), watches)
    while len(_KEPT) > _MAX_KEPT:
        _KEPT.popitem(last=False)
    return made


def _place(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), x.device)
