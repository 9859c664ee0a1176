"""Lists of kept blocks in the one vector that kernels take, and several lists merged into one.

`kernels_dsl.blocks.block_lists` describes the vector. All of this is torch operations on the GPU without a
wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels_dsl.ops.bsr.pattern import Lists

HEAVY_LENGTH = 1.5
"""Lists longer than so many times the mean go first."""
_HEADER = 4  # words before the table: how many lists are heavy, and zeros


def pack(table: torch.Tensor, across: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """One int32 vector of a table (lists, 4), longest first, and the entries' vectors."""
    lengths = table[:, 2] - table[:, 1]
    heavy = (lengths > HEAVY_LENGTH * lengths.sum() / max(1, lengths.shape[0])).sum(dtype=torch.int32)
    head = torch.nn.functional.pad(heavy.view(1), (0, _HEADER - 1))
    return torch.cat((head, table.flatten(), across, kept))


def merge_neighbours(
    lists: Lists, extent: int, together: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(first entries, blocks, kept blocks) of each `together` lists that follow one another, merged.

    An entry is a block, of `extent` possible ones, that any of them keeps, in ascending order; kept
    (together, entries) has each one's number among the values, their number where it keeps none. A block that
    a list names twice makes two entries.
    """
    count, nnz, device = lists.table.shape[0], lists.kept.shape[0], lists.kept.device
    groups = -(-count // together)
    owner = torch.arange(count, device=device)
    owner = torch.repeat_interleave(owner, lists.first.diff().long(), output_size=nnz)
    key = (owner // together * extent + lists.across) * together + owner % together
    key, order = torch.sort(key, stable=True)
    cell, side = key // together, key % together
    joins = (cell[1:] == cell[:-1]) & (side[1:] > side[:-1])
    new = torch.nn.functional.pad(~joins, (1, 0), value=True)
    entry = new.cumsum(0) - 1
    kept = torch.full((together, nnz), nnz, dtype=torch.int32, device=device)
    kept[side, entry] = lists.kept[order]
    blocks = torch.zeros(nnz, dtype=torch.int32, device=device)
    blocks[entry] = (cell % extent).to(torch.int32)
    lengths = torch.zeros(groups, dtype=torch.int64, device=device)
    lengths.index_add_(0, cell // extent, new.long())
    first = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return first, blocks, kept
