"""Work tiles handed out as CTAs become free: one counter in global memory for all of them.

The producer warp of a CTA asks for the next number near the end of a tile's loads, looks at the answer
behind them, and says to the consumers through a small ring in shared memory what tile it is and what it
visits, so that they need not compute it. The first number of a CTA is its own index, so a launch takes
exactly as many numbers as there are tiles; who takes the last one sets the counter back to 0 for the next
launch. A counter must not be shared by launches that can run at the same time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from kernels_dsl.blocks.attention.kv_blocks import Visit
from kernels_dsl.blocks.attention.query_tiles import QueryTile

STAGES = 2
"""Tiles in flight to the consumers of one CTA."""
WORDS = 8
"""Of a tile: its coordinates and its visit."""
END = 1 << 30
"""In place of a first coordinate: there are no more."""


def make_tile_ring(barriers: cute.Pointer, threads: int) -> pipeline.PipelineAsync:
    """Ring from the producer warp's 32 threads to `threads` others. The caller syncs.

    `barriers` points to 2 * STAGES 8-byte words of shared memory.
    """
    return pipeline.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, threads),
        defer_sync=True,
    )


@cute.jit
def ask_number(counter: cute.Tensor) -> Int32:
    """Takes a number; what comes back is for `number_of`, later: using it waits for global memory."""
    before = Int32(0)
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
    return before


@cute.jit
def number_of(asked: Int32, counter: cute.Tensor, size: Int32) -> Int32:
    """Next tile of this CTA, the same in all lanes of the warp; `size` or more: there is none."""
    if cute.arch.lane_idx() == 0 and asked == size - 1:
        counter[0] = Int32(0)
    number = cute.arch.shuffle_sync(asked, 0) + cute.arch.grid_dim()[0]
    return cute.arch.make_warp_uniform(number)


def make_slots(pointer: cute.Pointer) -> cute.Tensor:
    """(WORDS, STAGES) int32 in shared memory, aligned to 16 bytes."""
    return cute.make_tensor(pointer, cute.make_layout((WORDS, STAGES)))


def send_tile(
    ring: pipeline.PipelineAsync,
    slots: cute.Tensor,
    state: pipeline.PipelineState,
    at: QueryTile,
    visit: Visit,
) -> None:
    """Producer warp: passes a tile on to the consumers; blocks while they are STAGES tiles behind."""
    _send(ring, slots, state, (*at, *visit))


def send_end(ring: pipeline.PipelineAsync, slots: cute.Tensor, state: pipeline.PipelineState) -> None:
    """Producer warp: there are no more tiles."""
    _send(ring, slots, state, (Int32(END),) * WORDS)


@cute.jit
def _send(ring: pipeline.PipelineAsync, slots: cute.Tensor, state: pipeline.PipelineState, words: tuple):
    ring.producer_acquire(state)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(WORDS):
            slots[i, state.index] = words[i]
    ring.producer_commit(state)


def await_tile(ring: pipeline.PipelineAsync, slots: cute.Tensor, state: pipeline.PipelineState) -> Int32:
    """Consumers: waits for the next tile; END: there is none."""
    ring.consumer_wait(state)
    return cute.arch.make_warp_uniform(slots[0, state.index])


def take_tile(
    ring: pipeline.PipelineAsync, slots: cute.Tensor, state: pipeline.PipelineState
) -> tuple[QueryTile, Visit]:
    """Consumers: the tile that has been waited for. The caller advances the state."""
    words = [cute.arch.make_warp_uniform(slots[i, state.index]) for i in range(WORDS)]
    ring.consumer_release(state)
    fields = len(QueryTile._fields)
    return QueryTile(*words[:fields]), Visit(*words[fields:])
