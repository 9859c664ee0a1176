"""Lists of kept blocks in the one vector that kernels take, and several lists merged into one.

`kernels_dsl.blocks.schedule.block_lists` describes the vector. All of this is torch operations on the
GPU without a wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels_dsl.config.bsr import GAIN, PIECE, SUMS, TOGETHER, PiecesRule

if TYPE_CHECKING:
    from kernels_dsl.ops.bsr.pattern import Lists

HEAVY_LENGTH = 1.5
"""Lists longer than so many times the mean go first."""
HEADER = 4
"""Words before the table: how many lists are heavy, how many there are with pieces, and zeros."""


def pack(table: torch.Tensor, *entries: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
    """One int32 vector of a table (lists, 4), longest first, and the entries' vectors.

    `used` (1) int32: how many lines of the table count.
    """
    lengths = table[:, 2] - table[:, 1]
    lines = max(1, lengths.shape[0]) if used is None else used
    heavy = (lengths > HEAVY_LENGTH * lengths.sum() / lines).sum(dtype=torch.int32).view(1)
    counts = heavy if used is None else torch.cat((heavy, used))
    head = torch.nn.functional.pad(counts, (0, HEADER - counts.shape[0]))
    return torch.cat((head, table.flatten(), *entries))


def pack_pieces(lists: Lists, rule: PiecesRule) -> torch.Tensor:
    """As `pack`, long lists cut by the rule into pieces that are alike in size.

    `kernels_dsl.blocks.schedule.block_lists` and `partial_sums.Piece` describe what is added. There are
    nnz // rule.length pieces at most, each with a slot for its sum.
    """
    first, nnz = lists.first.long(), lists.kept.shape[0]
    count, lengths = first.shape[0] - 1, first.diff()
    pieces = torch.minimum(lengths.double() / rule.length, (lengths.double() / rule.each).sqrt()).long()
    pieces = torch.where(pieces > TOGETHER, pieces - pieces % TOGETHER, pieces.clamp_min(1))
    time = lengths.double() / pieces + (pieces + SUMS).double() * rule.each + rule.all
    pieces = torch.where((lengths >= rule.least) & (time <= GAIN * lengths.double()), pieces, 1)
    slots = torch.where(pieces > 1, pieces, 0)
    slot = slots.cumsum(0) - slots
    ends = pieces.cumsum(0)
    line = torch.arange(count + nnz // rule.length, device=first.device)
    row = torch.searchsorted(ends, line, right=True)
    inside = row < count
    row = row.clamp_max(count - 1)
    of, index = pieces[row], line - (ends - pieces)[row]
    begin = first[row] + torch.div(lengths[row] * index, of, rounding_mode="floor")
    end = first[row] + torch.div(lengths[row] * (index + 1), of, rounding_mode="floor")
    mark = torch.where(of > 1, PIECE, 0)
    order = torch.argsort(torch.where(inside, end - begin, -1), descending=True, stable=True)
    table = torch.stack((row, begin, end, mark), dim=1) * inside[:, None]
    words = torch.zeros(nnz + 1, dtype=torch.int32, device=first.device)
    word = (slot[row] + (of << 10) + (index << 20)).to(torch.int32)
    words[torch.where(inside & (of > 1), begin, nnz)] = word
    return pack(
        table[order].to(torch.int32), lists.across, lists.kept, words[:nnz], used=ends[-1:].to(torch.int32)
    )


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
