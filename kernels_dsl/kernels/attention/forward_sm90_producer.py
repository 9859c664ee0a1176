"""Producer role of the SM90 forward kernel: loads Q, K and V of each work tile in the order of their use.

    K0 | Q | K1 | V0 | K2 | V1 | ... | V last    then the next tile, as far as stages are empty

The scores of the next block are computed before this block's output, so each K is loaded before the V of the
block before it.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernels_dsl.blocks.attention import tile_queue
from kernels_dsl.blocks.attention.kv_blocks import blocks_at
from kernels_dsl.blocks.attention.seqlen import padded_start
from kernels_dsl.blocks.attention.tile_queue import WorkTile, work_tile
from kernels_dsl.blocks.attention.work import Work, kv_head
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.pipeline import producer_state, put

from .forward_sm90_deferred import Deferred, await_values, leave
from .forward_sm90_records import KvState, Loads, Shared, SharedTiles
from .forward_sm90_spec import ForwardSpec, Spec

ASK_AHEAD = 2
"""Blocks before the end of a tile at which the number of the next one is asked for: early enough for the
answer, and no earlier, since a CTA with a long tile would keep the next one from others."""


class Upcoming(NamedTuple):
    """A work tile that is to be loaded."""

    number: Int32
    """Past the last one's: there is none."""
    tile: WorkTile


class Progress(NamedTuple):
    """State that the loads of a tile leave to those of the next one."""

    states: KvState
    upcoming: Upcoming
    """The tile that is loaded; then the next one."""
    all_done: Boolean
    """V of all heads is transposed, see `forward_sm90_deferred.await_values`."""


def tile_of(spec: ForwardSpec, work: Work, number: Int32) -> WorkTile:
    """Work tile `number`; the last one where it is past that."""
    return work_tile(spec, work, cutlass.max(cutlass.min(number, work.tiles.size - 1), 0))


def next_tile(
    spec: ForwardSpec, queue: tile_queue.TileQueue | None, work: Work, number: Int32, asked: Int32
) -> Upcoming:
    """The tile after number `number`, with a queue by what `tile_queue.ask_number` has returned."""
    following = number + cute.arch.grid_dim()[0]
    if queue is not None:
        following = tile_queue.number_of(asked, work.counter, work.tiles.size)
    return Upcoming(following, tile_of(spec, work, following))


@cute.jit
def produce(spec: Spec, shared: Shared, loads: Loads, work: Work, deferred: Deferred | None):
    """Producer warp: loads Q and the key blocks of its visit for each work tile of this CTA."""
    states = KvState(
        producer_state(spec.q_stages), producer_state(spec.stages), producer_state(spec.loaded_v_stages)
    )
    queue, queue_state = shared.queue, producer_state(tile_queue.STAGES)
    all_done = cutlass.Boolean(False)
    number = Int32(cute.arch.block_idx()[0])
    upcoming = Upcoming(number, tile_of(spec, work, number))
    while upcoming.number < work.tiles.size:
        tile = upcoming.tile
        tile_queue.send_tile(queue, queue_state, tile)
        queue_state.advance()
        if spec.has_rows(tile.at, tile.seq):
            progress = Progress(states, upcoming, all_done)
            states, upcoming, all_done = load_tile(spec, shared, loads, work, deferred, progress)
        else:
            asked = Int32(0)
            if cutlass.const_expr(queue is not None):
                asked = tile_queue.ask_number(work.counter)
            upcoming = next_tile(spec, queue, work, upcoming.number, asked)
    tile_queue.send_end(queue, queue_state)
    if cutlass.const_expr(deferred is not None):
        leave(deferred)


