"""Lists of kept blocks in the one vector that kernels take, and lists of several blocks at a time.

`kernels_dsl.blocks.block_lists` describes the vector. All of this is torch operations on the GPU without a
wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels_dsl.ops.bsr_pattern import Lists

HEAVY_LENGTH = 1.5
"""Lists longer than so many times the mean go first."""
MOST_MATCHED = 2048
"""Lists up to which each is compared with each other one, to find those that share many blocks."""
_HEADER = 4  # words before the table: how many lists are heavy, and zeros
_ROUNDS = 16


def pack(
    table: torch.Tensor, across: torch.Tensor, kept: torch.Tensor, members: torch.Tensor | None = None
) -> torch.Tensor:
    """One int32 vector of a table (lists, 4), longest first, the lists' members, and the entries' vectors."""
    lengths = table[:, 2] - table[:, 1]
    heavy = (lengths > HEAVY_LENGTH * lengths.sum() / max(1, lengths.shape[0])).sum(dtype=torch.int32)
    head = torch.nn.functional.pad(heavy.view(1), (0, _HEADER - 1))
    middle = () if members is None else (members.flatten(),)
    return torch.cat((head, table.flatten(), *middle, across, kept.flatten()))


def partners(overlap: torch.Tensor) -> torch.Tensor:
    """(R,) int64: the partner of each of R lists, or itself for the one that is left where R is odd.

    overlap (R, R): how many blocks two lists share. Lists that are each other's best are matched, for some
    rounds; the rest are matched in ascending order.
    """
    count = overlap.shape[0]
    number = torch.arange(count, device=overlap.device)
    # No two pairs weigh the same, so that each round finds at least one.
    low, high = torch.minimum(number[:, None], number), torch.maximum(number[:, None], number)
    weight = overlap.double() + (low * count + high).double() / (count * count + 1)
    weight.fill_diagonal_(-1.0)
    partner = number.clone()
    for _ in range(_ROUNDS if count > 1 else 0):
        most, best = weight.max(1)
        partner = torch.where((best[best] == number) & (most >= 0), best, partner)
        gone = partner != number
        weight = weight.masked_fill(gone[:, None] | gone, -1.0)
    alone = partner == number
    rest = torch.argsort((~alone).to(torch.int8), stable=True)  # those without a partner come first
    other = rest[(number ^ 1).clamp_max(count - 1)]
    found = torch.empty_like(partner).scatter_(0, rest, other)
    return torch.where(alone & alone[found], found, partner)


def _grouped(mask: torch.Tensor, together: int) -> torch.Tensor:
    """(groups, together) int64: numbers of lists of which mask (R, blocks) says what they keep; R for none.

    Partners first, then partners of what those keep together, and so on.
    """
    count = mask.shape[0]
    members = torch.arange(count, device=mask.device)[:, None]
    while members.shape[1] < together:
        partner = partners(mask @ mask.T)
        number = torch.arange(mask.shape[0], device=mask.device)
        pair = (partner >= number).cumsum(0) - 1  # a pair goes by its first member
        pair = pair[torch.minimum(partner, number)]
        size = ((mask.shape[0] + 1) // 2,)
        first = number.new_zeros(size).scatter_reduce_(0, pair, number, "amin", include_self=False)
        second = number.new_zeros(size).scatter_reduce_(0, pair, number, "amax", include_self=False)
        alone = (first == second)[:, None]
        members = torch.cat((members[first], members[second].masked_fill(alone, count)), dim=1)
        mask = torch.maximum(mask[first], mask[second])
    return members


def _owners(lists: Lists) -> torch.Tensor:
    """(entries,) int64: the list that each entry belongs to."""
    number = torch.arange(lists.table.shape[0], device=lists.kept.device)
    return torch.repeat_interleave(number, lists.first.diff().long(), output_size=lists.kept.shape[0])


def _blocks_in_turn(order: torch.Tensor, together: int) -> torch.Tensor:
    """(groups, together): `order` cut up; its length for what is missing at the end."""
    count = order.shape[0]
    return torch.nn.functional.pad(order, (0, -count % together), value=count).view(-1, together)


def merge(
    lists: Lists, extent: int, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(first entries, blocks, kept blocks) of the lists of `members` (groups, together), merged.

    An entry is a block, of `extent` possible ones, that a member keeps, ascending: kept (together, entries)
    has each one's number among the values, their number where it keeps none. A block that a list names twice
    makes two entries. First entries: groups + 1.
    """
    (groups, together), nnz, device = members.shape, lists.kept.shape[0], lists.kept.device
    across = lists.across.long()
    place = torch.arange(groups * together, device=device)
    place_of = place.new_zeros(lists.table.shape[0] + 1).scatter_(0, members.flatten(), place)[_owners(lists)]

    key = (place_of // together * extent + across) * together + place_of % together
    key, order = torch.sort(key, stable=True)
    cell, side = key // together, key % together
    joins = (cell[1:] == cell[:-1]) & (side[1:] > side[:-1])
    new = torch.nn.functional.pad(~joins, (1, 0), value=True)
    entry = new.cumsum(0) - 1
    kept = torch.full((together, nnz), nnz, dtype=torch.int32, device=device)
    kept[side, entry] = lists.kept[order]
    dense = torch.zeros(nnz, dtype=torch.int32, device=device)
    dense[entry] = (cell % extent).to(torch.int32)

    lengths = place.new_zeros(groups).index_add_(0, cell // extent, new.long())
    first = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return first, dense, kept


def merge_neighbours(lists: Lists, extent: int, together: int) -> tuple[torch.Tensor, ...]:
    """`merge` of each `together` lists that follow one another."""
    number = torch.arange(lists.table.shape[0], device=lists.kept.device)
    return merge(lists, extent, _blocks_in_turn(number, together))


def pack_groups(lists: Lists, extent: int, together: int) -> torch.Tensor:
    """Lists of `together` blocks each (2, 4, ...) that share what they can, in one vector.

    `extent`: see `merge`.
    """
    count, device = lists.table.shape[0], lists.kept.device
    if count <= MOST_MATCHED:
        mask = torch.zeros(count, extent, device=device)
        mask[_owners(lists), lists.across.long()] = 1.0
        members = _grouped(mask, together)
    else:  # those of about the same length
        members = _blocks_in_turn(lists.table[:, 0].long(), together)
    first, dense, kept = merge(lists, extent, members)
    order = torch.argsort(first.diff(), descending=True, stable=True)
    number = torch.arange(members.shape[0], dtype=torch.int32, device=device)
    table = torch.stack((number, first[order], first[order + 1], torch.zeros_like(number)), 1)
    return pack(table, dense, kept, members[order].to(torch.int32))
