"""Consumer role of the SM90 attention backward: five products a query block, dK and dV in registers.

Scores are computed transposed, keys by queries, so that P and dS come out of the accumulators as the
register operand of dV += P^T dO and dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K, which
sums over the keys of both warpgroups.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.mask import column_offset
from kernels_dsl.blocks.attention.mask_gradient import store_mask_gradient
from kernels_dsl.blocks.attention.probabilities import RowValues, ScoreStep, weigh
from kernels_dsl.blocks.attention.score_tile import to_operand
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
from kernels_dsl.blocks.hw.fp8 import widened
from kernels_dsl.blocks.hw.pipeline import consumer_state
from kernels_dsl.blocks.hw.wgmma import WGMMA_M, complete, issue_product, settle
from kernels_dsl.blocks.schedule import item_queue

from .backward_sm90_clear import clear_keys, clear_queries
from .backward_sm90_cut import piece_of, store_piece
from .backward_sm90_d_scores import place_of_d_scores, put_d_scores
from .backward_sm90_handoff import await_empty, before, give, give_back, in_exchange, other
from .backward_sm90_outputs import Output, Outputs, image_of, store_rows
from .backward_sm90_producer import Rings, SharedTiles
from .backward_sm90_spec import CONSUMERS, BackwardSpec
from .backward_sm90_sums import Share, await_all, give_share
from .backward_sm90_tiles import for_each_tile
from .backward_sm90_visits import Site, Visit, first_visit, for_each_block, is_last, site_of
from .backward_work import (
    BackwardWork,
    KeyJob,
    score_step,
)


class Mmas(NamedTuple):
    """Tiled MMAs of one warpgroup, named by their result."""

    s: cute.TiledMma
    """(keys, queries) of K Q^T, and of V dO^T"""
    dp: cute.TiledMma
    """(keys, queries) of V dO^T, with V in registers"""
    dv: cute.TiledMma
    """(keys, Dv)"""
    dk: cute.TiledMma
    """(keys, D)"""
    dq: cute.TiledMma
    """(queries, D), or half of the columns"""
    stored: cute.TiledMma
    """A subtile of dK or dV on its way out."""


class Fragments(NamedTuple):
    """A consumer warpgroup's operands (descriptors) and accumulators."""

    k: cute.Tensor
    """A of S^T: this warpgroup's keys."""
    q: cute.Tensor
    """B of S^T."""
    v: cute.Tensor
    """A of dP^T."""
    kept_v: cute.Tensor | None
    """The first columns of that, in registers, where some are kept."""
    do: cute.Tensor
    """B of dP^T."""
    do_rows: cute.Tensor
    """B of dV: dO summed over its rows."""
    q_rows: cute.Tensor
    """B of dK."""
    ds: cute.Tensor
    """A of dQ: all keys."""
    ds_place: Int32 | None
    """See `place_of_d_scores`, where dS is given late."""
    k_rows: cute.Tensor
    """B of dQ."""
    dk: cute.Tensor
    """float32 (64 keys, D) accumulators."""
    dv: cute.Tensor
    """float32 (64 keys, Dv) accumulators."""
    dq: cute.Tensor
    """float32 accumulators of this warpgroup's share, see `BackwardSpec.dq_share`."""


class Shared(NamedTuple):
    """Rings and tiles of both consumer warpgroups. `exchange`: the ring of dS, see `in_exchange`."""

    rings: Rings
    exchange: pipeline.PipelineAsync
    mmas: Mmas
    tiles: SharedTiles


class States(NamedTuple):
    """Positions in the rings of Q and dO, of K and of V."""

    rows: pipeline.PipelineState
    k: pipeline.PipelineState
    v: pipeline.PipelineState
    dq_keys: Int32
    """Stage of K for the next dQ, of the block before: of this tile's keys or of the last one's."""
    number: Int32
    """Number of that block among the query tiles."""


