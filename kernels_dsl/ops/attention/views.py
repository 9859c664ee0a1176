"""The tensors that attention kernels take as they are, and steps that make others fit."""

from __future__ import annotations

from collections.abc import Callable

import torch

ROW_ALIGN = 16
Step = Callable[[torch.Tensor], torch.Tensor]


def is_aligned(x: torch.Tensor) -> bool:
    """Kernels reach its elements: contiguous head dimension, strides and base multiples of 16 bytes."""
    width = x.element_size()
    strides = [s for size, s in zip(x.shape[:-1], x.stride()[:-1]) if size > 1]
    return (
        (x.stride(-1) == 1 or x.shape[-1] == 1)
        and x.data_ptr() % ROW_ALIGN == 0
        and all(s > 0 and s * width % ROW_ALIGN == 0 for s in strides)
    )


def _plain_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`strides` with those of modes of size 1, which may hold anything, replaced by the whole extent."""
    extent = 1 + sum(max(size - 1, 0) * s for size, s in zip(shape, strides))
    extent = -(-extent // ROW_ALIGN) * ROW_ALIGN
    rows = tuple(s if size > 1 else extent for size, s in zip(shape[:-1], strides))
    return (*rows, strides[-1])


def plain_view(x: torch.Tensor) -> Step | None:
    """The step that gives modes of size 1 of aligned tensors like this one strides that kernels take, in a
    view of the same elements; None for nothing."""
    strides = _plain_strides(tuple(x.shape), x.stride())
    return None if strides == x.stride() else lambda t: t.as_strided(t.shape, strides)


def prepared_for_tma(x: torch.Tensor) -> Step | None:
    """The step that makes tensors like this one fit for TMA and 16-byte copies; None for nothing."""
    if not is_aligned(x):
        return lambda t: t.clone(memory_format=torch.contiguous_format)
    return plain_view(x)
