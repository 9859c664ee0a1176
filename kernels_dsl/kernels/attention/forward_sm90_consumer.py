"""Consumer role of the SM90 attention: both products, the softmax between them, and the output."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from kernels_dsl.blocks.attention import softmax, tile_queue
from kernels_dsl.blocks.attention.kv_blocks import Visit, block_at, diagonal_shift
from kernels_dsl.blocks.attention.score_tile import (
    Tile,
    descaled,
    enter_block,
    fetch_descales,
    finish_rows,
    of_block,
    soften,
    soften_lazily,
    soften_watched,
    start_descales,
    start_rows,
    take_values,
    to_operand,
)
from kernels_dsl.blocks.attention.seqlen import V_STEP, seq_info
from kernels_dsl.blocks.attention.work import Work
from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.epilogue.functions import identity
from kernels_dsl.blocks.hw.barriers import (
    WARPGROUP_THREADS,
    NamedBarrier,
    give_turn,
    sync_consumers,
    wait_turn,
)
from kernels_dsl.blocks.hw.pipeline import consumer_state, is_full
from kernels_dsl.blocks.hw.wgmma import WGMMA_M, issue_product

from .forward_sm90_tiles import first_tile, next_tile, tile_at


class Fragments(NamedTuple):
    """A consumer warpgroup's operands and registers."""

    q: cute.Tensor
    """(MMA, MMA_M, MMA_K, stages) descriptors of this warpgroup's 64 rows."""
    k: cute.Tensor
    """(MMA, MMA_N, MMA_K, stages) descriptors."""
    v: cute.Tensor
    """(MMA, MMA_N, MMA_K, stages) descriptors."""
    p: cute.Tensor
    """(MMA, MMA_M, MMA_K) 16-bit registers: the probabilities as operand A of the second product."""
    out: cute.Tensor
    """(MMA, MMA_M, MMA_N) float32 accumulators of the output."""
    row_max: cute.Tensor
    row_sum: cute.Tensor
    correction: cute.Tensor
    scales: cute.Tensor | None
    """Factors of the last and of the next block's K and V, where they have one a block."""


@cute.jit
def consume(
    spec: cutlass.Constexpr,
    rings: tuple,
    mmas: tuple,
    s_tiles: tuple,
    output: tuple,
    todo: tuple,  # (work, None or the ring of `blocks.attention.tile_queue` and its slots)
    group: Int32,
):
    """Consumer warpgroup number `group`: its 64 rows of every work tile of this CTA."""
    work, queue = todo
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    parts = make_fragments(spec, mmas, s_tiles, group, thread)
    states = (consumer_state(spec.q_stages), consumer_state(spec.stages), consumer_state(spec.stages))
    queue_state = consumer_state(tile_queue.STAGES)
    if cutlass.const_expr(spec.pingpong):
        if group == spec.consumers - 1:
            give_turn(NamedBarrier.MMA_ORDER, Int32(0))
    number, end = first_tile(work, queue, queue_state)
    while number < end:
        at, visit = tile_at(spec, work, number, queue, queue_state)
        if cutlass.const_expr(queue is not None):
            queue_state.advance()
        seq = seq_info(work.extent, at.batch)
        place = (work, at, seq, visit, group, thread)
        if cutlass.const_expr(not spec.varlen):
            states = work_tile(spec, rings, states, mmas, parts, s_tiles, output, place)
        elif at.m * spec.tile[0] < seq.q_len:
            states = work_tile(spec, rings, states, mmas, parts, s_tiles, output, place)
        number = next_tile(number, queue, queue_state)
    epi.drain(spec.epilogue, thread)


@cute.jit
def work_tile(
    spec: cutlass.Constexpr,
    rings: tuple,
    states: tuple,
    mmas: tuple,
    parts: Fragments,
    s_tiles: tuple,
    output: tuple,
    place: tuple,  # (work, coordinates of the tile, sequence, visit, group, thread)
) -> tuple:
    """One work tile, from its first scores to its output."""
    work, at, seq, visit, group, thread = place
    work = descaled(work, at)
    row = at.m * spec.tile_m + group * WGMMA_M + thread // 32 * 16 + thread % 32 // 4
    tile = Tile(at, seq, visit, row, thread % 4 * 2)
    here = (tile, work, group, thread)
    if cutlass.const_expr(not spec.skips_rows):
        states = fill_rows(spec, rings, states, mmas, parts, s_tiles, output, here)
    elif at.m * spec.tile_m + group * WGMMA_M < seq.q_len * spec.pack:
        states = fill_rows(spec, rings, states, mmas, parts, s_tiles, output, here)
    else:
        states = pass_tile(spec, rings, states, visit, group)
    return states