@cute.jit
def consume(
    spec: cutlass.Constexpr,
    shared: Shared,
    outputs: Outputs,
    work: BackwardWork,
    queue: item_queue.ItemQueue,
    group: Int32,
):
    """Consumer warpgroup number `group`: 64 keys of each tile of this CTA."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    parts = make_fragments(spec, shared.mmas, shared.tiles, group, thread)
    states = States(consumer_state(spec.stages), consumer_state(2), consumer_state(1), Int32(0), Int32(0))
    if cutlass.const_expr(spec.gives_q):
        give_zeros(spec, shared, group, thread)
    run = partial(compute_tile, spec, shared, parts, outputs, work, group)
    states = for_each_tile(spec, work, queue, states, run)
    if cutlass.const_expr(spec.gives_q):
        give_last_dq(spec, shared, parts, work, states, group)
        await_all(spec, group)  # the last share is read: the other warp says so after each


@cute.jit
def consume_tile(
    spec: cutlass.Constexpr,
    shared: Shared,
    outputs: Outputs,
    work: BackwardWork,
    group: Int32,
    job: KeyJob,
):
    """The same of the one tile of this CTA: the first step is a copy of its own, without dQ, and dK and dV
    leave by way of the memory of K and V."""
    site = site_of(spec, work, job, group, group)
    rings, mmas, tiles = shared.rings, shared.mmas, shared.tiles
    parts = make_fragments(spec, mmas, tiles, group, site.thread)
    parts.dk.fill(0.0)
    parts.dv.fill(0.0)
    once, zero = consumer_state(1), Int32(0)
    states = States(consumer_state(spec.stages), once, once, zero, zero)
    if job.walk.count > 0:
        rings.k.consumer_wait(states.k)
        rings.v.consumer_wait(states.v)
        if cutlass.const_expr(spec.varlen):
            clear_keys(spec, tiles, 0, site)
        if cutlass.const_expr(spec.v_registers):
            read_v(spec, mmas, tiles, parts, site)
        step_once = partial(step_of_tile, spec, shared, parts, site)
        rows, number = step_once(True, (states.rows, zero), first_visit(spec, site))
        rows, number = for_each_block(spec, site, (rows, number), partial(step_once, False), skipped=1)
        if cutlass.const_expr(spec.gives_q):
            last = States(rows, once, once, zero, number)
            give_last_dq(spec, shared, parts, work, last, group)
    if cutlass.const_expr(spec.gives_kv):
        if cutlass.const_expr(work.cut is None):
            store_tile(spec, shared, outputs, parts, site)
        elif piece_of(work, job).pieces > 1:
            store_piece(spec, outputs, parts.dk, parts.dv, site)
        else:
            store_tile(spec, shared, outputs, parts, site)
    if cutlass.const_expr(spec.gives_q):
        await_all(spec, group)  # as above


def read_v(spec: BackwardSpec, mmas: Mmas, tiles: SharedTiles, parts: Fragments, site: Site) -> None:
    """Reads the columns of V that are kept, as operand A."""
    own = cute.local_tile(tiles.v[None, None, 0], (WGMMA_M, spec.dim_v), (site.group, 0))
    source = mmas.dp.get_slice(site.thread).partition_A(own)
    for k in range(spec.v_registers // 16):
        cute.autovec_copy(source[None, None, k], parts.kept_v[None, None, k])
    settle(parts.kept_v)


@cute.jit
def store_tile(spec: cutlass.Constexpr, shared: Shared, outputs: Outputs, parts: Fragments, site: Site):
    """Stores dK and dV by way of the memory of K and V."""
    mmas, staging = shared.mmas, shared.tiles.staging
    sync_consumers(CONSUMERS)  # the other warpgroup may still multiply by K and V
    store_keys(spec, spec.dv_epilogue, mmas.stored, parts.dv, outputs.dv, staging, site)
    for i in cutlass.range_constexpr(cute.size(parts.dk)):
        parts.dk[i] = parts.dk[i] * site.work.scores.scale
    store_keys(spec, spec.dk_epilogue, mmas.stored, parts.dk, outputs.dk, staging, site)
    epi.drain(spec.dk_epilogue, site.thread)


def step_of_tile(
    spec: BackwardSpec,
    shared: Shared,
    parts: Fragments,
    site: Site,
    first: bool,
    state: tuple[pipeline.PipelineState, Int32],
    visit: Visit,
) -> tuple[pipeline.PipelineState, Int32]:
    """`step` in a CTA that has one tile of keys. `state`: see `States.rows` and `States.number`."""
    once = consumer_state(1)
    states = States(state[0], once, once, once.index, state[1])
    states = step(spec, shared, parts, site, first, states, visit)
    return states.rows, states.number


@cute.jit
def compute_tile(
    spec: cutlass.Constexpr,
    shared: Shared,
    parts: Fragments,
    outputs: Outputs,
    work: BackwardWork,
    group: Int32,
    states: States,
    job: KeyJob,
) -> States:
    """64 keys of one tile against its query blocks, but dQ of the last one. Returns the next positions."""
    site = site_of(spec, work, job, group, group)
    rings, tiles = shared.rings, shared.tiles
    parts.dk.fill(0.0)
    parts.dv.fill(0.0)
    if job.walk.count > 0:
        rings.k.consumer_wait(states.k)
        if cutlass.const_expr(spec.varlen):
            rings.v.consumer_wait(states.v)
            clear_keys(spec, tiles, states.k.index, site)
        if cutlass.const_expr(spec.v_registers):
            rings.v.consumer_wait(states.v)
            read_v(spec, shared.mmas, tiles, parts, site)
        states = for_each_block(spec, site, states, partial(step, spec, shared, parts, site, None))
        if cutlass.const_expr(not spec.gives_q):
            rings.k.consumer_release(states.k)
        rows, k, v, dq_keys, number = states
        k.advance()
        v.advance()
        states = States(rows, k, v, dq_keys, number)
    elif cutlass.const_expr(spec.gives_q):
        # The warp that adds may be waiting for it, and there may be more such tiles than the queue holds.
        give_last_dq(spec, shared, parts, work, states, group)
    if cutlass.const_expr(spec.gives_kv):
        store_rows(spec, outputs.dv, parts.dv, Float32(1.0), site)
        store_rows(spec, outputs.dk, parts.dk, work.scores.scale, site)
    return states


def turned(tile: cute.Tensor) -> cute.Tensor:
    """View of a tile (rows, columns[, stages]) as (columns, rows[, stages])."""
    modes = [1, 0, 2] if cute.rank(tile) == 3 else [1, 0]
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=modes))


def make_fragments(
    spec: BackwardSpec, mmas: Mmas, tiles: SharedTiles, group: Int32, thread: Int32
) -> Fragments:
    """Operand descriptors in shared memory, and accumulators."""
    s, dv, dk, dq = (mma.get_slice(thread) for mma in (mmas.s, mmas.dv, mmas.dk, mmas.dq))
    sV = tiles.v[None, None, 0]
    own_k = cute.local_tile(tiles.k, (WGMMA_M, spec.dim), (group, 0, None))
    own_v = cute.local_tile(sV, (WGMMA_M, spec.dim_v), (group, 0))
    rows, columns = spec.dq_share
    ds_at = (group, 0, None) if rows < spec.tile_q else (0, 0, None)
    ds = cute.local_tile(tiles.ds, (rows, spec.tile_k), ds_at)
    k_rows_at = (group if columns < spec.dim else 0, 0, None)
    k_rows = cute.local_tile(turned(tiles.k), (columns, spec.tile_k), k_rows_at)
    return Fragments(
        k=mmas.s.make_fragment_A(s.partition_A(own_k)),
        q=mmas.s.make_fragment_B(s.partition_B(tiles.q)),
        v=mmas.s.make_fragment_A(s.partition_A(own_v)),
        kept_v=operand_registers(spec, spec.v_registers) if spec.v_registers else None,
        do=mmas.s.make_fragment_B(s.partition_B(tiles.do)),
        do_rows=mmas.dv.make_fragment_B(dv.partition_B(turned(tiles.do))),
        q_rows=mmas.dk.make_fragment_B(dk.partition_B(turned(tiles.q))),
        ds=mmas.dq.make_fragment_A(dq.partition_A(ds)),
        ds_place=place_of_d_scores(tiles.ds, group, thread) if spec.gives_late else None,
        k_rows=mmas.dq.make_fragment_B(dq.partition_B(k_rows)),
        dk=cute.make_rmem_tensor(mmas.dk.partition_shape_C((WGMMA_M, spec.dim)), Float32),
        dv=cute.make_rmem_tensor(mmas.dv.partition_shape_C((WGMMA_M, spec.dim_v)), Float32),
        dq=cute.make_rmem_tensor(mmas.dq.partition_shape_C(spec.dq_share), Float32),
    )


@cute.jit
def step(
    spec: cutlass.Constexpr,
    shared: Shared,
    parts: Fragments,
    site: Site,
    first: cutlass.Constexpr,
    states: States,
    visit: Visit,
) -> States:
    """One query block: P and dS from their products, its shares of dV and dK, and dQ of the block before.

    `first`: says whether it is the first one of a CTA's one tile, where dQ comes later; None where the CTA
    takes many.
    """
    rings, mmas, tiles, many = shared.rings, shared.mmas, shared.tiles, spec.many_tiles
    state, k, v, dq_keys, number = states
    stage, gives_q = state.index, spec.gives_q and not first
    here, last = in_exchange(state, many), before(state, many)
    scores = cute.make_rmem_tensor(mmas.s.partition_shape_C((WGMMA_M, spec.tile_q)), Float32)
    d_probs = cute.make_rmem_tensor(scores.layout, Float32)
    rings.q.consumer_wait(state)
    if cutlass.const_expr(spec.varlen):
        rings.do.consumer_wait(state)
        clear_queries(spec, tiles, stage, site, visit.query.block)
    starts = first
    if cutlass.const_expr(many):
        starts = (dq_keys != k.index) | (state.count == 0)
    start_apart(site, starts)
    keys = parts.k[None, None, None, k.index]
    issue_product(mmas.s, scores, keys, parts.q[None, None, None, stage], False)
    if cutlass.const_expr(not spec.varlen):
        if cutlass.const_expr(many):
            rings.v.consumer_wait(v)
        rings.do.consumer_wait(state)
    issue_d_probs(mmas, d_probs, parts, stage)
    lse = query_values(spec, tiles.lse, stage, site)
    warpgroup.wait_group(1)
    probs, d_scores = (operand_registers(spec, spec.tile_q) for _ in range(2))
    weigh_scores(spec, lse, site, visit, scores, probs)
    settle(probs)
    row_sums = query_values(spec, tiles.row_sums, stage, site, True)(0, spec.tile_q // 4)
    if cutlass.const_expr(starts is True and spec.tile_q == 64):
        complete(probs)
    let_other_start(site, starts)
    warpgroup.wait_group(0)
    if cutlass.const_expr(many):
        if is_last(site, visit):
            rings.v.consumer_release(v)
    if cutlass.const_expr(spec.gives_kv):
        issue_product(mmas.dv, parts.dv, probs, parts.do_rows[None, None, None, stage], True)
    factors = scores
    if cutlass.const_expr(spec.gives_late):
        factors = widened_like(scores, probs)
    elif cutlass.const_expr(spec.short_probs):
        factors = cute.make_tensor(probs.iterator, scores.layout)
    slopes_of_scores(spec, site, visit, row_sums, factors, d_probs, probs)
    to_operand(d_probs, d_scores)
    settle(d_scores)
    if cutlass.const_expr(spec.gives_q):
        await_empty(shared.exchange, here)
        if cutlass.const_expr(spec.gives_late):
            put_d_scores(tiles.ds, parts.ds_place, d_scores, stage)
        else:
            store_d_scores(spec, mmas.s, d_scores, tiles.ds, stage, site)
            fence_for_async_readers()
            give(shared.exchange, here)
    if cutlass.const_expr(gives_q):
        issue_dq(shared, parts, last, dq_keys)
    if cutlass.const_expr(spec.gives_kv):
        issue_product(mmas.dk, parts.dk, d_scores, parts.q_rows[None, None, None, stage], True)
    if cutlass.const_expr(spec.gives_late):
        fence_for_async_readers()
        give(shared.exchange, here)
    if cutlass.const_expr(gives_q):
        # Sums of dQ go out while dK is computed.
        warpgroup.wait_group(1 if spec.gives_kv else 0)
        give_back(shared.exchange, last)
        if cutlass.const_expr(many):
            if dq_keys != k.index:  # it was the last block of another tile
                rings.k.consumer_release(other(k))
        rings.do.consumer_release(state)
        give_share(spec, tiles, parts.dq, site.work, Share(state.count - 1, number, site.group))
        warpgroup.wait_group(0)
    else:
        warpgroup.wait_group(0)
        rings.do.consumer_release(state)
    rings.q.consumer_release(state)
    state.advance()
    return States(state, k, v, k.index, visit.number)


def issue_d_probs(mmas: Mmas, d_probs: cute.Tensor, parts: Fragments, stage: Int32) -> None:
    """Issues dP^T = V dO^T."""
    do, kept = parts.do[None, None, None, stage], parts.kept_v
    if kept is None:
        issue_product(mmas.s, d_probs, parts.v, do, False)
        return
    columns = cute.size(kept, mode=[2])
    shared_mma = cute.make_tiled_mma(cute.make_mma_atom(mmas.s.op))
    kept_mma = cute.make_tiled_mma(cute.make_mma_atom(mmas.dp.op))
    warpgroup.fence()
    for k in range(cute.size(do, mode=[2])):
        mma, a = (kept_mma, kept) if k < columns else (shared_mma, parts.v)
        mma.set(warpgroup.Field.ACCUMULATE, k > 0)
        cute.gemm(mma, d_probs, a[None, None, k], do[None, None, k], d_probs)
    warpgroup.commit_group()


def issue_dq(shared: Shared, parts: Fragments, state: pipeline.PipelineState, stage: Int32) -> None:
    """Issues this warpgroup's share of dQ of a block, by the keys in `stage`, once both warpgroups have given
    its dS. `state`: in the ring of dS."""
    shared.exchange.consumer_wait(state)
    ds, keys = parts.ds[None, None, None, state.index], parts.k_rows[None, None, None, stage]
    issue_product(shared.mmas.dq, parts.dq, ds, keys, False)


@cute.jit
def give_last_dq(
    spec: cutlass.Constexpr,
    shared: Shared,
    parts: Fragments,
    work: BackwardWork,
    states: States,
    group: Int32,
):
    """Gives dQ of the last block, if there was one, where no step does. The next step gives it again."""
    if states.rows.count > 0:
        issue_dq(shared, parts, before(states.rows, spec.many_tiles), states.dq_keys)
        warpgroup.wait_group(0)
        give_share(spec, shared.tiles, parts.dq, work, Share(states.rows.count - 1, states.number, group))


@cute.jit
def give_zeros(spec: cutlass.Constexpr, shared: Shared, group: Int32, thread: Int32):
    """Gives dS of what is before the first block: 0. Nobody adds the dQ that comes of it."""
    size, vector = spec.tile_q * spec.tile_k, 16 * 8 // spec.dtype.width
    threads = CONSUMERS * WARPGROUP_THREADS
    zero = cute.make_rmem_tensor(vector, spec.dtype)
    zero.fill(0.0)
    start = shared.tiles.ds.iterator + (size + (group * WARPGROUP_THREADS + thread) * vector)
    for i in cutlass.range_constexpr(size // (threads * vector)):
        place = (start + i * threads * vector).align(16)
        cute.autovec_copy(zero, cute.make_tensor(place, cute.make_layout(vector)))
    fence_for_async_readers()
    give(shared.exchange, before(consumer_state(spec.stages), ahead=True))


@cute.jit
def start_apart(site: Site, first: Boolean | bool):
    """The second warpgroup starts a tile when the first has its first probabilities: half a step later."""
    if Boolean(first) and site.group == 1:
        wait_turn(NamedBarrier.MMA_ORDER, site.group)


@cute.jit
def let_other_start(site: Site, first: Boolean | bool):
    """See `start_apart`."""
    if Boolean(first) and site.group == 0:
        give_turn(NamedBarrier.MMA_ORDER, 1 - site.group)


def operand_registers(spec: BackwardSpec, columns: int) -> cute.Tensor:
    """Registers of an operand A of 64 keys and so many columns, in the order of the accumulators: an
    accumulator of 64 x 16 and an operand A of 64 x 16 have the same elements."""
    layout = cute.make_layout(((2, 2, 2), 1, columns // 16), stride=((1, 2, 4), 0, 8))
    return cute.make_rmem_tensor(layout, spec.dtype)


def query_values(
    spec: BackwardSpec, values: cute.Tensor, stage: Int32, site: Site, at_once: bool = False
) -> RowValues:
    """Float32 numbers of this thread's queries, read now, where few registers are needed meanwhile or
    `at_once`, or when they are asked for."""
    place = stage * spec.tile_q + site.query
    if spec.variant.by_elements and not at_once:
        return partial(row_values, values, place)
    kept = row_values(values, place, 0, spec.tile_q // 4)
    return lambda first, count: kept


def weigh_scores(
    spec: BackwardSpec,
    lse: RowValues,
    site: Site,
    visit: Visit,
    scores: cute.Tensor,
    probs: cute.Tensor,
) -> None:
    """Turns products of keys and queries into probabilities, see `weigh`, and into operand A `probs`."""
    at = scores_of(spec, site, visit)
    weigh(spec.variant, scores, lse, at, probs)
    if not spec.variant.bends_scores:
        to_operand(scores, probs)


def scores_of(spec: BackwardSpec, site: Site, visit: Visit) -> ScoreStep:
    """This thread's scores of one query block."""
    query = visit.query.block * spec.tile_q + site.query
    return score_step(site.work, site.job, visit.query, (query, site.key))


