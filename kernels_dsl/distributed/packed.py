"""Packed sequences that ranks share: their starts in the whole, and tensors without a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kernels_dsl.checks import options

_INTEGERS = (torch.int32, torch.int64)


def starts_of(cu_seqlens: object) -> tuple[int, ...]:
    """The starts of sequences, and the end of the last. TypeError or ValueError for what cannot be that."""
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.dtype not in _INTEGERS or cu_seqlens.dim() != 1:
            form = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            raise ValueError(f"cu_seqlens is {form}, must be torch.int32 with one mode")
        cu_seqlens = cu_seqlens.tolist()
    if not isinstance(cu_seqlens, Sequence) or isinstance(cu_seqlens, (str, bytes)):
        raise TypeError(f"cu_seqlens is a {type(cu_seqlens).__name__}, must be a tensor or integers")
    starts = tuple(options.integer(f"cu_seqlens[{i}]", x) for i, x in enumerate(cu_seqlens))
    if len(starts) < 2 or starts[0] != 0:
        found = f"starts with {starts[0]}" if len(starts) > 1 else f"has {len(starts)} elements"
        raise ValueError(f"cu_seqlens {found}, must start with 0 and have an element more than sequences")
    for place, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            raise ValueError(f"cu_seqlens[{place + 1}] is {end}, must be at least {start}: it must rise")
    return starts


def batch_of_one(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(1, S, H, D) of packed q, k and v. ValueError for others."""
    for name, x in zip("qkv", tensors):
        if isinstance(x, torch.Tensor) and x.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must have 3 modes beside cu_seqlens")
    return [x[None] if isinstance(x, torch.Tensor) else x for x in tensors]


def check_starts(starts: tuple[int, ...], q: torch.Tensor, k: torch.Tensor, size: int) -> None:
    """ValueError where the rows of all ranks are not those of the sequences."""
    rows = q.shape[1]
    if k.shape[1] != rows:
        raise ValueError(f"k has {k.shape[1]} rows, must have {rows} like q beside cu_seqlens")
    if starts[-1] > size * rows:
        raise ValueError(
            f"cu_seqlens ends with {starts[-1]}, must be at most {size * rows}, the rows of all ranks"
        )
