"""Keys and values in pages (pages, keys of a page, KV heads, D), found by a table: checks, and gathering."""

from __future__ import annotations

import torch

from kernels_dsl.checks.eager_path import check_tensor
from lowering.records import NamedTuple

MOST_KEYS = 1 << 30
"""Of a sequence: sums of two positions stay within 32 bits."""


def capacity_of(k: torch.Tensor, table: torch.Tensor) -> int:
    """Keys that each sequence has room for."""
    return table.shape[1] * k.shape[1]


def check_pages(
    k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, cu_seqlens_k: object, used: object, batch: int
) -> int:
    """Keys that a sequence has room for, 0 where there is no page at all; k and v have four modes each.

    TypeError or ValueError for arguments that do not go with `block_table`.
    """
    if cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens_k is given beside block_table, must be None: seqused_k says how many keys each "
            "sequence has"
        )
    if used is None:
        raise ValueError("seqused_k is None, must be given beside block_table: the keys of each sequence")
    check_tensor("block_table", table)
    if table.dtype != torch.int32 or table.device != k.device:
        raise TypeError(f"block_table is {table.dtype} on {table.device}, must be torch.int32 on {k.device}")
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(
            f"block_table has shape {tuple(table.shape)}, must be ({batch}, pages of a sequence), a row for "
            "each sequence of cu_seqlens_q"
        )
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"v has {v.shape[0]} pages, must have {k.shape[0]} like k")
    if k.shape[1] < 1:
        raise ValueError(f"k has pages of {k.shape[1]} keys, must have pages of at least 1")
    capacity = capacity_of(k, table)
    if capacity > MOST_KEYS:
        raise ValueError(
            f"block_table has {table.shape[1]} pages of {k.shape[1]} keys a sequence, room for {capacity}, "
            f"must be for at most {MOST_KEYS}"
        )
    return capacity if k.shape[0] else 0


def check_table(used: torch.Tensor, table: torch.Tensor, room: int, pages: int) -> None:
    """ValueError for keys of sequences that have room for `room`, and for their entries in a table of
    `pages`. Waits for the GPU."""
    of_host, size = table.tolist(), room // max(table.shape[1], 1)
    for b, length in enumerate(used.tolist()):
        if not 0 <= length <= room:
            raise ValueError(f"seqused_k[{b}] is {length}, must be from 0 to {room}")
        for n, page in enumerate(of_host[b][: -(-length // size)] if size else ()):
            if not 0 <= page < pages:
                raise ValueError(f"block_table[{b}, {n}] is {page}, must be from 0 to {pages - 1}")


class Gathered(NamedTuple):
    """Pages of all sequences as packed tensors, each sequence with all that it has room for."""

    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    """int32 (sequences + 1,)."""


def gather_pages(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> Gathered:
    """Copies the pages of each sequence behind each other: (sequences · room, KV heads, D).

    The host waits for nothing. Entries past a sequence's keys may be anything: they are taken for some page.
    """
    pages = table.clamp(0, k.shape[0] - 1).flatten()
    packed = [x.index_select(0, pages).flatten(0, 1) for x in (k, v)]
    numbers = torch.arange(table.shape[0] + 1, dtype=torch.int32, device=table.device)
    return Gathered(packed[0], packed[1], numbers * capacity_of(k, table))
