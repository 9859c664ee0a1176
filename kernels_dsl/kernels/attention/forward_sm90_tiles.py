"""The work tiles of a CTA as its consuming roles see them: from a queue, or every so many-th."""

import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention import tile_queue
from kernels_dsl.blocks.attention.kv_blocks import Visit, visit_tile
from kernels_dsl.blocks.attention.query_tiles import QueryTile, decode_query_tile
from kernels_dsl.blocks.attention.seqlen import seq_info
from kernels_dsl.blocks.attention.work import Work


def first_tile(work: Work, queue: tuple | None, state) -> tuple[Int32, Int32]:
    """What a loop over tiles begins with, and the bound that it stays below.

    `queue` is None or the ring of `blocks.attention.tile_queue` and its slots, `state` the place in it.
    """
    if queue is None:
        return Int32(cute.arch.block_idx()[0]), work.tiles.size
    return tile_queue.await_tile(queue[0], queue[1], state), Int32(tile_queue.END)


def tile_at(spec, work: Work, number: Int32, queue: tuple | None, state) -> tuple[QueryTile, Visit]:
    """The tile at hand and the key blocks that it visits. The caller advances the state of a queue."""
    if queue is not None:
        return tile_queue.take_tile(queue[0], queue[1], state)
    at = decode_query_tile(number, work.tiles)
    seq = seq_info(work.extent, at.batch)
    return at, visit_tile(spec.variant, spec.tile, at, seq, work.window, work.lists)


def next_tile(number: Int32, queue: tuple | None, state) -> Int32:
    """What the loop goes on with."""
    if queue is None:
        return number + cute.arch.grid_dim()[0]
    return tile_queue.await_tile(queue[0], queue[1], state)
