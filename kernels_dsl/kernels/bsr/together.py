"""Blocks of rows that share tiles, packed: what each of some block rows keeps in a column, side by side.

What is packed is contiguous along D's blocked mode, 128 bytes: TMA is slow with shorter rows. A thread has
eight by eight elements of a block, and turns them where blocks are stored the other way round. What a row
does not keep is written as zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.config.bsr import NAN_WORD

THREADS = 256
VECTOR = 8
"""Elements of 16 bits in a vector."""


def pack_together(
    values: cute.Tensor,
    first: cute.Tensor,
    kept: cute.Tensor,
    packed: cute.Tensor,
    words: cute.Tensor,
    stream,
    transposed: cutlass.Constexpr[bool],
):
    """Launch the packing of 16-bit values (blocks, ., .) or (L, blocks, ., .), contiguous.

    A block's rows lie along D's blocked mode, with `transposed` its columns. kept (rows, blocks), int32: what
    each of the rows has of an entry, or `blocks` for nothing. first (groups + 1), int32: the last is how many
    entries there are. packed (blocks, K, rows * MN), or with L first, of blocks of MN by K: written up to
    there. words[NAN_WORD], int32, is cleared.
    """
    rank = cute.rank(values)
    blocks, block = kept.shape[1], (values.shape[rank - 2], values.shape[rank - 1])
    parts = blocks * (kept.shape[0] * block[0] * block[1] // VECTOR**2)
    grid = [cute.ceil_div(parts, THREADS), values.shape[0] if rank == 4 else 1, 1]
    pack_together_kernel(values, first, kept, packed, words, transposed).launch(
        grid=grid, block=[THREADS, 1, 1], stream=stream
    )


@entry_name("bsr_pack_together")
@cute.kernel
def pack_together_kernel(
    values: cute.Tensor,
    first: cute.Tensor,
    kept: cute.Tensor,
    packed: cute.Tensor,
    words: cute.Tensor,
    transposed: cutlass.Constexpr,
):
    """Device side of `pack_together`: all of a part's vectors are loaded before any is stored."""
    number, batch, _ = cute.arch.block_idx()
    thread = cute.arch.thread_idx()[0]
    if (number == 0) & (batch == 0) & (thread == 0):
        words[NAN_WORD] = Int32(0)
    rank = cute.rank(values)
    bm, bk = values.shape[rank - 2], values.shape[rank - 1]
    along, k = (bk, bm) if transposed else (bm, bk)
    rows, blocks = kept.shape
    wide = rows * along // VECTOR
    of_entry = wide * (k // VECTOR)
    place = number * THREADS + thread
    if place < first[first.shape[0] - 1] * of_entry:
        entry, inside = place // of_entry, place % of_entry
        at, at_k = inside % wide * VECTOR, inside // wide * VECTOR
        held = cute.make_rmem_tensor((VECTOR, VECTOR), values.element_type)
        held.fill(0)
        of_row = kept[at // along, entry]
        if of_row < blocks:
            block = values.iterator + (Int64(batch) * blocks + of_row) * (bm * bk)
            row, column = (at_k, at % along) if transposed else (at % along, at_k)
            for i in cutlass.range_constexpr(VECTOR):
                cute.autovec_copy(vector_at(block + ((row + i) * bk + column)), held[None, i])
        if cutlass.const_expr(not transposed):
            turned = cute.make_rmem_tensor((VECTOR, VECTOR), values.element_type)
            for i in cutlass.range_constexpr(VECTOR):
                for j in cutlass.range_constexpr(VECTOR):
                    turned[i, j] = held[j, i]
            held = turned
        target = packed.iterator + (Int64(batch) * blocks + entry) * (rows * along * k)
        for i in cutlass.range_constexpr(VECTOR):
            cute.autovec_copy(held[None, i], vector_at(target + ((at_k + i) * (rows * along) + at)))


def vector_at(start: cute.Pointer) -> cute.Tensor:
    """The vector in memory that begins there."""
    return cute.make_tensor(start.align(16), cute.make_layout(VECTOR))
