"""Loads of an operand's last tile without the rows that the tensor does not have.

TMA fills those with zeros, at a quarter of the speed at which it loads others, and the CTA waits for them.
Here a second TMA box has the rows that there are. What is multiplied with the others reaches no result.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.barriers import fence_for_async_readers
from kernels_dsl.blocks.hw.layouts import major_mode, staged_smem_layout

ROWS = 8
"""Rows of a unit of the widest swizzle."""


def last_rows_atom(
    tensor: cute.Tensor, dtype: type[cutlass.Numeric], rows: int, k: int
) -> tma.TmaCopy | None:
    """TMA loads of `rows` rows and `k` of K, of (MN, K, L) with K contiguous; None for no rows."""
    if rows == 0:
        return None
    layout = staged_smem_layout(dtype, (rows, k), 1, major_mode(tensor))
    return tma.make_load_atom(tensor, layout, (rows, k))


def last_rows_loader(
    load: tma.TmaCopy, tiles: cute.Tensor, rows: int, first: Int32, batch: Int32, evict_first: bool
) -> Callable[[Int32, Int32, cute.Pointer], None]:
    """`tma.tile_loader` of the `rows` rows from number `first` on, to the first of each of `tiles`.

    Those are the ring's (rows, K, stages), and a row of a tile is one line of the swizzle.
    """
    tile_rows, columns, stages = (cute.size(tiles, mode=[mode]) for mode in range(3))
    lines = cute.make_layout(((ROWS, rows // ROWS), (columns, 1)), stride=((columns, ROWS * columns), (1, 0)))
    places = cute.append(lines, cute.make_layout(stages, stride=tile_rows * columns))
    own = cute.make_tensor(tiles.iterator, places)
    from_first = cute.domain_offset((first, 0, 0), load.coordinates)
    parts = cute.local_tile(from_first, (rows, columns), (None, None, None))  # (rows, bK, restMN, restK, L)
    mine = tma.load_partition(load.atom, parts, own, cute.make_layout(1), Int32(0))
    return tma.tile_loader(load.atom, mine.tiles[None, 0, None, batch], mine.shared, None, evict_first)


@cute.jit
def fill_rows(tiles: cute.Tensor, first: cutlass.Constexpr, threads: cutlass.Constexpr):
    """Zeros the rows from number `first` on of each stage of `tiles` (rows, K, stages).

    All `threads` of the CTA do it, before anything is loaded.
    """
    rows, columns, stages = (cute.size(tiles, mode=[mode]) for mode in range(3))
    line = columns * tiles.element_type.width // 64
    words = cute.make_tensor(
        cute.recast_ptr(tiles.iterator, dtype=Int64), cute.make_layout(rows * line * stages)
    )
    filled = (rows - first) * line
    for i in cutlass.range(cute.ceil_div(filled * stages, threads), unroll=1):
        word = cute.arch.thread_idx()[0] + i * threads
        if word < filled * stages:
            words[word // filled * (rows * line) + first * line + word % filled] = Int64(0)
    fence_for_async_readers()
    cute.arch.barrier()
