"""Checks that no output shares memory with an input: such a call has no defined result, so it is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def byte_extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def self_overlaps(tensor: torch.Tensor) -> bool:
    """True if two elements of a tensor may share an address (an expanded tensor, say)."""
    if tensor.numel() == 0:
        return False
    reach = 0
    modes = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1)
    for stride, size in modes:
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def check_self_overlap(out: torch.Tensor | None) -> None:
    """ValueError where two elements of `out`, if it is given, may share an address."""
    if out is not None and self_overlaps(out):
        raise ValueError(
            f"out has strides {out.stride()} for shape {tuple(out.shape)}, must not overlap itself"
        )


def ranges_meet(out: torch.Tensor, inputs: Sequence[Any], extents: Sequence[int]) -> bool:
    """True if the addresses that `out` spans meet those of an input: true more often than needed.

    `extents`: `byte_extent` of `out`, then of each input; 0 for an input that is no tensor.
    """
    first = out.data_ptr()
    end = first + extents[0]
    for tensor, extent in zip(inputs, extents[1:]):
        if extent:
            start = tensor.data_ptr()
            if start < end and first < start + extent:
                return True
    return False


def ranges_met(number: torch.Tensor, inputs: Sequence[Any], extents: Sequence[int]) -> int:
    """Inputs whose addresses meet those of a tensor of one element. `extents`: as in `ranges_meet`, without
    that of `out`."""
    first = number.data_ptr()
    end, met = first + number.element_size(), 0
    for tensor, extent in zip(inputs, extents):
        if extent:
            start = tensor.data_ptr()
            met += start < end and first < start + extent
    return met


def check_alone(name: str, tensor: torch.Tensor, others: dict[str, Any]) -> None:
    """ValueError where `tensor`, which a call writes, shares memory with one of the call's other tensors, by
    their names; what is no tensor among them does not count."""
    for other_name, other in others.items():
        if isinstance(other, torch.Tensor) and ranges_meet(
            tensor, (other,), (byte_extent(tensor), byte_extent(other))
        ):
            raise ValueError(f"{name} shares memory with {other_name}, must be a tensor of its own")


def _columns_apart(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if x and y are disjoint column ranges of matrices with one row pitch, such as slices of one."""
    if x.dim() != 2 or y.dim() != 2 or x.stride(1) != 1 or y.stride(1) != 1:
        return False
    pitch = x.stride(0) * x.element_size()
    if pitch != y.stride(0) * y.element_size():
        return False
    distance = (y.data_ptr() - x.data_ptr()) % pitch
    x_width, y_width = x.shape[1] * x.element_size(), y.shape[1] * y.element_size()
    return distance >= x_width and distance + y_width <= pitch


def _same_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)


def check_overlap(
    out: torch.Tensor, named: dict[str, torch.Tensor], factors: tuple[str, ...] = ("a", "b")
) -> None:
    """ValueError where `out` overlaps one of the inputs, named as the caller knows them.

    An operand of the epilogue (any name that is not in `factors`) may be the very tensor that `out` is: each
    of its elements is read before the same element of D is written.
    """
    for name, tensor in named.items():
        if not ranges_meet(out, (tensor,), (byte_extent(out), byte_extent(tensor))):
            continue
        if name not in factors and _same_elements(out, tensor):
            continue
        if _columns_apart(out, tensor):
            continue
        raise ValueError(f"out shares memory with {name}, must be a tensor of its own")
