"""Consumer role of the SM90 forward kernel: both products, the softmax between them, and the output.

A warpgroup has 64 query rows of each work tile. Its step for block j computes the scores of j and sums the
output of j - 1 in one go of the tensor cores; the softmax of j runs beside other warpgroups' products:

    step j    wait K j | my turn | issue S = Q K j, then O += P V j-1 | pass the turn | softmax of S | P = S
    released                                                 K j after S, V j-1 after O

The first block has no output before it, and the last one's output comes after the last step: `attend`. The
softmax is one of three (`spec.no_max`, `spec.lazy_rescale`, or neither); the two that seldom rescale the
output do so before its next product.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup as wgmma

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.kv_blocks import RightEdge, Visit, blocks_at, diagonal_shift, lacks_blocks
from kernels_dsl.blocks.attention.score_tile import ScoreBlock, Tile, to_operand
from kernels_dsl.blocks.attention.seqlen import V_STEP
from kernels_dsl.blocks.attention.softmax_steps import (
    close_rows,
    convert_output_units,
    descaled,
    divide_rows,
    enter_block,
    fetch_descales,
    in_block_units,
    softmax_step,
    softmax_step_lazy,
    softmax_step_no_max,
    start_descales,
    start_rows,
)
from kernels_dsl.blocks.attention.tile_queue import ConsumedTiles
from kernels_dsl.blocks.attention.work import Work
from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.epilogue.functions import identity
from kernels_dsl.blocks.hw.barriers import (
    WARPGROUP_THREADS,
    Consumer,
    NamedBarrier,
    fence_for_async_readers,
    give_turn,
    sync_consumers,
    wait_turn,
)
from kernels_dsl.blocks.hw.pipeline import consumer_state, is_full, release
from kernels_dsl.blocks.hw.wgmma import WGMMA_M, issue_product

from .forward_sm90_records import KvState, Mmas, Output, Rings, Shared, SharedTiles
from .forward_sm90_spec import ForwardSpec, Spec


class Fragments(NamedTuple):
    """A consumer warpgroup's operands and registers; the last four are `softmax_steps.Rows`."""

    q: cute.Tensor
    """(MMA, MMA_M, MMA_K, stages) descriptors of this warpgroup's 64 rows."""
    k: cute.Tensor
    """(MMA, MMA_N, MMA_K, stages) descriptors."""
    v: cute.Tensor
    """(MMA, MMA_N, MMA_K, stages) descriptors."""
    p: cute.Tensor
    """(MMA, MMA_M, MMA_K) registers: the probabilities as operand A of the second product."""
    out: cute.Tensor
    """(MMA, MMA_M, MMA_N) float32 accumulators of the output."""
    row_max: cute.Tensor
    row_sum: cute.Tensor
    correction: cute.Tensor
    scales: cute.Tensor | None
    """Factors of the last and of the next block's K and V, where they have one a block."""


class Resources(NamedTuple):
    """Rings, memory and registers of a consumer warpgroup, for the whole of the kernel."""

    rings: Rings
    tiles: SharedTiles
    mmas: Mmas
    fragments: Fragments


class Site(NamedTuple):
    """Position of a consumer's thread in the work: its tile, and its own number."""

    tile: Tile
    work: Work
    warpgroup: Int32
    thread: Int32
    """Within the warpgroup."""

    def first_row(self, spec: ForwardSpec) -> Int32:
        """First row of this warpgroup."""
        return self.tile.at.m * spec.tile_m + self.warpgroup * WGMMA_M

    def has_rows(self, spec: ForwardSpec) -> Boolean:
        """False for a warpgroup without a row in the tile, where such are skipped."""
        if not spec.skips_rows:
            return Boolean(True)
        return self.first_row(spec) < self.tile.seq.q_len * spec.pack


