"""Layouts of tensors, given and to be made, as the choice of a kernel sees them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels_dsl.checks.layout import MatrixLayout, layout_of


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's first element; its offset where the tensor has no memory of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # fake and functional tensors
        return tensor.storage_offset() * tensor.element_size()


def matrix_layout(tensor: torch.Tensor) -> MatrixLayout:
    """`layout_of` a tensor."""
    return layout_of(tensor.shape, tensor.stride(), _address(tensor), tensor.element_size())


def contiguous_layout(shape: Sequence[int], element_bytes: int) -> MatrixLayout:
    """The layout of a fresh contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return layout_of(shape, strides, 0, element_bytes)
