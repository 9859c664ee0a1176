"""Block rows of a matrix cut into chunks of so many kept blocks, the tiles of a sampled product.

A thread a block row counts the chunks that come before its own, for the reason that `rows` gives.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.hw.dsl import entry_name

THREADS = 128


def row_chunks(
    first: cute.Tensor,
    row_of: cute.Tensor,
    entry_of: cute.Tensor,
    units: cutlass.Int32,
    group: cutlass.Int32,
    stream,
):
    """Launch the chunks: row_of and entry_of (chunks) int32, each one's block row and first entry.

    first (rows + 1): int32 or int64. Each chunk has `units` entries, a row's last what is left. The first
    chunks of `group` rows come before their second ones. Places after the last chunk have the last row and
    the end of the entries.
    """
    most = cutlass.max(first.shape[0], row_of.shape[0])
    grid = [cute.ceil_div(most, THREADS), 1, 1]
    row_chunks_kernel(first, row_of, entry_of, units, group).launch(
        grid=grid, block=[THREADS, 1, 1], stream=stream
    )


@entry_name("row_chunks")
@cute.kernel
def row_chunks_kernel(
    first: cute.Tensor,
    row_of: cute.Tensor,
    entry_of: cute.Tensor,
    units: Int32,
    group: Int32,
):
    """Device side of `row_chunks`: a thread for each row, and for each place."""
    thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    rows, most = first.shape[0] - 1, row_of.shape[0]
    start = thread // group * group
    before, every = Int32(0), Int32(0)
    for row in cutlass.range(rows, unroll=4):
        count = chunks_of(first, row, units)
        every += count
        before += count * Int32(row < start)
    if thread < rows:
        last = cutlass.min(start + group, rows)
        for chunk in cutlass.range(chunks_of(first, thread, units), unroll=1):
            place = before
            for row in cutlass.range(start, last, unroll=1):
                count = chunks_of(first, row, units)
                place += cutlass.min(count, chunk) + Int32((row < thread) & (count > chunk))
            if place < most:
                row_of[place] = thread
                entry_of[place] = Int32(first[thread]) + chunk * units
    if (thread >= every) & (thread < most):
        row_of[thread] = rows - 1
        entry_of[thread] = Int32(first[rows])


@cute.jit
def chunks_of(first: cute.Tensor, row: Int32, units: Int32) -> Int32:
    """The number of chunks of a row."""
    return (cutlass.max(Int32(first[row + 1]) - Int32(first[row]), 0) + (units - 1)) // units
