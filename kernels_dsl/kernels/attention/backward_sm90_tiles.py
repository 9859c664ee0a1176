"""Tiles of keys that a CTA of the SM90 attention backward takes one after another, as it becomes free.

    producer   loads of tile 0 | ask, send tile 1 | loads of tile 1, as far as stages are empty ...
    others     tile 0                        | tile 1 ...

The number of the next tile is asked for after the last loads of a tile, when two blocks are left to compute.
Tiles are handed out in their order, so one whose shares of dQ wait for their turn waits for tiles that other
CTAs have at hand, or have computed.
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
    return decode_key_tile(number, work.tiles, spec.from_last, HEADS_AT_ONCE)


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
    """Producer warp: calls `load(state, job)`, which returns the next state, for each tile of this CTA, and
    tells the other warps which it is. They know the first; and see `exists`."""
    items = producer_state(item_queue.STAGES)
    size, ctas = work.tiles.size, Int32(cute.arch.grid_dim()[0])
    number = Int32(cute.arch.block_idx()[0])
    at = tile_of(spec, work, number)
    while number < size:
        job = job_of(spec, work, at)
        if exists(spec, job):
            state = load(state, job)
        asked = item_queue.ask_number(work.counter, size)
        number = item_queue.number_taken(asked, ctas)
        at = tile_of(spec, work, number)
        first, sends = at.n, cutlass.Boolean(True)
        if number >= size:
            first = Int32(item_queue.NEVER)
        elif cutlass.const_expr(spec.varlen):
            sends = exists(spec, job_of(spec, work, at))
        if sends:
            item_queue.send(queue, items, (first, at.kv_head, at.batch, Int32(0)), 1)
            items.advance()


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
    at = tile_of(spec, work, Int32(cute.arch.block_idx()[0]))
    while at.n > item_queue.NEVER:
        job = job_of(spec, work, at)
        if exists(spec, job):
            state = run(state, job)
        n, kv_head, batch, _ = item_queue.receive(queue, items, 1)
        items.advance()
        at = KeyTile(n, kv_head, batch)
    return state