@cute.jit
def consume(spec: Spec, shared: Shared, mmas: Mmas, output: Output, work: Work, warpgroup: Int32):
    """Consumer warpgroup number `warpgroup`: its 64 rows of every work tile of this CTA."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    fragments = make_fragments(spec, mmas, shared.tiles, warpgroup, thread)
    resources = Resources(shared.rings, shared.tiles, mmas, fragments)
    states = KvState(consumer_state(spec.q_stages), consumer_state(spec.stages), consumer_state(spec.stages))
    tiles = ConsumedTiles(spec, work, shared.queue)
    if cutlass.const_expr(spec.pingpong):
        if warpgroup == spec.consumers - 1:
            give_turn(NamedBarrier.MMA_ORDER, Int32(0))
    position, size = tiles.first(), tiles.size()
    while tiles.more(position, size):
        (at, seq, visit), taken = tiles.decode(position)
        if spec.has_rows(at, seq):
            row = at.m * spec.tile_m + warpgroup * WGMMA_M + thread // 32 * 16 + thread % 32 // 4
            tile = Tile(at, seq, visit, row, thread % 4 * 2)
            states = work_tile(spec, resources, states, output, Site(tile, work, warpgroup, thread))
        position = tiles.next(taken)
    epi.drain(spec.epilogue, thread)


@cute.jit
def work_tile(spec: Spec, resources: Resources, states: KvState, output: Output, site: Site) -> KvState:
    """One work tile, from its first scores to its output; skipped where this warpgroup has no row in it."""
    if site.has_rows(spec):
        states = compute_rows(spec, resources, states, output, site)
    else:
        states = skip_tile(spec, resources.rings, states, site.tile.visit, site.warpgroup)
    return states


@cute.jit
def skip_tile(spec: Spec, rings: Rings, states: KvState, visit: Visit, warpgroup: Int32) -> KvState:
    """Releases the stages of a tile and passes this warpgroup's turns."""
    k_ring, v_ring = rings.k, rings.v
    q_state, k_state, v_state = states.q, states.k, states.v
    rings.q.consumer_wait(q_state)
    q_state = release(rings.q, q_state)
    for position in cutlass.range(visit.count, unroll=1):
        k_ring.consumer_wait(k_state)
        if cutlass.const_expr(spec.pingpong):
            if position > 0:
                wait_turn(NamedBarrier.MMA_ORDER, warpgroup)
                give_turn(NamedBarrier.MMA_ORDER, next_warpgroup(spec, warpgroup))
        k_state = release(k_ring, k_state)
        v_ring.consumer_wait(v_state)
        v_state = release(v_ring, v_state)
    return KvState(q_state, k_state, v_state)


@cute.jit
def compute_rows(spec: Spec, resources: Resources, states: KvState, output: Output, site: Site) -> KvState:
    """The rows of this warpgroup in one work tile."""
    fragments, rings = resources.fragments, resources.rings
    scores = first_scores(spec, resources, states)
    site = site._replace(work=descaled(site.work, site.tile.at))
    states = attend(spec, resources, states, site, scores)
    states = finish_output(spec, resources, states, site)
    staging = resources.tiles.o[None, None, None, site.warpgroup]  # (64, epi_n, stages)
    if cutlass.const_expr(spec.right_edge is RightEdge.LAST):
        # Addresses depend on the tile, or else the compiler keeps them in registers that steps need.
        site = site._replace(thread=site.thread | (site.tile.at.m >> 31))
    store_output(spec, resources.mmas.out, fragments.out, output, staging, site)
    if cutlass.const_expr(spec.stage_in_q):
        epi.drain(spec.epilogue, site.thread)
        rings.q.consumer_release(states.q)
    states.q.advance()
    return states


