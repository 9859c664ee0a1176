"""Keys and values in pages of a cache, which a table finds: rows of a block copied from where they lie."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_dsl.blocks.attention.kv_blocks import Window, diagonal_shift
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.hw.swizzled_rows import RowsTile, copy_row
from kernels_dsl.config.attention import AttentionVariant


class Pages(NamedTuple):
    """The pages of all sequences."""

    table: cute.Tensor
    """int32 (sequences, pages of one). Entries past a sequence's keys are nothing."""
    size: cute.FastDivmodDivisorV2
    """Keys of a page."""


def page_of(table: cute.Tensor, sequence: Int32, number: Int32, pages: Int32) -> Int32:
    """Page number `number` of a sequence in a cache of `pages`; the nearest for one outside.

    Nobody has looked at the table before."""
    return cutlass.max(cutlass.min(table[sequence, number], pages - 1), 0)


def first_visible(variant: AttentionVariant, window: Window, first_query: Int32, seq: SeqInfo) -> Int32:
    """The first key that a query from `first_query` on sees; pages before it may be none."""
    if not variant.left:
        return Int32(0)
    return cutlass.max(first_query + diagonal_shift(variant, seq) - window.left, 0)


@dataclass(frozen=True)
class PagedRowsLoader:
    """One thread's share of the copies of tiles of a sequence's keys (rows, columns): a `RowsLoader` for rows
    in pages.

    Rows before `first` and past the end are zeros, and neither they nor their pages are read.
    """

    tile: RowsTile
    threads: int
    dtype: type[cutlass.Numeric]
    source: Int64
    """Address of the head's first row in the cache."""
    page_pitch: Int64
    """Bytes from page to page."""
    pitch: Int64
    """Bytes from row to row of a page."""
    columns: Int32
    pages: Pages
    count: Int32
    """Pages of the cache."""
    sequence: Int32
    first: Int32
    row: Int32
    """First row of this thread in a tile."""
    chunk: Int32
    """This thread's chunk of every column block."""

    def start(self, first_row: Int32, end_row: Int32, address: Int32, guard_rows: bool) -> None:
        """Starts the copy of the tile from `first_row` on to shared memory at `address`."""
        del guard_rows  # a row that does not count has no page to guess at
        step = self.tile.check_threads(self.threads)
        rows = range(0, self.tile.rows, step)
        keys = [first_row + self.row + step_row for step_row in rows]
        # All loads from the table are under way before the first is waited for.
        found = [self._place(key, end_row) for key in keys]
        for step_row, key, (page, place) in zip(rows, keys, found):
            source = self.source + Int64(page) * self.page_pitch + Int64(place) * self.pitch
            target = address + self.tile.chunk_offset(self.row + step_row, self.chunk)
            valid = (key >= self.first) & (key < end_row)
            copy_row(self.tile, self.dtype, self.columns, source, self.chunk, target, valid)

    def _place(self, key: Int32, end_row: Int32) -> tuple[Int32, Int32]:
        """Page and row in it of a key, or of the nearest that counts."""
        nearest = cutlass.max(cutlass.min(cutlass.max(key, self.first), end_row - 1), 0)
        number, place = divmod(nearest, self.pages.size)
        return page_of(self.pages.table, self.sequence, number, self.count), place


def paged_loader(
    tile: RowsTile,
    tensor: cute.Tensor,  # (keys of a page, columns, pages)
    threads: int,
    thread: Int32,
    pages: Pages,
    sequence: Int32,
    first: Int32,
) -> PagedRowsLoader:
    """The share of thread `thread` of `threads` of the copies from one head of a cache."""
    return PagedRowsLoader(
        tile, threads, tensor.element_type, tensor.iterator.toint(), Int64(tensor.stride[2]) * 2,
        Int64(tensor.stride[0]) * 2, Int32(tensor.shape[1]), pages, Int32(tensor.shape[2]),
        sequence, first, row=thread // tile.chunks, chunk=thread % tile.chunks,
    )  # fmt: skip
