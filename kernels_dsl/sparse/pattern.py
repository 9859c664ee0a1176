"""Patterns of kept blocks, and the lists by block row and block column that products derive, on the GPU.

Everything is torch operations without a wait for the GPU: extents follow from shapes alone. Indices are not
checked, but lists name only blocks that exist, whatever the indices say. The lists are
kept for as long as the index tensors live in the cache, and found again by their addresses.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from kernels_dsl.checks.eager_path import runs_kernels
from kernels_dsl.sparse.lists import MOST_ROWS, Lists, merge_neighbours, row_chunks, row_lists
from kernels_dsl.sparse.together import Together

_MAX_PATTERNS = 64
"""Patterns from which on the oldest whose index tensor is gone makes way for a new one."""
_MAX_LIVE_PATTERNS = 4096
"""From which on the oldest does in any case. A model calls one layer after the other: if one pattern of it
were forgotten, each would be when it is needed."""


class Pattern:
    """The kept blocks of a matrix of `rows` x `columns` blocks.

    `longest`: entries of the longest list by row and by column, where the host knows them; else None.
    `owner`: the index tensor of those who look it up, as long as they have it.
    """

    longest: tuple[int | None, int | None] = (None, None)
    owner: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)

    def __init__(self, crow: torch.Tensor, col: torch.Tensor, rows: int, columns: int) -> None:
        self.crow, self.col = crow, col
        self.rows, self.columns = rows, columns
        self.plans: dict[Any, Any] = {}
        self._chunks: dict[tuple[int, int, int], Any] = {}
        self._together: dict[tuple[int, bool], Together] = {}

    @property
    def nnz(self) -> int:
        """Number of kept blocks."""
        return self.col.shape[0]

    @cached_property
    def row_of(self) -> torch.Tensor:
        """(nnz,) int32: the block row of each kept block."""
        entries = torch.arange(self.nnz, dtype=torch.int32, device=self.col.device)
        # Not `repeat_interleave`, which fails in a kernel where starts are not those of all blocks.
        after = torch.searchsorted(self.first, entries, right=True, out_int32=True)
        return (after - 1).clamp_(0, max(self.rows - 1, 0))

    @cached_property
    def first(self) -> torch.Tensor:
        """(rows + 1,) int32: the first entry of each block row, then the end of the last. A start that falls
        counts as the one before, one outside the entries as the nearest inside."""
        if self._by_kernel:
            return self.by_row.first
        return self.crow.clamp(0, self.nnz).to(torch.int32).cummax(0).values

    @cached_property
    def column_of(self) -> torch.Tensor:
        """(nnz,) int32: the block column of each kept block; the nearest one for a column outside."""
        if self._by_kernel:
            return self.by_row.across
        return self.col.clamp(0, max(self.columns - 1, 0)).to(torch.int32).contiguous()

    @property
    def _by_kernel(self) -> bool:
        return bool(0 < self.rows <= MOST_ROWS and self.nnz and runs_kernels(self.col.device))

    @cached_property
    def by_row(self) -> Lists:
        """Lists of block rows: columns in the order in which they are stored."""
        if self._by_kernel:
            return row_lists(self.crow, self.col, self.columns)
        kept = torch.arange(self.nnz, dtype=torch.int32, device=self.col.device)
        return _lists(self.first, self.column_of, kept, self.columns)

    @cached_property
    def by_column(self) -> Lists:
        """Lists of block columns: rows ascending."""
        ordered, kept = torch.sort(self.column_of, stable=True)
        columns = torch.arange(self.columns + 1, dtype=torch.int32, device=self.col.device)
        first = torch.searchsorted(ordered, columns, out_int32=True)
        return _lists(first, self.row_of[kept], kept.to(torch.int32), self.rows)

    def together(self, rows: int, by_column: bool) -> Together:
        """So many block rows, or block columns, each taken for one, which keeps what any of them keeps."""
        key = rows, by_column
        if key not in self._together:
            lists, extent = (self.by_column, self.rows) if by_column else (self.by_row, self.columns)
            first, across, kept = merge_neighbours(lists, extent, rows)
            entries = torch.arange(self.nnz, dtype=torch.int32, device=self.col.device)
            self._together[key] = Together(_lists(first, across, entries, extent), kept)
        return self._together[key]

    def chunks(self, units: int, group: int = 0, together: int = 1) -> tuple[torch.Tensor, ...]:
        """Block rows cut into chunks of at most `units` kept blocks: rows and first entries of the chunks,
        then `column_of` and first entries of the block rows; int32.

        With `together` > 1, so many block rows each are taken for one, which keeps a column that any of them
        keeps; what each keeps of an entry is a fifth tensor (together, entries): `lists.merge_neighbours`.

        With `group`, the first chunks of that many rows come first, then their second ones: neighbours in the
        list meet neighbouring columns. How many chunks there are only the GPU knows: those behind the last
        are of no entry.
        """
        key = (units, group, together)
        if key not in self._chunks:
            self._chunks[key] = self._make_chunks(units, group, together)
        return self._chunks[key]

    def _make_chunks(self, units: int, group: int, together: int) -> tuple[torch.Tensor, ...]:
        first, columns, rows = self.first, self.column_of, self.rows
        kept: tuple[torch.Tensor, ...] = ()
        if together > 1:
            first, columns, *kept_of = merge_neighbours(self.by_row, self.columns, together)
            kept, rows = tuple(kept_of), -(-self.rows // together)
        if 0 < rows <= MOST_ROWS and self.nnz and runs_kernels(self.col.device):
            row, entry = row_chunks(first, self.nnz // units + min(rows, self.nnz), units, group)
        else:
            row, entry = self._chunks_by_torch(first, units, group)
        return row, entry, columns, first, *kept

    def _chunks_by_torch(
        self, first: torch.Tensor, units: int, group: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Block rows and first entries of the chunks of rows that start at `first`."""
        rows = first.shape[0] - 1
        counts = torch.div(first.diff() + (units - 1), units, rounding_mode="floor")
        ends = counts.cumsum(0, dtype=torch.int32)
        most = self.nnz // units + min(rows, self.nnz)
        number = torch.arange(most, dtype=torch.int32, device=self.col.device)
        row = torch.searchsorted(ends, number, right=True, out_int32=True)
        inside = row < rows
        row = row.clamp_max(rows - 1)
        place = number - (ends - counts)[row]
        entry = torch.where(inside, first[row] + place * units, first[-1])
        if group:
            outer = torch.where(inside, row // group, rows)
            order = torch.argsort(outer.long() * (self.columns // units + 2) + place, stable=True)
            row, entry = row[order], entry[order]
        return row, entry.to(torch.int32)


def _lists(first: torch.Tensor, across: torch.Tensor, kept: torch.Tensor, extent: int) -> Lists:
    lengths = first.diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    begin = first[order]
    end = begin + lengths[order]
    table = torch.stack((order.to(torch.int32), begin, end, torch.zeros_like(begin)), dim=1)
    if kept.shape[0] == 0:  # kernels get no empty tensors; no list reaches the entry
        across, kept = across.new_zeros(1), kept.new_zeros(1)
    return Lists(table, first, across, kept, extent)


_PATTERNS: OrderedDict[Any, Pattern] = OrderedDict()


def version(tensor: torch.Tensor) -> int:
    """A number that changes in place give a tensor another of; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


def pattern_of(crow: torch.Tensor, col: torch.Tensor, rows: int, columns: int) -> Pattern:
    """The pattern of these index tensors, which a call before may have left here.

    An entry holds the index tensors' memory, so no other tensor can have their addresses while it is there,
    even if theirs is replaced; a change in place gives them another version.
    """
    key = (
        crow.data_ptr(), col.data_ptr(), col.shape[0], crow.dtype, col.dtype, rows, columns, crow.stride(0),
        col.stride(0), version(crow), version(col), crow.get_device(),
    )  # fmt: skip
    found = _PATTERNS.get(key)
    if found is None:
        found = _PATTERNS[key] = Pattern(crow.detach(), col.detach(), rows, columns)
        found.owner = weakref.ref(col)
        if len(_PATTERNS) > _MAX_PATTERNS:
            _forget_one()
    return found


def _forget_one() -> None:
    there = list(_PATTERNS.items())  # other threads may add some meanwhile
    gone = next((key for key, pattern in there if pattern.owner() is None), None)
    if gone is None and len(there) > _MAX_LIVE_PATTERNS:
        gone = there[0][0]
    if gone is not None:
        _PATTERNS.pop(gone, None)