def slopes_of_scores(
    spec: BackwardSpec,
    site: Site,
    visit: Visit,
    row_sums: cute.Tensor,
    factors: cute.Tensor,
    d_probs: cute.Tensor,
    probs: cute.Tensor,
) -> None:
    """Turns dP into dS, see `slope`, and stores the gradient of the mask where it is asked for.

    That is dS, unless scores are bent: then `factors` are not the probabilities, which 16-bit `probs` are.
    """
    d_mask, bent = site.work.d_mask, spec.variant.bends_scores
    if d_mask is not None and bent:
        store_mask_gradient(d_mask, scores_of(spec, site, visit), d_probs, probs, row_sums)
    slope(row_sums, factors, d_probs)
    if d_mask is not None and not bent:
        store_mask_gradient(d_mask, scores_of(spec, site, visit), d_probs, None, None)


def widened_like(scores: cute.Tensor, probs: cute.Tensor) -> cute.Tensor:
    """Operand A `probs` as float32, in the order of accumulators `scores`: one instruction each."""
    found = cute.make_rmem_tensor(scores.layout, Float32)
    for i in range(cute.size(found)):
        found[i] = widened(probs, i)
    return found


def slope(columns: cute.Tensor, probs: cute.Tensor, d_probs: cute.Tensor) -> None:
    """d_probs = probs * (d_probs - row sum), accumulators; `probs` may have 16 bits."""
    view, d_view = softmax.rows_and_columns(probs), softmax.rows_and_columns(d_probs)
    for c in range(cute.size(view, mode=[1])):
        for r in range(cute.size(view, mode=[0])):
            d_view[r, c] = view[r, c].to(Float32) * (d_view[r, c] - columns[c])