@cute.jit
def load_tile(
    spec: Spec,
    shared: Shared,
    loads: Loads,
    work: Work,
    deferred: Deferred | None,
    progress: Progress,
) -> Progress:
    """Loads one work tile. With a queue the number of the next one is asked for, ASK_AHEAD blocks before the
    end. Which tile that is takes as long as a step to find out: before the last load, which waits for a
    stage."""
    number, tile = progress.upcoming
    at, visit = tile.at, tile.visit
    asked, ask_at = Int32(0), visit.count - ASK_AHEAD
    if cutlass.const_expr(shared.queue is not None):
        if ask_at <= 0:
            asked = tile_queue.ask_number(work.counter)
    q_ring, k_ring, v_ring = shared.rings.q, shared.rings.k, shared.rings.loaded_v
    q_state, k_state, v_state = progress.states.q, progress.states.k, progress.states.v
    load = tile_loaders(spec, loads, shared.tiles, work, tile)

    blocks = blocks_at(spec.variant, spec.tile, visit, at, work.lists, Int32(0), spec.right_edge)
    if cutlass.const_expr(spec.q_stages > 1):  # its stage is empty, and Q is farther away than K
        q_state = put(q_ring, q_state, partial(load.q, at.m))
    k_state = put(k_ring, k_state, partial(load.k, blocks))
    if cutlass.const_expr(spec.q_stages == 1):
        q_state = put(q_ring, q_state, partial(load.q, at.m))
    all_done = progress.all_done
    if cutlass.const_expr(deferred is not None):
        cute.arch.griddepcontrol_wait()  # for V of the first heads
        all_done = await_values(deferred, kv_head(at.head, work.heads_per_kv), at.batch, all_done)
    for position in cutlass.range(1, visit.count, unroll=1):
        if cutlass.const_expr(shared.queue is not None):
            if position == ask_at:
                asked = tile_queue.ask_number(work.counter)
        next_blocks = blocks_at(spec.variant, spec.tile, visit, at, work.lists, position, spec.right_edge)
        k_state = put(k_ring, k_state, partial(load.k, next_blocks))
        v_state = put(v_ring, v_state, partial(load.v, blocks))
        blocks = next_blocks
    upcoming = next_tile(spec, shared.queue, work, number, asked)
    v_state = put(v_ring, v_state, partial(load.v, blocks))
    return Progress(KvState(q_state, k_state, v_state), upcoming, all_done)


class Loaders(NamedTuple):
    """`load(tile, stage, barrier)` of each operand, for one head of one sequence; of K and V the tiles of a
    step."""

    q: Callable[[Int32, Int32, cute.Pointer], None]
    k: Callable[[tuple[Int32, ...], Int32, cute.Pointer], None]
    v: Callable[[tuple[Int32, ...], Int32, cute.Pointer], None]


def tile_loaders(spec: ForwardSpec, loads: Loads, tiles: SharedTiles, work: Work, tile: WorkTile) -> Loaders:
    """Loaders of the head and sequence of a work tile."""
    at, seq = tile.at, tile.seq
    mQ, mK, mV = (load.coordinates for load in loads)
    head = kv_head(at.head, work.heads_per_kv)
    batch = at.batch
    if spec.varlen:
        batch = Int32(0)
        mQ = cute.domain_offset((seq.q_start * spec.pack, 0, 0, 0), mQ)
        mK = cute.domain_offset((seq.k_start, 0, 0, 0), mK)
        v_start = padded_start(seq.k_start, at.batch) if spec.dtype.width == 8 else seq.k_start
        mV = cute.domain_offset((0, v_start, 0, 0), mV)
    gQ = cute.local_tile(mQ[None, None, at.head, batch], (spec.tile_m, spec.dim), (None, 0))  # (bM, D, restM)
    keys = spec.tile.keys
    gK = cute.local_tile(mK[None, None, head, batch], (keys, spec.dim), (None, 0))  # (bN, D, restN)
    mV = mV[None, None, head, batch]
    if spec.raw_stages:
        gV, sV = cute.local_tile(mV, (keys, spec.dim_v), (None, 0)), tiles.raw_v  # (bN, Dv, restN)
    else:
        gV, sV = cute.local_tile(mV, (spec.dim_v, keys), (0, None)), tiles.v  # (Dv, bN, restN)

    def loader(atom: cute.CopyAtom, g_tiles: cute.Tensor, s_tiles: cute.Tensor):
        part = tma.load_partition(atom, g_tiles, s_tiles, cute.make_layout(1), Int32(0))
        return tma.tile_loader(atom, part.tiles, part.shared, None)

    def loader_of_blocks(atom: cute.CopyAtom, g_tiles: cute.Tensor, s_tiles: cute.Tensor):
        parts = [loader(atom, g_tiles, s_part) for s_part in parts_of(s_tiles, g_tiles, spec.joined)]

        def load(blocks: tuple[Int32, ...], stage: Int32, barrier: cute.Pointer) -> None:
            for load_part, block in zip(parts, blocks):
                load_part(block, stage, barrier)

        return load

    load_q = loader(loads.q.atom, gQ, tiles.q)
    load_k = loader_of_blocks(loads.k.atom, gK, tiles.k)
    return Loaders(load_q, load_k, loader_of_blocks(loads.v.atom, gV, sV))


def parts_of(s_tiles: cute.Tensor, g_tiles: cute.Tensor, joined: int) -> list[cute.Tensor]:
    """Parts of a step in shared memory, each as large as the first two modes of `g_tiles` and staged."""
    if joined == 1:
        return [s_tiles]
    part = tuple(cute.size(g_tiles, mode=[i]) for i in range(2))
    divided = cute.flat_divide(s_tiles, part)  # (part, part, parts, parts, stages)
    divided = cute.group_modes(divided, 2, 4)
    return [divided[None, None, i, None] for i in range(joined)]
