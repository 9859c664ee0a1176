"""Lists of kept blocks, and the one vector of them that kernels take: as they are, cut in pieces, in pairs.

`kernels_dsl.blocks.schedule.block_lists` describes the vector. Lists and chunks of block rows are a kernel
each (`kernels_dsl.kernels.lists`), pairing is four (`pairs` there says how), the rest torch operations; none
of them waits for the GPU, and each gives the same vector in every run.
"""

from __future__ import annotations

from dataclasses import field
from functools import cached_property

import torch

import lowering
from kernels_dsl.config.bsr import (
    GAIN,
    PAIR_COLUMNS,
    PAIR_ROWS,
    PIECE,
    SUMS,
    TOGETHER,
    MatchRule,
    PiecesRule,
    match_warps,
    most_columns,
    row_list_parts,
)
from lowering import recording
from lowering.records import frozen

HEAVY_LENGTH = 1.5
"""Lists longer than so many times the mean go first."""
HEADER = 4
"""Words before the table: how many lists are heavy, how many there are with pieces, and zeros."""
RULE = MatchRule()
"""A step that a pair shares saves 0.4 of a step that only one of the two has."""
_FILES = {
    "pairs": ("pair_weights", "pair_match", "pair_lines", "pair_steps"),
    "rows": ("row_lists",),
    "chunks": ("row_chunks",),
}
FUNCTIONS = {
    name: lowering.jit(f"kernels_dsl.kernels.lists.{file}:{name}", name=name)
    for file, names in _FILES.items()
    for name in names
}
MOST_ROWS = 8192
"""Block rows up to which kernels make their lists and chunks: they compare each with all."""


@frozen
class Lists:
    """Kept blocks list by list, int32, on the indices' device.

    `table` (lists, 4): number, first entry, entry behind the last, and 0, of each list: longest first, equal
    ones in ascending order. List r has the entries first[r] .. first[r + 1] - 1 of `across` (number of the
    block along the other mode, below `extent`) and of `kept` (number among the values).
    """

    table: torch.Tensor
    first: torch.Tensor
    across: torch.Tensor
    kept: torch.Tensor
    extent: int
    _pieces: dict[PiecesRule, torch.Tensor] = field(default_factory=dict)
    _pairs: list[torch.Tensor] = field(default_factory=list)
    made: torch.Tensor | None = None  # the packed vector, where it was made with the lists

    def in_pieces(self, rule: PiecesRule) -> torch.Tensor:
        """As `packed`, long lists in pieces: `pack_pieces`."""
        if rule not in self._pieces:
            self._pieces[rule] = pack_pieces(self, rule)
        return self._pieces[rule]

    @cached_property
    def packed(self) -> torch.Tensor:
        """In one vector, as kernels take them: `kernels_dsl.blocks.schedule.block_lists.unpack_lists`."""
        return pack(self.table, self.across, self.kept) if self.made is None else self.made

    @property
    def in_pairs(self) -> torch.Tensor:
        """As `packed`, in pairs that share blocks: `pack_pairs`."""
        if self._pairs:
            return self._pairs[0]
        pairs = pack_pairs(self)
        if not (pairs.device.type == "cpu" and recording.active()):  # which launches nothing
            self._pairs.append(pairs)
        return pairs


def row_lists(first: torch.Tensor, columns: torch.Tensor, extent: int) -> Lists:
    """Lists of block rows by one kernel, from the format's index tensors, which have entries."""
    rows, entries = first.shape[0] - 1, columns.shape[0]
    parts = row_list_parts(rows, entries)
    words = torch.empty(parts.end, dtype=torch.int32, device=columns.device)
    FUNCTIONS["row_lists"](first, columns, words, extent, heavy=HEAVY_LENGTH)
    packed = words[: HEADER + 4 * rows + 2 * entries]
    table = packed[HEADER : HEADER + 4 * rows].view(rows, 4)
    starts = words[parts.first : parts.first + rows + 1]
    across, kept = words[parts.across : parts.across + entries], words[parts.kept :]
    return Lists(table, starts, across, kept, extent, made=packed)


def row_chunks(first: torch.Tensor, most: int, units: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block rows and first entries of chunks of `units` entries, in `most` places, by one kernel."""
    row, entry = (torch.empty(most, dtype=torch.int32, device=first.device) for _ in range(2))
    FUNCTIONS["row_chunks"](first, row, entry, units, max(group, 1))
    return row, entry


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
    # Not `repeat_interleave`, which fails in a kernel where starts are not those of all blocks.
    entries = torch.arange(nnz, dtype=torch.int32, device=device)
    owner = (torch.searchsorted(lists.first, entries, right=True) - 1).clamp_(0, count - 1)
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


def check_pairs(count: int, extent: int) -> None:
    """ValueError for more lists than can be paired, or more blocks than they may name."""
    if count > PAIR_ROWS:
        raise ValueError(f"there are {count} lists to pair, must be at most {PAIR_ROWS}")
    if extent > PAIR_COLUMNS:
        raise ValueError(f"lists to pair may name {extent} blocks, must be at most {PAIR_COLUMNS}")


def pack_pairs(lists: Lists) -> torch.Tensor:
    """As `pack`, for kernels whose clusters take a pair of lists, or one list twice.

    `kernels_dsl.blocks.schedule.block_lists.BlockLists` says what is in it. Which lists are a pair is
    a greedy matching by `RULE`. Steps are in the order in which the longer list of a pair is stored.

    ValueError where there are more lists than PAIR_ROWS, or more blocks to name than PAIR_COLUMNS.
    """
    count, device, extent = lists.table.shape[0], lists.kept.device, lists.extent
    check_pairs(count, extent)
    members = min(count, RULE.group)
    warps, most = match_warps(members), most_columns(extent)
    shape = (-(-count // RULE.group), members, -(-members // 8) * 8)
    weights = torch.empty(shape, dtype=torch.int16, device=device)
    mates = torch.empty(count, dtype=torch.int32, device=device)
    words = HEADER + 4 * count + 4 * lists.kept.shape[0]
    packed = torch.empty(words, dtype=torch.int32, device=device)
    FUNCTIONS["pair_weights"](lists.table, lists.across, weights, extent, rule=RULE, most=most)
    FUNCTIONS["pair_match"](lists.table, weights, mates, rule=RULE, warps=warps)
    FUNCTIONS["pair_lines"](lists.table, mates, packed, warps=warps, heavy=HEAVY_LENGTH)
    FUNCTIONS["pair_steps"](lists.table, mates, lists.across, lists.kept, packed, extent, most=most)
    return packed