def row_values(values: cute.Tensor, place: Int32, first: int, count: int) -> cute.Tensor:
    """One float32 of each of `count` of this thread's queries, from number `first` on, out of shared memory,
    where that of the first lies at `place`."""
    found = cute.make_rmem_tensor(count, Float32)
    for i in range(0, count, 2):
        source = (values.iterator + place + column_offset(first + i)).align(8)
        target = cute.make_tensor(found.iterator + i, cute.make_layout(2))
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), target)
    return found


def store_d_scores(
    spec: BackwardSpec,
    mma: cute.TiledMma,
    d_scores: cute.Tensor,
    tiles: cute.Tensor,
    buffer: Int32,
    site: Site,
) -> None:
    """dS^T of this warpgroup's keys to shared memory, contiguous along the queries."""
    copy = epi.register_to_smem_copy(mma, spec.dtype, spec.tile_q)
    thr_copy = copy.get_slice(site.thread)
    own = cute.local_tile(turned(tiles), (WGMMA_M, spec.tile_q), (site.part, 0, None))
    target = thr_copy.partition_D(own)
    # The registers of an accumulator in the order in which the copy takes them.
    registers = cute.make_layout(thr_copy.partition_S(own).shape[:3])
    source = cute.make_tensor(d_scores.iterator, registers)
    cute.copy(copy, source, target[None, None, None, buffer])


