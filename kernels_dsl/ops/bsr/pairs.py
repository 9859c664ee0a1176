"""Lists of kept blocks in pairs that share columns, which kernels load once for both.

All of this is torch operations on the GPU without a wait for it. The same pattern makes the same pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels_dsl.config.bsr import PAIR_ROWS, SECOND, SHARED
from kernels_dsl.ops.bsr.lists import is_heavy, pack

if TYPE_CHECKING:
    from kernels_dsl.ops.bsr.pattern import Lists

GROUP = 256
"""Lists among which partners are looked for: a score and a number of a pair fit in 32 bits."""
ROUNDS = 10
SHARED_GAIN, UNEVEN_COST = 2, 5
"""A step that a pair shares saves 0.4 of what a step takes that only one of the two has. Equally long lists
need not share anything: one without a partner is no faster."""
_MOST_SCORE = (1 << 15) - 1


def partners(lists: Lists) -> torch.Tensor:
    """(lists,) int64: the partner of each list, or itself where no other one is worth it.

    In rounds: those who are each other's best are a pair. With a total order of all pairs these are the ones
    of a greedy choice (Preis, "Linear time 1/2-approximation algorithm for maximum weighted matching", 1999);
    a few lists that would still find a partner after the last round stay alone.
    """
    count, device = lists.table.shape[0], lists.kept.device
    width = min(GROUP, count)
    groups = -(-count // width)
    # Neighbours in the table are alike in length, and equal ones in their order.
    order = lists.table[:, 0].long()
    place = torch.empty_like(order).scatter_(0, order, torch.arange(count, device=device))
    owner = torch.repeat_interleave(place, lists.first.diff().long(), output_size=lists.kept.shape[0])
    held = torch.zeros(groups * width, lists.extent, device=device)
    held[owner, lists.across.long()] = 1.0
    held = held.view(groups, width, -1)
    lengths = torch.full((groups * width,), -1, dtype=torch.int32, device=device)
    lengths[:count] = lists.table[:, 2] - lists.table[:, 1]
    lengths = lengths.view(groups, width)
    there = lengths >= 0
    score = SHARED_GAIN * torch.bmm(held, held.mT).to(torch.int32)
    score -= UNEVEN_COST * (lengths[:, :, None] - lengths[:, None, :]).abs()
    me = torch.arange(width, dtype=torch.int32, device=device)
    # Of equal scores neighbours' is best: where all are alike one round is enough.
    number = (me[:, None] ^ me) * GROUP + torch.minimum(me[:, None], me)
    weight = score.clamp(-1, _MOST_SCORE) * (GROUP * GROUP) + (GROUP * GROUP - 1 - number)
    allowed = (score >= 0) & there[:, :, None] & there[:, None, :] & (me[:, None] != me)
    weight = torch.where(allowed, weight, -1)
    found = me.long().expand(groups, width)
    for _ in range(ROUNDS):
        value, best = weight.max(2)
        mutual = (best.gather(1, best) == me) & (value >= 0)
        found = torch.where(mutual, best, found)
        weight = weight.masked_fill(mutual[:, :, None] | mutual[:, None, :], -1)
    start = torch.arange(groups, device=device)[:, None] * width
    return order[(found + start).flatten()[place]]


def pack_pairs(lists: Lists) -> torch.Tensor:
    """As `lists.pack`, for kernels whose clusters take a pair of lists, or one list twice.

    `kernels_dsl.blocks.block_lists.BlockLists` says what is in it. Lists are walked in ascending order of the
    dense matrix' blocks, a pair's as nearly as it lets both: what clusters read at one time they read near to
    each other, which is 4 % faster than any order.
    """
    first, nnz, extent, device = lists.first.long(), lists.kept.shape[0], lists.extent, lists.kept.device
    lengths, row = first.diff(), torch.arange(first.shape[0] - 1, device=device)
    partner = partners(lists)
    lead = torch.minimum(row, partner)
    # Entries by pair, block, and which of the two it is. Of equal ones both have one is shared.
    owner = torch.repeat_interleave(row, lengths, output_size=nnz)
    key = (lead[owner] * extent + lists.across) * 2 + (owner > lead[owner])
    key, order = torch.sort(key, stable=True)
    cell, side, kept = key // 2, key % 2, lists.kept[order]
    of, block = cell // extent, cell % extent
    joins = (cell[1:] == cell[:-1]) & (side[1:] > side[:-1])
    opens, closes = (torch.nn.functional.pad(joins, ends).long() for ends in ((0, 1), (1, 0)))
    shared = opens + closes

    both = torch.zeros_like(lengths).index_add_(0, of, opens)
    own = lengths - both[lead]
    alone = partner == row
    steps = torch.where(lead == row, both + torch.where(alone, own, torch.maximum(own, own[partner])), 0)
    begin = steps.cumsum(0) - steps
    entries = torch.where(lead == row, lengths + torch.where(alone, 0, lengths[partner]), 0)
    start = entries.cumsum(0) - entries

    def rank(flags: torch.Tensor) -> torch.Tensor:
        """How many entries before this one have the flag, in its pair."""
        before = flags.cumsum(0) - flags
        return before - before[start[of]]

    of_own = both[of] + torch.where(side > 0, rank((1 - shared) * side), rank((1 - shared) * (1 - side)))
    step = begin[of] + torch.where(shared > 0, rank(opens) - closes, of_own)
    across = torch.full((2 * nnz,), extent, device=device)
    values = torch.full((2 * nnz,), nnz, device=device)
    across[side * nnz + step] = block + shared * SHARED
    values[side * nnz + step] = kept.long()

    # A step of two different blocks is where their mean is. Steps that no pair has come last.
    pair_of = torch.full((nnz,), row.shape[0], device=device)
    pair_of[step] = of
    sums = torch.zeros_like(pair_of).index_add_(0, step, block)
    members = torch.zeros_like(pair_of).index_add_(0, step, torch.ones_like(block))
    middle = torch.div(2 * sums, members.clamp_min(1), rounding_mode="floor")
    walk = torch.argsort(pair_of * (2 * extent) + middle, stable=True)

    # Each line is half of the work of a pair, first halves first, or all of a list alone.
    second = (row != lead).long()
    word = lead + torch.maximum(row, partner) * PAIR_ROWS + second * SECOND
    table = torch.stack((word, begin[lead], (begin + steps)[lead], torch.zeros_like(word)), dim=1)
    work = steps[lead]
    turn = torch.where(is_heavy(work, work.shape[0]), 0, 1 + second)
    lines = torch.argsort(turn * (nnz + 1) + nnz - work, stable=True)
    parts = (x.view(2, nnz)[:, walk].flatten().to(torch.int32) for x in (across, values))
    return pack(table[lines].to(torch.int32), *parts)