@cute.jit
def pass_tile(spec: cutlass.Constexpr, rings: tuple, states: tuple, visit: Visit, group: Int32) -> tuple:
    """A tile in which this warpgroup has no row: what comes is given back, and so are its turns."""
    q_ring, k_ring, v_ring = rings
    q_state, k_state, v_state = states
    q_ring.consumer_wait(q_state)
    q_ring.consumer_release(q_state)
    q_state.advance()
    for position in cutlass.range(visit.count, unroll=1):
        k_ring.consumer_wait(k_state)
        if cutlass.const_expr(spec.pingpong):
            if position > 0:
                wait_turn(NamedBarrier.MMA_ORDER, group)
                give_turn(NamedBarrier.MMA_ORDER, next_group(spec, group))
        k_ring.consumer_release(k_state)
        k_state.advance()
        v_ring.consumer_wait(v_state)
        v_ring.consumer_release(v_state)
        v_state.advance()
    return q_state, k_state, v_state


@cute.jit
def fill_rows(
    spec: cutlass.Constexpr,
    rings: tuple,
    states: tuple,
    mmas: tuple,
    parts: Fragments,
    s_tiles: tuple,
    output: tuple,
    place: tuple,  # (tile, work, group, thread)
) -> tuple:
    """The rows of this warpgroup in one work tile."""
    tile, work, group, thread = place
    states = attend(spec, rings, states, mmas, parts, (tile, work, group, (s_tiles[2], thread)))
    q_ring, q_state = rings[0], states[0]
    if cutlass.const_expr(spec.scales_blocks):
        work = of_block(work, parts)
    finish_rows(spec, parts.out, parts, tile, work)
    sO = s_tiles[3][None, None, None, group]  # (64, epi_n, stages)
    store_output(spec, mmas[2], parts, output, sO, (tile, work, group, thread))
    if cutlass.const_expr(spec.stage_in_q):
        epi.drain(spec.epilogue, thread)
        q_ring.consumer_release(q_state)
    q_state.advance()
    return q_state, states[1], states[2]