@cute.jit
def store_keys(
    spec: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    mma: cute.TiledMma,
    acc: cute.Tensor,
    output: Output,
    staging: cute.Tensor,  # (64, epi_n, stages, consumers)
    site: Site,
):
    """Stores this warpgroup's 64 rows of dK or dV."""
    seq = site.job.seq
    first = site.start + site.part * WGMMA_M
    own = staging[None, None, None, site.group]
    image = image_of(spec, output, site)
    coordinates, tensor = output.coordinates, output.tensor
    if cutlass.const_expr(spec.varlen):
        coordinates = cute.domain_offset((seq.k_start, 0, 0), coordinates)
        tensor = cute.domain_offset((seq.k_start, 0, 0), tensor)
    extent = (seq.k_len, output.tensor.shape[1], cute.size(output.tensor, mode=[2]))
    plain = epi.plain_writer(tensor, own, extent, site.thread)
    write: Any = plain
    if cutlass.const_expr(plan.use_tma):
        write = epi.tma_writer(output.atom, coordinates, own, plan.subtile)
        if cutlass.const_expr(spec.varlen):
            write = epi.ClippedWriter(write, plain, seq.k_len)
    epilogue = epi.Epilogue(plan, identity, mma, own, Consumer(site.group, site.thread))
    epi.store_tile(epilogue, acc, (), epi.Region((first, Int32(0), image), extent), write)