def make_fragments(
    spec: ForwardSpec, mmas: Mmas, tiles: SharedTiles, warpgroup: Int32, thread: Int32
) -> Fragments:
    """Operand descriptors in shared memory, and registers."""
    sQ = cute.local_tile(tiles.q, (WGMMA_M, spec.dim), (warpgroup, 0, None))  # (64, D, stages)
    thr_qk, thr_pv = mmas.qk.get_slice(thread), mmas.pv.get_slice(thread)
    out = cute.make_rmem_tensor(mmas.pv.partition_shape_C((WGMMA_M, spec.dim_v)), Float32)
    rows = cute.make_layout(2)
    # An accumulator of 64 x 16 and an operand A of 64 x 16 have the same elements in the same order.
    p_layout = cute.make_layout(((2, 2, 2), 1, spec.tile_n // 16), stride=((1, 2, 4), 0, 8))
    if spec.dtype.width == 8:
        p_layout = cute.make_layout(((4, 2, 2), 1, spec.tile_n // 32), stride=((1, 4, 8), 0, 16))
    row_max, row_sum, correction = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
    return Fragments(
        mmas.qk.make_fragment_A(thr_qk.partition_A(sQ)),
        mmas.qk.make_fragment_B(thr_qk.partition_B(tiles.k)),
        mmas.pv.make_fragment_B(thr_pv.partition_B(tiles.v)),
        cute.make_rmem_tensor(p_layout, spec.dtype),
        out,
        row_max,
        row_sum,
        correction=correction,
        scales=cute.make_rmem_tensor(4, Float32) if spec.scales_by_block else None,
    )


def issue_scores(resources: Resources, states: KvState, scores: cute.Tensor) -> None:
    """Issues scores = Q K^T for the stages at `states`."""
    q = resources.fragments.q[None, None, None, states.q.index]
    k = resources.fragments.k[None, None, None, states.k.index]
    issue_product(resources.mmas.qk, scores, q, k, False)


def issue_output(resources: Resources, states: KvState) -> None:
    """Issues out += P V for the stage at `states`."""
    fragments = resources.fragments
    v = fragments.v[None, None, None, states.v.index]
    issue_product(resources.mmas.pv, fragments.out, fragments.p, v, True)


@cute.jit
def first_scores(spec: Spec, resources: Resources, states: KvState) -> cute.Tensor:
    """Issues the scores of a work tile's first block and returns where they will be."""
    resources.rings.q.consumer_wait(states.q)
    resources.rings.k.consumer_wait(states.k)
    shape = resources.mmas.qk.partition_shape_C((WGMMA_M, spec.tile_n))
    scores = cute.make_rmem_tensor(shape, Float32)
    issue_scores(resources, states, scores)
    return scores


@cute.jit
def attend(spec: Spec, resources: Resources, states: KvState, site: Site, scores: cute.Tensor) -> KvState:
    """Unnormalised output without that of the last block, row maxima and sums of one work tile, over the key
    blocks of its visit, whose first `scores` are under way."""
    tile, work, (rings, _, _, fragments) = site.tile, site.work, resources
    visit = tile.visit
    fragments.out.fill(0.0)
    if cutlass.const_expr(spec.scales_by_block):
        work = start_descales(spec, fragments, tile, work)
    start_rows(spec, fragments, tile, work)

    wgmma.wait_group(0)
    release(rings.k, states.k)
    release_q(spec, rings.q, states.q, visit.count == 1)
    blocks = blocks_at(spec.variant, spec.tile, visit, tile.at, work.lists, Int32(0), spec.right_edge)
    masked = first_is_masked(spec, visit)
    if cutlass.const_expr(spec.right_edge is RightEdge.LAST):
        masked = masked & edge_cuts(spec, site, blocks[0])
    softmax_step(spec, scores, fragments, ScoreBlock(tile, work, blocks), masked=masked, first=True)
    to_operand(scores, fragments.p)
    if cutlass.const_expr(spec.varlen and not spec.clears_each_block):
        rings.v.consumer_wait(states.v)
        clear_tail(spec, resources.tiles.v, states.v, site, Int32(0))

    # The first block has been taken from the first segment that has one.
    right_end = cutlass.max(visit.right, 1)
    whole_end = cutlass.max(visit.right + visit.whole, 1)
    states = forget_stages(spec, states._replace(rescale=cutlass.Boolean(False)))
    if cutlass.const_expr(spec.right_edge is RightEdge.LAST):
        return walk_edge_last(spec, resources, states, site)
    seen_end = right_end
    hides = spec.right_edge is RightEdge.RISING and spec.variant.right and spec.variant.lists is None
    if cutlass.const_expr(hides):
        seen_end = seen_blocks(spec, site)
    for position in cutlass.range(1, seen_end, unroll=1):
        states = step(spec, resources, states, site, position, True)
    if cutlass.const_expr(hides):
        for position in cutlass.range(seen_end, right_end, unroll=1):
            states = hidden_step(spec, resources, states, site, position)
    for position in cutlass.range(right_end, whole_end, unroll=1):
        states = step(spec, resources, states, site, position, False)
    if cutlass.const_expr(spec.variant.left):
        for position in cutlass.range(whole_end, visit.count, unroll=1):
            states = step(spec, resources, states, site, position, True)
    return states


@cute.jit
def walk_edge_last(spec: Spec, resources: Resources, states: KvState, site: Site) -> KvState:
    """`attend` after the first block, where the others that the right edge cuts come last."""
    visit = site.tile.visit
    masked_begin = visit.count + 1 - cutlass.max(visit.right, 1)
    hidden_begin = visit.count - hidden_blocks(spec, site)
    for position in cutlass.range(1, masked_begin, unroll=1):
        states = step(spec, resources, states, site, position, False)
    for position in cutlass.range(masked_begin, hidden_begin, unroll=1):
        states = step(spec, resources, states, site, position, True)
    for position in cutlass.range(hidden_begin, visit.count, unroll=1):
        states = pass_scores(spec, resources.rings, states, site, position)
    return states


@cute.jit
def pass_scores(spec: Spec, rings: Rings, states: KvState, site: Site, position: Int32) -> KvState:
    """`step` of a last block that is hidden from this warpgroup: gives back K."""
    rings.k.consumer_wait(states.k)
    if cutlass.const_expr(spec.pingpong):
        wait_turn(NamedBarrier.MMA_ORDER, site.warpgroup)
        give_turn(NamedBarrier.MMA_ORDER, next_warpgroup(spec, site.warpgroup))
    release(rings.k, states.k)
    release_q(spec, rings.q, states.q, position == site.tile.visit.count - 1)
    return states


@cute.jit
def pass_values(
    ring: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, count: Int32
) -> pipeline.PipelineState:
    """Gives back V of `count` blocks that are hidden from this warpgroup. Returns the next state."""
    for _ in cutlass.range(count, unroll=1):
        ring.consumer_wait(state)
        state = release(ring, state)
    return state


def hidden_blocks(spec: ForwardSpec, site: Site) -> Int32:
    """Number of those blocks that the right edge cuts, the first left out, of which no row of this warpgroup
    sees a key."""
    return cutlass.max(site.tile.visit.right, 1) - seen_blocks(spec, site)


def edge_cuts(spec: ForwardSpec, site: Site, block: Int32) -> Boolean:
    """True where the right edge, or the end of the keys, hides a key of `block` from a row of this warp."""
    tile = site.tile
    first_row = cute.arch.make_warp_uniform(tile.row) // spec.pack
    last_key = first_row + diagonal_shift(spec.variant, tile.seq) + site.work.window.right
    return cutlass.min(last_key, tile.visit.k_len - 1) < (block + 1) * spec.tile_n - 1


@cute.jit
def finish_output(spec: Spec, resources: Resources, states: KvState, site: Site) -> KvState:
    """The last block's output, beside it the rows' factors, and the division of all."""
    fragments, ring = resources.fragments, resources.rings.v
    apply_correction(spec, fragments, states)
    ring.consumer_wait(states.v)
    if cutlass.const_expr(spec.clears_each_block):
        clear_tail(spec, resources.tiles.v, states.v, site, site.tile.visit.count - 1)
    issue_output(resources, states)
    work = site.work
    if cutlass.const_expr(spec.scales_by_block):
        work = in_block_units(work, fragments)
    some_empty = close_rows(spec, fragments, site.tile, work)
    wgmma.wait_group(0)
    v_state = release(ring, states.v)
    if cutlass.const_expr(spec.right_edge is RightEdge.LAST):
        v_state = pass_values(ring, v_state, hidden_blocks(spec, site))
    states = KvState(states.q, states.k, v_state)
    divide_rows(fragments.out, fragments, some_empty)
    return states


def first_is_masked(spec: ForwardSpec, visit: Visit) -> bool | Boolean:
    """True where a visit's first block needs a mask: it may begin with a whole one."""
    everywhere = spec.variant.masks_everywhere and spec.variant.lists is None
    return True if everywhere else visit.right > 0


def forget_stages(spec: ForwardSpec, states: KvState) -> KvState:
    """`states` where nothing is known of the next stages of K and V."""
    if spec.no_max:
        return states._replace(k_full=Boolean(False), v_full=Boolean(False))
    return states


@cute.jit
def step(
    spec: Spec,
    resources: Resources,
    states: KvState,
    site: Site,
    position: Int32,
    masked: cutlass.Constexpr[bool],
) -> KvState:
    """Scores and softmax of the block at `position`, beside the output of the block before it."""
    tile, work, (rings, _, mmas, fragments) = site.tile, site.work, resources
    if cutlass.const_expr(spec.clears_each_block):
        rings.v.consumer_wait(states.v, states.v_full)
        clear_tail(spec, resources.tiles.v, states.v, site, position - 1)
    scores = cute.make_rmem_tensor(mmas.qk.partition_shape_C((WGMMA_M, spec.tile_n)), Float32)
    rings.k.consumer_wait(states.k, states.k_full)
    if cutlass.const_expr(spec.pingpong):
        wait_turn(NamedBarrier.MMA_ORDER, site.warpgroup)
    issue_scores(resources, states, scores)
    apply_correction(spec, fragments, states)
    if cutlass.const_expr(not spec.clears_each_block):
        rings.v.consumer_wait(states.v, states.v_full)
    issue_output(resources, states)
    if cutlass.const_expr(spec.pingpong):
        give_turn(NamedBarrier.MMA_ORDER, next_warpgroup(spec, site.warpgroup))
    wgmma.wait_group(1)
    release(rings.k, states.k)
    release_q(spec, rings.q, states.q, position == tile.visit.count - 1)
    if cutlass.const_expr(spec.scales_by_block):
        work = enter_block(spec, fragments, work)
    scored = ScoreBlock(tile, work, blocks_to_mask(spec, site, position, masked))
    if cutlass.const_expr(spec.no_max):
        # Probabilities are packed as they are computed, over those that the product in flight reads.
        wgmma.wait_group(0)
        release(rings.v, states.v)
        # Asked now, answered during the softmax.
        k_full, v_full = is_full(rings.k, states.k), is_full(rings.v, states.v)
        rescale = softmax_step_no_max(spec, scores, fragments.p, fragments, scored, masked)
        return states._replace(rescale=rescale, k_full=k_full, v_full=v_full)
    if cutlass.const_expr(spec.lazy_rescale):
        states = states._replace(rescale=softmax_step_lazy(spec, scores, fragments, scored, masked))
    else:
        softmax_step(spec, scores, fragments, scored, masked=masked, first=False)
    if cutlass.const_expr(spec.scales_by_block):
        convert_output_units(fragments)
        fetch_descales(spec, fragments, tile, work, position + 1)
    if cutlass.const_expr(spec.late_wait):
        softmax.finish_sums(fragments.row_sum)
    wgmma.wait_group(0)
    release(rings.v, states.v)
    if cutlass.const_expr(not spec.lazy_rescale):
        softmax.rescale(softmax.rows_and_columns(fragments.out), fragments.correction)
    to_operand(scores, fragments.p)
    return states


def seen_blocks(spec: ForwardSpec, site: Site) -> Int32:
    """Number of those blocks that the right edge cuts in which any row of this warpgroup sees a key, and the
    first."""
    tile = site.tile
    last_row = tile.at.m * spec.tile_m + site.warpgroup * WGMMA_M + WGMMA_M - 1
    last = last_row // spec.pack + diagonal_shift(spec.variant, tile.seq) + site.work.window.right
    seen = last // spec.tile_n + tile.visit.right - tile.visit.last
    return cutlass.max(cutlass.min(cutlass.max(tile.visit.right, 1), seen), 1)


@cute.jit
def hidden_step(spec: Spec, resources: Resources, states: KvState, site: Site, position: Int32) -> KvState:
    """`step` where all scores are hidden: no product of Q and K, and weights of 0."""
    rings, fragments = resources.rings, resources.fragments
    rings.k.consumer_wait(states.k)
    if cutlass.const_expr(spec.pingpong):
        wait_turn(NamedBarrier.MMA_ORDER, site.warpgroup)
    apply_correction(spec, fragments, states)
    rings.v.consumer_wait(states.v)
    issue_output(resources, states)
    if cutlass.const_expr(spec.pingpong):
        give_turn(NamedBarrier.MMA_ORDER, next_warpgroup(spec, site.warpgroup))
    release(rings.k, states.k)
    release_q(spec, rings.q, states.q, position == site.tile.visit.count - 1)
    wgmma.wait_group(0)
    release(rings.v, states.v)
    # Word by word: where bytes meet after a branch, ptxas takes each apart.
    cute.recast_tensor(fragments.p, Int32).fill(Int32(0))
    return forget_stages(spec, states._replace(rescale=cutlass.Boolean(False)))


@cute.jit
def apply_correction(spec: Spec, fragments: Fragments, states: KvState):
    """Multiplies the output by the last block's `correction` where that has been put off.

    Just before the output's next product, and not when the correction is known: a branch there would keep
    the conversions of probabilities from mixing with their exponentials.
    """
    if cutlass.const_expr(spec.lazy_rescale or spec.no_max):
        if states.rescale:
            softmax.rescale(softmax.rows_and_columns(fragments.out), fragments.correction)


@cute.jit
def release_q(spec: Spec, ring: pipeline.PipelineAsync, state: pipeline.PipelineState, last: Boolean):
    """Releases Q after the `last` scores of a tile: the next one arrives beside what is left to do."""
    if cutlass.const_expr(not spec.stage_in_q):
        if last:
            ring.consumer_release(state)


@cute.jit
def blocks_to_mask(
    spec: Spec, site: Site, position: Int32, masked: cutlass.Constexpr[bool]
) -> tuple[Int32, ...]:
    """Key blocks of the step at `position`; 0 where their numbers do not matter: lists take time to read."""
    variant, tile, lists = spec.variant, site.tile, site.work.lists
    blocks, needed = (Int32(0),) * spec.joined, Boolean(True)
    if cutlass.const_expr(not (masked or variant.lists is None or variant.changes_scores or spec.varlen)):
        _, split = variant.lists
        needed = tile.visit.k_len % (split * spec.tile.keys) != 0
        needed = needed | lacks_blocks(spec.tile, tile.visit, position)
    if needed:
        blocks = blocks_at(variant, spec.tile, tile.visit, tile.at, lists, position, spec.right_edge)
    return blocks


@cute.jit
def next_warpgroup(spec: Spec, warpgroup: Int32) -> Int32:
    """The warpgroup whose turn comes after that of `warpgroup`."""
    if cutlass.const_expr(spec.consumers == 2):
        return 1 - warpgroup
    following = warpgroup + 1
    if following == spec.consumers:
        following = Int32(0)
    return following


@cute.jit
def clear_tail(spec: Spec, sV: cute.Tensor, v_state: pipeline.PipelineState, site: Site, position: Int32):
    """Zeroes what follows the last key in the block of V at `v_state`; the warpgroups share the work.

    It belongs to another sequence or to nobody, and 0 * NaN is NaN. All warpgroups meet here, so nobody may
    wait for its turn at the tensor cores of this step yet.
    """
    visit = site.tile.visit
    blocks = (visit.last,)
    if cutlass.const_expr(spec.clears_each_block):
        blocks = blocks_at(spec.variant, spec.tile, visit, site.tile.at, site.work.lists, position)
    for part in cutlass.range_constexpr(spec.joined):
        clear_tail_of_block(spec, sV, v_state, site, blocks[part], part)


@cute.jit
def clear_tail_of_block(
    spec: Spec,
    sV: cute.Tensor,
    v_state: pipeline.PipelineState,
    site: Site,
    block: Int32,
    part: cutlass.Constexpr[int],
):
    """`clear_tail` of the block that is number `part` of its step."""
    keys = cutlass.const_expr(spec.tile.keys)
    first = cutlass.max(site.tile.visit.k_len - block * keys, 0)
    zero = spec.dtype(0.0)
    if cutlass.const_expr(spec.dtype.width == 8):
        # Up to a multiple of V_STEP the transpose has zeros, in the order of its own.
        first = (first + V_STEP - 1) // V_STEP * V_STEP
    if first < keys:
        for key in cutlass.range(first + site.warpgroup, keys, spec.consumers, unroll=1):
            for i in cutlass.range_constexpr(cute.ceil_div(spec.dim_v, WARPGROUP_THREADS)):
                column = site.thread + i * WARPGROUP_THREADS
                if column < spec.dim_v:
                    sV[column, part * keys + key, v_state.index] = zero
        fence_for_async_readers()
        sync_consumers(spec.consumers)


@cute.jit
def store_output(
    spec: Spec,
    mma: cute.TiledMma,
    acc: cute.Tensor,
    output: Output,
    staging: cute.Tensor,  # (64, epi_n, stages)
    site: Site,
):
    """Stores this warpgroup's rows of the output.

    A TMA store is clipped at the end of the tensor, not at the end of a packed sequence, so that a
    sequence's last rows go by predicated stores.
    """
    tile, work = site.tile, site.work
    first_row = site.first_row(spec)
    rows, start = tile.seq.q_len * spec.pack, tile.seq.q_start * spec.pack
    extent = (rows, work.v_dim, work.tiles.heads * work.tiles.batch)
    image, tma_o, mO = tile.at.head, output.coordinates, output.tensor
    if cutlass.const_expr(spec.varlen):
        tma_o = cute.domain_offset((start, 0, 0), tma_o)
        mO = cute.domain_offset((start, 0, 0), mO)
    else:
        image = tile.at.head + tile.at.batch * work.tiles.heads
    origin = (first_row, Int32(0), image)
    predicated = epi.plain_writer(mO, staging, extent, site.thread)
    consumer = Consumer(site.warpgroup, site.thread)
    epilogue = epi.Epilogue(spec.epilogue, identity, mma, staging, consumer)
    region = epi.Region(origin, extent)
    store = partial(epi.store_tile, acc=acc, operands=(), region=region)
    if cutlass.const_expr(spec.epilogue.use_tma):
        place = (tile.at.head, Int32(0) if spec.varlen else tile.at.batch)
        by_tma = epi.tma_writer(output.atom, tma_o, staging, spec.epilogue.subtile, place)
        whole = first_row + WGMMA_M <= rows if spec.varlen else Boolean(True)
        if whole:
            store(epilogue, write=by_tma)
        else:
            epi.drain(spec.epilogue, site.thread)
            store(replace(epilogue, plan=spec.predicated_epilogue), write=predicated)
    else:
        store(epilogue, write=predicated)
