"""Lists of the block rows of a matrix, longest first, from the index tensors of its format.

A thread a block row counts the rows that come before its own. That is the square of the rows in all, but one
launch, where sorting and packing by PyTorch are ten: each of its kernels takes milliseconds to load at first.

Indices that say nonsense make lists of blocks that exist: products read what lists say and look no further.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.schedule.block_lists import HEADER
from kernels_dsl.config.bsr import row_list_parts

THREADS = 128


def row_lists(
    first: cute.Tensor,
    columns: cute.Tensor,
    made: cute.Tensor,
    extent: cutlass.Int32,
    stream,
    heavy: cutlass.Constexpr,
):
    """Launch the lists: `made` int32, whose parts `config.bsr.row_list_parts` says.

    first (rows + 1), columns (entries): of the format, int32 or int64. A start that falls counts as the one
    before, starts outside the entries and columns outside the `extent` as the nearest inside. `heavy`: lists
    so many times longer than the mean are counted in the header.
    """
    most = cutlass.max(first.shape[0], columns.shape[0])
    grid = [cute.ceil_div(most, THREADS), 1, 1]
    row_lists_kernel(first, columns, made, extent, heavy).launch(
        grid=grid, block=[THREADS, 1, 1], stream=stream
    )


@entry_name("row_lists")
@cute.kernel
def row_lists_kernel(
    first: cute.Tensor, columns: cute.Tensor, made: cute.Tensor, extent: Int32, heavy: cutlass.Constexpr
):
    """Device side of `row_lists`: a thread for each row, entry and start."""
    thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    rows, entries = first.shape[0] - 1, columns.shape[0]
    parts = row_list_parts(rows, entries)
    if thread < entries:
        block = within(columns[thread], extent - 1)
        made[HEADER + 4 * rows + thread] = block
        made[HEADER + 4 * rows + entries + thread] = thread
        made[parts.across + thread] = block
        made[parts.kept + thread] = thread
    if thread <= rows:
        begin = Int32(0)
        for row in cutlass.range(thread + 1, unroll=4):
            begin = cutlass.max(begin, within(first[row], entries))
        made[parts.first + thread] = begin
        if thread < rows:
            end = cutlass.max(begin, within(first[thread + 1], entries))
            start = within(first[0], entries)
            # Of falling starts the last may be less than the lists hold: `heavies` is then off, no more.
            limit = heavy * Float32(within(first[rows], entries) - start)
            before, heavies, last = Int32(0), Int32(0), start
            for row in cutlass.range(rows, unroll=4):
                start, last = last, cutlass.max(last, within(first[row + 1], entries))
                longer = last - start - (end - begin)
                before += Int32((longer > 0) | ((longer == 0) & (row < thread)))
                heavies += Int32(Float32(last - start) * Float32(rows) > limit)
            line = HEADER + 4 * before
            made[line] = thread
            made[line + 1] = begin
            made[line + 2] = end
            made[line + 3] = Int32(0)
            if thread == 0:
                made[0] = heavies
                for word in cutlass.range_constexpr(1, HEADER):
                    made[word] = Int32(0)


@cute.jit
def within(index: cutlass.Integer, most: Int32) -> Int32:
    """The index, or the nearest of 0 to `most`. Compared in its own width: int64 may hold anything."""
    kind = type(index)
    return Int32(cutlass.max(cutlass.min(index, kind(most)), kind(0)))
