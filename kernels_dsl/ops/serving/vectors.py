"""The width of the vectors that a kernel moves between tensors."""

from __future__ import annotations

import torch

MAX_BYTES = 16


def width_of(columns: int, *tensors: torch.Tensor) -> int:
    """Elements of a vector that divides rows of `columns` elements of all tensors, and where they begin.

    1 where a tensor's last mode is not contiguous.
    """
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in tensors):
        return 1
    width = MAX_BYTES // max(x.element_size() for x in tensors)
    while width > 1 and (columns % width or not all(_begins_with_vectors(x, width) for x in tensors)):
        width //= 2
    return width


def _begins_with_vectors(x: torch.Tensor, width: int) -> bool:
    steps = [step for step, size in zip(x.stride()[:-1], x.shape) if size > 1]
    return x.data_ptr() % (width * x.element_size()) == 0 and all(step % width == 0 for step in steps)
