"""Producer role of the SM90 attention: loads Q, K and V of each work tile in the order of their use."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention import tile_queue
from kernels_dsl.blocks.attention.kv_blocks import block_at, visit_tile
from kernels_dsl.blocks.attention.query_tiles import decode_query_tile
from kernels_dsl.blocks.attention.seqlen import padded_start, seq_info
from kernels_dsl.blocks.attention.work import Work, kv_head
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.pipeline import producer_state

from .forward_sm90_deferred import await_values, leave

ASK_AHEAD = 2
"""Blocks before the end of a tile where the number of the next one is asked for: in time, and not before, for
whoever has a long tile at hand would keep the next one from others."""


@cute.jit
def produce(
    spec: cutlass.Constexpr, rings: tuple, loads: tuple, s_tiles: tuple, work: Work, queue: tuple | None
):
    """Producer warp: for each work tile of this CTA, loads Q and the key blocks of its visit.

    `queue` is None or the ring of `blocks.attention.tile_queue` and its slots.
    """
    states = (producer_state(spec.q_stages), producer_state(spec.stages), producer_state(spec.v_stages))
    queue_state = producer_state(tile_queue.STAGES)
    asks, there = cutlass.const_expr(queue is not None), cutlass.Boolean(False)
    number = Int32(cute.arch.block_idx()[0])
    while number < work.tiles.size:
        following, asked = number + cute.arch.grid_dim()[0], Int32(0)
        at = decode_query_tile(number, work.tiles)
        seq = seq_info(work.extent, at.batch)
        visit = visit_tile(spec.variant, spec.tile, at, seq, work.window, work.lists)
        if cutlass.const_expr(queue is not None):
            tile_queue.send_tile(queue[0], queue[1], queue_state, at, visit)
            queue_state.advance()
        place = (work, at, seq, visit)
        if cutlass.const_expr(not spec.varlen):
            states, asked, there = load_tile(spec, rings, states, loads, s_tiles, place, asks, there)
        elif at.m * spec.tile[0] < seq.q_len:
            states, asked, there = load_tile(spec, rings, states, loads, s_tiles, place, asks, there)
        elif cutlass.const_expr(queue is not None):
            asked = tile_queue.ask_number(work.counter)
        if cutlass.const_expr(queue is not None):
            following = tile_queue.number_of(asked, work.counter, work.tiles.size)
        number = following
    if cutlass.const_expr(queue is not None):
        tile_queue.send_end(queue[0], queue[1], queue_state)
    if cutlass.const_expr(spec.later_v):
        leave(work.later)


@cute.jit
def load_tile(
    spec: cutlass.Constexpr,
    rings: tuple,
    states: tuple,
    loads: tuple,
    s_tiles: tuple,
    place: tuple,  # (work, coordinates of the tile, sequence, visit)
    asks: cutlass.Constexpr,
    there: cutlass.Boolean,
) -> tuple:
    """One work tile: K0, Q, then K of each block before V of the one before it, in the order of use.

    With `asks` the number of the next tile is asked for, ASK_AHEAD blocks before the end. `there`: as
    `sm90_later.await_values` has it. Returns the states, what was asked for, and `there`.
    """
    work, at, seq, visit = place
    asked, ask_at = Int32(0), visit.count - ASK_AHEAD
    if cutlass.const_expr(asks):
        if ask_at <= 0:
            asked = tile_queue.ask_number(work.counter)
    q_ring, k_ring, v_ring = rings
    q_state, k_state, v_state = states
    load_q, load_k, load_v = tile_loaders(spec, loads, s_tiles, (work, at, seq))

    block = block_at(spec.variant, visit, at, work.lists, Int32(0), spec.rising)
    k_ring.producer_acquire(k_state)
    load_k(block, k_state.index, k_ring.producer_get_barrier(k_state))
    k_ring.producer_commit(k_state)
    k_state.advance()
    q_ring.producer_acquire(q_state)
    load_q(at.m, q_state.index, q_ring.producer_get_barrier(q_state))
    q_ring.producer_commit(q_state)
    q_state.advance()
    if cutlass.const_expr(spec.later_v):
        cute.arch.griddepcontrol_wait()  # for V of the first heads
        there = await_values(work.later, kv_head(at.head, work.heads_per_kv), at.batch, there)
    for position in cutlass.range(1, visit.count, unroll=1):
        if cutlass.const_expr(asks):
            if position == ask_at:
                asked = tile_queue.ask_number(work.counter)
        next_block = block_at(spec.variant, visit, at, work.lists, position, spec.rising)
        k_ring.producer_acquire(k_state)
        load_k(next_block, k_state.index, k_ring.producer_get_barrier(k_state))
        k_ring.producer_commit(k_state)
        k_state.advance()
        v_ring.producer_acquire(v_state)
        load_v(block, v_state.index, v_ring.producer_get_barrier(v_state))
        v_ring.producer_commit(v_state)
        v_state.advance()
        block = next_block
    v_ring.producer_acquire(v_state)
    load_v(block, v_state.index, v_ring.producer_get_barrier(v_state))
    v_ring.producer_commit(v_state)
    v_state.advance()
    return (q_state, k_state, v_state), asked, there


def tile_loaders(spec, loads: tuple, s_tiles: tuple, place: tuple) -> tuple:
    """`load(tile, stage, barrier)` for Q, K and V of one head of one sequence."""
    work, at, seq = place
    (q_atom, mQ), (k_atom, mK), (v_atom, mV) = loads
    head = kv_head(at.head, work.heads_per_kv)
    batch = at.batch
    if spec.varlen:
        batch = Int32(0)
        mQ = cute.domain_offset((seq.q_start * spec.pack, 0, 0, 0), mQ)
        mK = cute.domain_offset((seq.k_start, 0, 0, 0), mK)
        v_start = padded_start(seq.k_start, at.batch) if spec.dtype.width == 8 else seq.k_start
        mV = cute.domain_offset((0, v_start, 0, 0), mV)
    gQ = cute.local_tile(mQ[None, None, at.head, batch], (spec.tile_m, spec.dim), (None, 0))  # (bM, D, restM)
    gK = cute.local_tile(mK[None, None, head, batch], (spec.tile_n, spec.dim), (None, 0))  # (bN, D, restN)
    mV = mV[None, None, head, batch]
    if spec.raw_stages:
        gV = cute.local_tile(mV, (spec.tile_n, spec.dim_v), (None, 0))  # (bN, Dv, restN)
    else:
        gV = cute.local_tile(mV, (spec.dim_v, spec.tile_n), (0, None))  # (Dv, bN, restN)
    alone = cute.make_layout(1)
    return tuple(
        tma.tile_loader(atom, t_g, t_s, None)
        for atom, (t_s, t_g) in (
            (q_atom, tma.load_partition(q_atom, gQ, s_tiles[0], alone, Int32(0))),
            (k_atom, tma.load_partition(k_atom, gK, s_tiles[1], alone, Int32(0))),
            (v_atom, tma.load_partition(v_atom, gV, s_tiles[2], alone, Int32(0))),
        )
    )
