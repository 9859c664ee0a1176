"""Tiles of keys that a CTA of the SM90 attention backward takes one after another, as it becomes free.

    producer   ask, send tile 0 | loads of tile 0 | ask, send tile 1 | loads of tile 1 as stages are empty ...
    others                      | tile 0                                             | tile 1 ...

The number of the next tile is asked for after the last loads of a tile, when two blocks are left to compute.
Tiles are handed out in their order, so one whose shares of dQ wait for their turn waits for tiles that other
CTAs have at hand, or have computed. That holds where some CTAs cannot start before others end, too, since the
first tile of a CTA is asked for as well: only where each has one tile it is that of the CTA's own number, as
the GPU starts CTAs in their order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention.query_blocks import KeyTile, decode_key_tile
from kernels_dsl.blocks.attention.seqlen import seq_info
from kernels_dsl.blocks.hw.pipeline import consumer_state, producer_state
from kernels_dsl.blocks.schedule import item_queue

from .backward_sm90_spec import HEADS_AT_ONCE, BackwardSpec
from .backward_work import BackwardWork, KeyJob, key_job


def tile_of(spec: BackwardSpec, work: BackwardWork, number: Int32) -> KeyTile:
    """Tile number `number` in the order of their start."""
    return decode_key_tile(number, work.tiles, spec.from_last, HEADS_AT_ONCE, spec.tiles_at_once)


def job_of(spec: BackwardSpec, work: BackwardWork, at: KeyTile) -> KeyJob:
    """The work of a tile."""
    return key_job(spec, work, at, seq_info(work.extent, at.batch))


def exists(spec: BackwardSpec, job: KeyJob) -> cutlass.Boolean:
    """Says whether a tile holds keys of its sequence: the grid is made for the longest one."""
    return job.at.n * spec.tile_k < job.seq.k_len if spec.varlen else cutlass.Boolean(True)


@cute.jit
def hand_out_tiles(
    spec: cutlass.Constexpr,
    work: BackwardWork,
    queue: item_queue.ItemQueue,
    state: Any,
    load: cutlass.Constexpr,
):
    """Producer warp: calls `load(state, job)`, which returns the next state, for each tile of this CTA, after
    it told the other warps which it is. Tiles that are not there are left out, see `exists`."""
    items = producer_state(item_queue.STAGES)
    size, ctas = work.tiles.size, Int32(cute.arch.grid_dim()[0])
    number, numbers, start = Int32(cute.arch.block_idx()[0]), size, ctas
    if ctas < size:
        # Every CTA asks once more than it has tiles, in vain; the last one of all sets the counter back to 0.
        numbers = size + ctas
        start = Int32(0)
        number = item_queue.number_taken(item_queue.ask_number(work.counter, numbers), start)
    while number < size:
        at = tile_of(spec, work, number)
        job = job_of(spec, work, at)
        if exists(spec, job):
            item_queue.send(queue, items, (at.n, at.kv_head, at.batch, Int32(0)), 1)
            items.advance()
            state = load(state, job)
        asked = item_queue.ask_number(work.counter, numbers)
        number = item_queue.number_taken(asked, start)
    item_queue.send(queue, items, (Int32(item_queue.NEVER), Int32(0), Int32(0), Int32(0)), 1)


@cute.jit
def for_each_tile(
    spec: cutlass.Constexpr,
    work: BackwardWork,
    queue: item_queue.ItemQueue,
    state: Any,
    run: cutlass.Constexpr,
) -> Any:
    """Other warps: calls `run(state, job)`, which returns the next state, for each tile of this CTA."""
    items = consumer_state(item_queue.STAGES)
    n, kv_head, batch, _ = item_queue.receive(queue, items, 1)
    items.advance()
    while n > item_queue.NEVER:
        state = run(state, job_of(spec, work, KeyTile(n, kv_head, batch)))
        n, kv_head, batch, _ = item_queue.receive(queue, items, 1)
        items.advance()
    return state
