"""Tensors for launches in little host time: `torch.empty_strided` past argument parser and dispatcher.

What the operators make in every call costs 1.5 to 2 µs each with the public functions on a GPU, as much as
half a launch. The function that code of `torch.compile` makes its buffers with spares 0.5 µs of that or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

_reinterpret: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_reinterpret_tensor", None)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=1)
def _on_current_gpu() -> Any:
    """(shape, strides, dtype) -> an uninitialised tensor on the current CUDA device; None where PyTorch has
    no such function."""
    make: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
    try:
        made = make((0, 1), (1, 1), torch.float8_e4m3fn)
    except (TypeError, RuntimeError):
        return None
    return make if made.is_cuda and made.dtype == torch.float8_e4m3fn and made.shape == (0, 1) else None


def maker(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    strides: tuple[int, ...] | None = None,
) -> Callable[[], torch.Tensor]:
    """A maker of uninitialised tensors, contiguous ones without `strides`; for code past the dispatcher."""
    strides = dense_strides(shape) if strides is None else strides
    if device.type == "cuda" and torch.cuda.device_count() == 1:
        make = _on_current_gpu()
        if make is not None:
            return partial(make, tuple(shape), tuple(strides), dtype)
    return partial(torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device)


def pitched_maker(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A maker of uninitialised tensors whose rows (or columns) have gaps after them.

    The last one has its gap, too: kernels that store whole 16 bytes write into it.
    """
    # The mode with the largest stride counts that many elements for each of its entries.
    step, extent = max(zip(strides, shape))
    make = maker((step * extent,), dtype, device)
    if _reinterpret is None:
        return lambda: make().as_strided(shape, strides)
    return lambda: _reinterpret(make(), shape, strides, 0)


def several(makers: Sequence[Callable[[], torch.Tensor]]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A maker of one tensor with each of them."""
    if len(makers) == 2:
        first, second = makers
        return lambda: (first(), second())
    if len(makers) == 3:
        one, two, three = makers
        return lambda: (one(), two(), three())
    if len(makers) == 4:
        one, two, three, four = makers
        return lambda: (one(), two(), three(), four())
    return lambda: tuple([make() for make in makers])


def with_a_mode(x: torch.Tensor) -> torch.Tensor:
    """x of one element as (1,): kernels take no tensors without modes."""
    return torch.ravel(x) if _reinterpret is None else _reinterpret(x, (1,), (1,), 0)
