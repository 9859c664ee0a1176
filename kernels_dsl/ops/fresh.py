"""Tensors for launches in little host time: `torch.empty_strided` past argument parser and dispatcher.

What the operators make in every call costs 1.5 to 2 µs each with the public functions on a GPU, as much as
half a launch. The functions that code of `torch.compile` makes its buffers with cost half of that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

_ON_CURRENT_GPU = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""(shape, strides, dtype) -> an uninitialised tensor on the current CUDA device."""

_ONE = torch.Size((1,))


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def maker(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    strides: tuple[int, ...] | None = None,
) -> Callable[[], torch.Tensor]:
    """What makes uninitialised tensors, contiguous ones without `strides`; for code past the dispatcher."""
    strides = dense_strides(shape) if strides is None else strides
    if device.type == "cuda" and torch.cuda.device_count() == 1 and _ON_CURRENT_GPU is not None:
        return partial(_ON_CURRENT_GPU, tuple(shape), tuple(strides), dtype)
    return partial(torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device)


def with_a_mode(x: torch.Tensor) -> torch.Tensor:
    """x of one element as (1,): kernels take no tensors without modes."""
    base = x._base
    if base is not None and base.shape == _ONE and base.dtype is x.dtype:
        return base  # x is a view of it, such as `quantize` returns; a new view costs three times as much
    return torch.ravel(x)
