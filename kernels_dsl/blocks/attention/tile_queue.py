"""The work tiles of a CTA: handed out as CTAs become free by one counter in global memory, or every n-th.

The queue. The producer warp of a CTA asks for the next number near the end of a tile's loads, reads the
answer after them, and passes on to the consumers, through a small ring in shared memory, which tile it is and
what it visits, so that they need not compute it. The first number of a CTA is its own index, so a launch
takes exactly as many numbers as there are tiles; whoever takes the last one resets the counter to 0 for the
next launch. A counter must not be shared by launches that can run at the same time.

    producer   send tile 0 | load tile 0 ... ask | rest of tile 0 | send tile 1 | load tile 1 ...
    consumers               take tile 0 | compute ...             | take tile 1 | compute ...
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline

from kernels_dsl.blocks.attention.kv_blocks import Visit, visit_tile
from kernels_dsl.blocks.attention.query_tiles import QueryTile, decode_query_tile, ordered_query_tile
from kernels_dsl.blocks.attention.seqlen import SeqInfo, seq_info
from kernels_dsl.blocks.attention.work import AttentionSpec, Work
from kernels_dsl.blocks.hw.pipeline import consumer_state

STAGES = 2
"""Tiles in flight to the consumers of one CTA."""
WORDS = 8
"""Words that describe a tile: its coordinates and its visit."""
END = 1 << 30
"""First coordinate of what is sent after the last tile."""


class TileQueue(NamedTuple):
    """The way from the producer warp to the consumers of a CTA."""

    ring: pipeline.PipelineAsync
    slots: cute.Tensor
    """(WORDS, STAGES) int32 in shared memory."""


class TilePosition(NamedTuple):
    """Position among the work tiles of a CTA."""

    number: Int32
    """Of the tile, or its first coordinate where it comes from a queue."""
    state: pipeline.PipelineState
    """Position in the queue."""


class WorkTile(NamedTuple):
    """A work tile: its coordinates, its sequence, and the key blocks that it visits."""

    at: QueryTile
    seq: SeqInfo
    visit: Visit


def work_tile(spec: AttentionSpec, work: Work, number: Int32) -> WorkTile:
    """Work tile number `number`."""
    if work.lists is not None and work.lists.order is not None:
        at = ordered_query_tile(number, work.tiles, work.lists.order)
    else:
        at = decode_query_tile(number, work.tiles)
    seq = seq_info(work.extent, at.batch)
    return WorkTile(at, seq, visit_tile(spec.variant, spec.tile, at, seq, work.window, work.lists))


@dataclass(frozen=True)
class ConsumedTiles:
    """The work tiles of a CTA as its consuming roles see them: a source of tiles, see
    `blocks.schedule.tile_source`."""

    spec: AttentionSpec
    work: Work
    queue: TileQueue | None
    """None: the tiles are every so many-th."""

    def first(self) -> TilePosition:
        """The position of the first tile."""
        state = consumer_state(STAGES)
        if self.queue is None:
            return TilePosition(Int32(cute.arch.block_idx()[0]), state)
        return TilePosition(await_tile(self.queue, state), state)

    def size(self) -> Int32:
        """The bound of positions' numbers, for `more`."""
        return self.work.tiles.size if self.queue is None else Int32(END)

    def more(self, position: TilePosition, size: Int32) -> Boolean:
        """True where there is a tile at `position`."""
        return position.number < size

    def decode(self, position: TilePosition) -> tuple[WorkTile, TilePosition]:
        """The tile at `position`, and the position for `next`."""
        number, state = position
        if self.queue is None:
            at, _, visit = work_tile(self.spec, self.work, number)
        else:
            at, visit = take_tile(self.queue, state)
            state.advance()
        tile = WorkTile(at, seq_info(self.work.extent, at.batch), visit)
        return tile, TilePosition(number, state)

    def next(self, position: TilePosition) -> TilePosition:
        """The next position."""
        number, state = position
        if self.queue is None:
            return TilePosition(number + cute.arch.grid_dim()[0], state)
        return TilePosition(await_tile(self.queue, state), state)


def make_tile_queue(barriers: cute.Pointer, slots: cute.Pointer, threads: int) -> TileQueue:
    """Queue from the producer warp's 32 threads to `threads` others. The caller syncs.

    `barriers` points to 2 * STAGES 8-byte words of shared memory, `slots` to WORDS * STAGES words, aligned to
    16 bytes.
    """
    ring = pipeline.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, threads),
        defer_sync=True,
    )
    return TileQueue(ring, cute.make_tensor(slots, cute.make_layout((WORDS, STAGES))))


@cute.jit
def ask_number(counter: cute.Tensor) -> Int32:
    """Takes a number, for a later `number_of`: using it waits for global memory."""
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


def send_tile(queue: TileQueue | None, state: pipeline.PipelineState, tile: WorkTile) -> None:
    """Producer warp: passes a tile on to the consumers; blocks while they are STAGES tiles late.

    Does nothing without a queue. The caller advances the state.
    """
    if queue is not None:
        _send(queue, state, (*tile.at, *tile.visit))


def send_end(queue: TileQueue | None, state: pipeline.PipelineState) -> None:
    """Producer warp: says that there are no more tiles."""
    if queue is not None:
        _send(queue, state, (Int32(END),) * WORDS)


@cute.jit
def _send(queue: TileQueue, state: pipeline.PipelineState, words: tuple[Int32, ...]):
    queue.ring.producer_acquire(state)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(WORDS):
            queue.slots[i, state.index] = words[i]
    queue.ring.producer_commit(state)


def await_tile(queue: TileQueue, state: pipeline.PipelineState) -> Int32:
    """Consumers: waits for the next tile; END: there is none."""
    queue.ring.consumer_wait(state)
    return cute.arch.make_warp_uniform(queue.slots[0, state.index])


def take_tile(queue: TileQueue, state: pipeline.PipelineState) -> tuple[QueryTile, Visit]:
    """Consumers: the tile that has been waited for. The caller advances the state."""
    words = [cute.arch.make_warp_uniform(queue.slots[i, state.index]) for i in range(WORDS)]
    queue.ring.consumer_release(state)
    fields = len(QueryTile._fields)
    return QueryTile(*words[:fields]), Visit(*words[fields:])