def make_fragments(spec, mmas: tuple, s_tiles: tuple, group: Int32, thread: Int32) -> Fragments:
    """Operand descriptors in shared memory, and registers."""
    sQ, sK, sV, _ = s_tiles
    sQ = cute.local_tile(sQ, (WGMMA_M, spec.dim), (group, 0, None))  # (64, D, stages)
    thr_qk, thr_pv = mmas[0].get_slice(thread), mmas[1].get_slice(thread)
    out = cute.make_rmem_tensor(mmas[1].partition_shape_C((WGMMA_M, spec.dim_v)), Float32)
    rows = cute.make_layout(2)
    # An accumulator of 64 x 16 and an operand A of 64 x 16 have the same elements in the same order.
    p_layout = cute.make_layout(((2, 2, 2), 1, spec.tile_n // 16), stride=((1, 2, 4), 0, 8))
    if spec.dtype.width == 8:
        p_layout = cute.make_layout(((4, 2, 2), 1, spec.tile_n // 32), stride=((1, 4, 8), 0, 16))
    row_max, row_sum, correction = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
    return Fragments(
        mmas[0].make_fragment_A(thr_qk.partition_A(sQ)),
        mmas[0].make_fragment_B(thr_qk.partition_B(sK)),
        mmas[1].make_fragment_B(thr_pv.partition_B(sV)),
        cute.make_rmem_tensor(p_layout, spec.dtype),
        out,
        row_max,
        row_sum,
        correction=correction,
        scales=cute.make_rmem_tensor(4, Float32) if spec.scales_blocks else None,
    )


@cute.jit
def attend(
    spec: cutlass.Constexpr,
    rings: tuple,
    states: tuple,
    mmas: tuple,
    parts: Fragments,
    place: tuple,  # (tile, work, group, (V in shared memory (Dv, N, stages), thread))
) -> tuple:
    """Unnormalised output, row maxima and sums of one work tile, over the key blocks of its visit."""
    tile, work = place[:2]
    q_ring, k_ring, v_ring = rings
    q_state, k_state, v_state = states
    visit = tile.visit
    parts.out.fill(0.0)
    if cutlass.const_expr(spec.scales_blocks):
        work = start_descales(spec, parts, tile, work)
    start_rows(spec, parts, tile, work)

    q_ring.consumer_wait(q_state)
    k_ring.consumer_wait(k_state)
    scores = cute.make_rmem_tensor(mmas[0].partition_shape_C((WGMMA_M, spec.tile_n)), Float32)
    s_q, s_k = parts.q[None, None, None, q_state.index], parts.k[None, None, None, k_state.index]
    issue_product(mmas[0], scores, s_q, s_k, False)
    warpgroup.wait_group(0)
    k_ring.consumer_release(k_state)
    k_state.advance()
    release_q(spec, q_ring, q_state, visit.count == 1)
    block = block_at(spec.variant, visit, tile.at, work.lists, Int32(0), spec.rising)
    soften(spec, scores, parts, (tile, work, block), masked=first_masked(spec, visit), first=True)
    to_operand(spec, scores, parts.p)
    if cutlass.const_expr(spec.varlen and not spec.clears_each_block):
        v_ring.consumer_wait(v_state)
        clear_tail(spec, v_state, (*place, Int32(0)))

    # The first block has been taken from the first segment that has one.
    right_end = cutlass.max(visit.right, 1)
    whole_end = cutlass.max(visit.right + visit.whole, 1)
    states = (q_state, k_state, v_state, cutlass.Boolean(False), *unknown(spec))
    seen_end = right_end
    hides = spec.rising and spec.variant.right and spec.variant.lists is None
    if cutlass.const_expr(hides):
        seen_end = cutlass.max(cutlass.min(right_end, seen_blocks(spec, tile, work, place[2])), 1)
    for position in cutlass.range(1, seen_end, unroll=1):
        states = step(spec, rings, states, mmas, parts, (*place, position), True)
    if cutlass.const_expr(hides):
        for position in cutlass.range(seen_end, right_end, unroll=1):
            states = hidden_step(spec, rings, states, mmas, parts, (*place, position))
    for position in cutlass.range(right_end, whole_end, unroll=1):
        states = step(spec, rings, states, mmas, parts, (*place, position), False)
    if cutlass.const_expr(spec.variant.left):
        for position in cutlass.range(whole_end, visit.count, unroll=1):
            states = step(spec, rings, states, mmas, parts, (*place, position), True)
    q_state, k_state, v_state, moved = states[:4]
    rescale_late(spec, parts, moved)
    v_ring.consumer_wait(v_state)
    if cutlass.const_expr(spec.clears_each_block):
        clear_tail(spec, v_state, (*place, visit.count - 1))
    issue_product(mmas[1], parts.out, parts.p, parts.v[None, None, None, v_state.index], True)
    warpgroup.wait_group(0)
    v_ring.consumer_release(v_state)
    v_state.advance()
    return q_state, k_state, v_state


def first_masked(spec, visit: Visit):
    """Whether a visit's first block needs a mask: it may begin with a whole one."""
    everywhere = spec.variant.masks_everywhere and spec.variant.lists is None
    return True if everywhere else visit.right > 0


@cute.jit
def step(
    spec: cutlass.Constexpr,
    rings: tuple,
    states: tuple,  # of Q, K and V, whether the output is still to be rescaled, and `unknown`
    mmas: tuple,
    parts: Fragments,
    place: tuple,  # (tile, work, group, (V in shared memory, thread), position)
    masked: cutlass.Constexpr,
) -> tuple:
    """Scores and softmax of the block at `position`, beside the output of the block before it."""
    tile, work, group, values, position = place
    q_ring, k_ring, v_ring = rings
    q_state, k_state, v_state, moved = states[:4]
    k_full, v_full = states[4:] if spec.watch_sums else (None, None)
    if cutlass.const_expr(spec.clears_each_block):
        v_ring.consumer_wait(v_state, v_full)
        clear_tail(spec, v_state, (tile, work, group, values, position - 1))
    scores = cute.make_rmem_tensor(mmas[0].partition_shape_C((WGMMA_M, spec.tile_n)), Float32)
    k_ring.consumer_wait(k_state, k_full)
    if cutlass.const_expr(spec.pingpong):
        wait_turn(NamedBarrier.MMA_ORDER, group)
    s_q = parts.q[None, None, None, q_state.index]
    s_k = parts.k[None, None, None, k_state.index]
    issue_product(mmas[0], scores, s_q, s_k, False)
    rescale_late(spec, parts, moved)
    if cutlass.const_expr(not spec.clears_each_block):
        v_ring.consumer_wait(v_state, v_full)
    issue_product(mmas[1], parts.out, parts.p, parts.v[None, None, None, v_state.index], True)
    if cutlass.const_expr(spec.pingpong):
        give_turn(NamedBarrier.MMA_ORDER, next_group(spec, group))
    warpgroup.wait_group(1)
    k_ring.consumer_release(k_state)
    k_state.advance()
    release_q(spec, q_ring, q_state, position == tile.visit.count - 1)
    if cutlass.const_expr(spec.scales_blocks):
        work = enter_block(spec, parts, work)
    here = (tile, work, block_to_mask(spec, tile, work, position, masked))
    if cutlass.const_expr(spec.watch_sums):
        # Probabilities are packed as they come, to where the product reads those of the block before.
        warpgroup.wait_group(0)
        v_ring.consumer_release(v_state)
        v_state.advance()
        # Asked now, answered during the softmax.
        k_full = is_full(k_ring, k_state)
        v_full = is_full(v_ring, v_state)
        moved = soften_watched(spec, scores, parts.p, parts, here, masked)
        return q_state, k_state, v_state, moved, k_full, v_full
    if cutlass.const_expr(spec.lazy_rescale):
        moved = soften_lazily(spec, scores, parts, here, masked)
    else:
        soften(spec, scores, parts, here, masked=masked, first=False)
    if cutlass.const_expr(spec.scales_blocks):
        take_values(parts)
        fetch_descales(spec, parts, tile, work, position + 1)
    if cutlass.const_expr(spec.late_wait):
        softmax.finish_sums(parts.row_sum)
    warpgroup.wait_group(0)
    v_ring.consumer_release(v_state)
    v_state.advance()
    if cutlass.const_expr(not spec.lazy_rescale):
        softmax.rescale(softmax.rows_and_columns(parts.out), parts.correction)
    to_operand(spec, scores, parts.p)
    return q_state, k_state, v_state, moved


def unknown(spec) -> tuple:
    """Whether the next stages of K and V are full: not known so far. Nothing where nobody asks."""
    return (cutlass.Boolean(False),) * 2 if spec.watch_sums else ()


def seen_blocks(spec, tile: Tile, work: Work, group: Int32) -> Int32:
    """How many of the blocks that the right edge cuts are seen by any row of this warpgroup."""
    last_row = tile.at.m * spec.tile_m + group * WGMMA_M + WGMMA_M - 1
    last = last_row // spec.pack + diagonal_shift(spec.variant, tile.seq) + work.window.right
    return last // spec.tile_n + tile.visit.right - tile.visit.last


@cute.jit
def hidden_step(
    spec: cutlass.Constexpr, rings: tuple, states: tuple, mmas: tuple, parts: Fragments, place: tuple
) -> tuple:
    """`step` where all scores are hidden: no product of Q and K, and weights of 0."""
    group, position = place[2], place[4]
    q_ring, k_ring, v_ring = rings
    q_state, k_state, v_state, moved = states[:4]
    k_ring.consumer_wait(k_state)
    if cutlass.const_expr(spec.pingpong):
        wait_turn(NamedBarrier.MMA_ORDER, group)
    rescale_late(spec, parts, moved)
    v_ring.consumer_wait(v_state)
    issue_product(mmas[1], parts.out, parts.p, parts.v[None, None, None, v_state.index], True)
    if cutlass.const_expr(spec.pingpong):
        give_turn(NamedBarrier.MMA_ORDER, next_group(spec, group))
    k_ring.consumer_release(k_state)
    k_state.advance()
    release_q(spec, q_ring, q_state, position == place[0].visit.count - 1)
    warpgroup.wait_group(0)
    v_ring.consumer_release(v_state)
    v_state.advance()
    # Word by word: where bytes meet after a branch, ptxas takes each apart.
    cute.recast_tensor(parts.p, Int32).fill(Int32(0))
    return q_state, k_state, v_state, cutlass.Boolean(False), *unknown(spec)


@cute.jit
def rescale_late(spec: cutlass.Constexpr, parts: Fragments, moved: cutlass.Boolean):
    """Where maxima fall behind: multiplies the output by the last block's `correction` where there is one.

    Just before the output's next product, and not when the correction is known: a branch there would keep
    the conversions of probabilities from mixing with their exponentials.
    """
    if cutlass.const_expr(spec.lazy_rescale or spec.watch_sums):
        if moved:
            softmax.rescale(softmax.rows_and_columns(parts.out), parts.correction)


@cute.jit
def release_q(
    spec: cutlass.Constexpr,
    ring: pipeline.PipelineAsync,
    state: pipeline.PipelineState,
    last: cutlass.Boolean,
):
    """Gives Q back after the `last` scores of a tile: the next one arrives beside what is left to do."""
    if cutlass.const_expr(not spec.stage_in_q):
        if last:
            ring.consumer_release(state)


@cute.jit
def block_to_mask(
    spec: cutlass.Constexpr, tile: Tile, work: Work, position: Int32, masked: cutlass.Constexpr
) -> Int32:
    """The key block at `position`; 0 where its place does not matter, since lists take time to read."""
    variant = spec.variant
    block = Int32(0)
    if cutlass.const_expr(masked or variant.lists is None or variant.changes_scores or spec.varlen):
        block = block_at(variant, tile.visit, tile.at, work.lists, position, spec.rising)
    elif tile.visit.k_len % (variant.lists[1] * spec.tile_n) != 0:
        block = block_at(variant, tile.visit, tile.at, work.lists, position, spec.rising)
    return block


@cute.jit
def next_group(spec: cutlass.Constexpr, group: Int32) -> Int32:
    """The warpgroup whose turn comes after this one's."""
    if cutlass.const_expr(spec.consumers == 2):
        return 1 - group
    following = group + 1
    if following == spec.consumers:
        following = Int32(0)
    return following


@cute.jit
def clear_tail(spec: cutlass.Constexpr, v_state: pipeline.PipelineState, place: tuple):
    """Zeroes what lies behind the last key in the block of V at `v_state`; the warpgroups share the work.

    It belongs to another sequence or to nobody, and 0 * NaN is NaN. `place`: as in `step`, position of
    the block. All warpgroups meet here, so nobody may wait for its turn at the tensor cores of this step yet.
    """
    tile, work, group, (sV, thread), position = place
    block = tile.visit.last
    if cutlass.const_expr(spec.clears_each_block):
        block = block_at(spec.variant, tile.visit, tile.at, work.lists, position)
    first = cutlass.max(tile.visit.k_len - block * spec.tile_n, 0)
    zero = spec.dtype(0.0)
    if cutlass.const_expr(spec.dtype.width == 8):
        # Up to a multiple of V_STEP the transpose has zeros, in the order of its own.
        first = (first + V_STEP - 1) // V_STEP * V_STEP
    if first < spec.tile_n:
        for key in cutlass.range(first + group, spec.tile_n, spec.consumers, unroll=1):
            for i in cutlass.range_constexpr(cute.ceil_div(spec.dim_v, WARPGROUP_THREADS)):
                column = thread + i * WARPGROUP_THREADS
                if column < spec.dim_v:
                    sV[column, key, v_state.index] = zero
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_consumers(spec.consumers)


@cute.jit
def store_output(
    spec: cutlass.Constexpr,
    mma_out: cute.TiledMma,
    parts: Fragments,
    output: tuple,  # (atom or None, coordinates, O (Sq, Dv, (H, B)))
    sO: cute.Tensor,  # (64, epi_n, stages)
    place: tuple,  # (tile, work, group, thread)
):
    """Stores this warpgroup's rows of the output.

    A TMA store is clipped at the end of the tensor, not at the end of a packed sequence, so that a
    sequence's last rows go by predicated stores.
    """
    tile, work, group, thread = place
    first_row = tile.at.m * spec.tile_m + group * WGMMA_M
    atom, tma_o, mO = output
    rows, start = tile.seq.q_len * spec.pack, tile.seq.q_start * spec.pack
    extent = (rows, work.v_dim, work.tiles.heads * work.tiles.batch)
    image = tile.at.head
    if cutlass.const_expr(spec.varlen):
        tma_o = cute.domain_offset((start, 0, 0), tma_o)
        mO = cute.domain_offset((start, 0, 0), mO)
    else:
        image = tile.at.head + tile.at.batch * work.tiles.heads
    origin = (first_row, Int32(0), image)
    plain = epi.plain_writer(mO, sO, extent, thread)
    if cutlass.const_expr(spec.epilogue.use_tma):
        by_tma = epi.tma_writer(atom, tma_o, sO, spec.epilogue.subtile)
        if cutlass.const_expr(not spec.varlen):
            store_rows(spec.epilogue, by_tma, mma_out, parts, sO, (origin, extent, group, thread))
        elif first_row + WGMMA_M <= rows:
            store_rows(spec.epilogue, by_tma, mma_out, parts, sO, (origin, extent, group, thread))
        else:
            epi.drain(spec.epilogue, thread)
            store_rows(spec.plain_epilogue, plain, mma_out, parts, sO, (origin, extent, group, thread))
    else:
        store_rows(spec.epilogue, plain, mma_out, parts, sO, (origin, extent, group, thread))


def store_rows(plan, write, mma_out, parts: Fragments, sO: cute.Tensor, place: tuple) -> None:
    """The epilogue of `blocks.epilogue` with nothing left to compute."""
    origin, extent, group, thread = place
    epi.store_tile(
        plan, parts.out, identity, (), origin=origin, extent=extent, sD=sO, tiled_mma_epi=mma_out,
        write=write, thread=thread, warpgroup=group,
    )  # fmt: skip
