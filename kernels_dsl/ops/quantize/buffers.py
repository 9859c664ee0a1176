"""The tensors that a `quantize` call makes, and what its caller gets of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kernels_dsl.config.quantize import PITCH, TILE
from kernels_dsl.ops import allocate
from kernels_dsl.ops.quantize.arguments import Scheme
from lowering.records import NamedTuple

Made = tuple[torch.Tensor, ...]


class Buffer(NamedTuple):
    """A tensor that a call makes, and what its caller gets of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    result: Callable[[torch.Tensor], torch.Tensor] | None = None
    """A view; None: the tensor as it is."""

    def on(self, device: torch.device) -> torch.Tensor:
        """A new one."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def behind(self, result: torch.Tensor) -> torch.Tensor:
        """The one that a caller has such a result of."""
        return result.as_strided(self.shape, self.strides)


def _merged_lead(lead: tuple[int, ...]) -> tuple[int, ...]:
    """Leading modes beyond two are one."""
    return lead if len(lead) <= 2 else (math.prod(lead[:-1]), lead[-1])


def _values(lead: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype) -> Buffer:
    """In rows of whole 16 bytes, of which the caller gets the first `columns`."""
    pitch = -(-columns // PITCH) * PITCH
    shape = (*_merged_lead(lead), rows, pitch)
    result: Callable[[torch.Tensor], torch.Tensor] | None = None
    if len(lead) > 2:
        result = lambda t: t.view(*lead, rows, pitch)[..., :columns]  # noqa: E731
    elif pitch != columns:
        result = lambda t: t[..., :columns]  # noqa: E731
    return Buffer(shape, allocate.dense_strides(shape), dtype, result)


def _scales(lead: tuple[int, ...], rows: int, columns: int, scaling: str) -> Buffer:
    groups = -(-columns // TILE)
    last = {
        "matrix": (1, 1),
        "row": (rows, 1),
        "1x128": (rows, groups),
        "128x128": (-(-rows // TILE), groups),
    }[scaling]
    shape = (*_merged_lead(lead), *last)
    strides = allocate.dense_strides(shape)
    if scaling == "1x128":
        strides = (*allocate.dense_strides((*shape[:-2], groups, rows))[:-2], 1, max(rows, 1))
    split = (lambda t: t.unflatten(0, lead[:-1])) if len(lead) > 2 else None
    return Buffer(shape, strides, torch.float32, split)


def buffers_of(shape: torch.Size, scheme: Scheme) -> list[Buffer]:
    """The buffers that a call makes: values and scales of each output in turn, one scale of all last."""
    lead, (rows, columns) = tuple(shape[:-2]), shape[-2:]
    as_it_is, transposed = scheme.outputs
    made = []
    for m, k in [(rows, columns)] * as_it_is + [(columns, rows)] * transposed:
        made.append(_values(lead, m, k, scheme.dtype))
        if scheme.scaling != "tensor":
            made.append(_scales(lead, m, k, scheme.scaling))
    if scheme.scaling == "tensor" and not scheme.has_scale:
        made.append(Buffer((), (), torch.float32))
    return made


def maker_of(buffers: Sequence[Buffer], device: torch.device) -> Callable[[], Made]:
    """The maker of these buffers."""
    return allocate.several([allocate.maker(b.shape, b.dtype, device, b.strides) for b in buffers])


def finished(buffers: list[Buffer], made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The views of them that the caller gets."""
    return [t if b.result is None else b.result(t) for b, t in zip(buffers, made)]


def new_results(shape: torch.Size, scheme: Scheme, device: torch.device) -> list[torch.Tensor]:
    """The new tensors among the results of a call for an x of this shape, not written yet."""
    if len(shape) == 1:
        made = new_results(torch.Size((1, *shape)), scheme, device)
        return [t[0] if t.dim() else t for t in made]
    buffers = buffers_of(shape, scheme)
    return finished(buffers, [b.on(device) for b in buffers])


def assemble(made: Sequence[torch.Tensor], scheme: Scheme, scale: torch.Tensor | None) -> Made:
    """The caller's results, of the new tensors: a scale of all is there once, if it is new, and last."""
    if scheme.scaling != "tensor":
        return tuple(made)
    if scale is None:
        *made, scale = made
    return (made[0], scale) if scheme.transpose != "both" else (made[0], scale, made[1], scale)


def new_ones(results: Sequence[torch.Tensor], scheme: Scheme) -> list[torch.Tensor]:
    """The other way round: what is new of what the caller gets."""
    if scheme.scaling != "tensor":
        return list(results)
    values = [results[0]] if scheme.transpose != "both" else [results[0], results[2]]
    return values if scheme.has_scale else [*values, results[1]]
