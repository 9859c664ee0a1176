"""Consumer role of the SM90 kernel of dQ by tiles of queries: three products a step, dQ in registers.

Rows of the scores are queries, so that dS comes out of the accumulators as the register operand of dQ +=
dS K.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.kv_blocks import block_at
from kernels_dsl.blocks.attention.probabilities import bend, by_queries
from kernels_dsl.blocks.attention.score_tile import (
    ScoreBlock,
    Tile,
    change_and_mask,
    scale_of_scores,
    to_operand,
)
from kernels_dsl.blocks.attention.tile_queue import WorkTile
from kernels_dsl.blocks.attention.work import Work
from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.hw.barriers import (
    WARPGROUP_THREADS,
    NamedBarrier,
    fence_for_async_readers,
    give_turn,
    sync_consumers,
    wait_turn,
)
from kernels_dsl.blocks.hw.pipeline import consumer_state, release
from kernels_dsl.blocks.hw.wgmma import WGMMA_M, issue_product, settle

from .backward_dq_sm90_producer import SharedTiles
from .backward_dq_sm90_spec import DqSpec
from .backward_sm90_consumer import turned
from .backward_sm90_outputs import Output
from .backward_sm90_producer import Rings
from .backward_work import RowTiles
from .forward_sm90_consumer import Site, blocks_to_mask, first_is_masked, store_output


class Mmas(NamedTuple):
    """Tiled MMAs of one warpgroup, named by their result."""

    s: cute.TiledMma
    """(queries, keys) of Q K^T, and of dO V^T"""
    dq: cute.TiledMma
    """(queries, D)"""
    out: cute.TiledMma
    """A subtile of dQ on its way out."""


class RowNumbers(NamedTuple):
    """Float32 numbers of query rows, see `backward_work.Sums`, and where they lie."""

    lse: cute.Tensor
    row_sums: cute.Tensor
    tiles: RowTiles


class Rows(NamedTuple):
    """Those of this thread's two rows."""

    lse: cute.Tensor
    row_sums: cute.Tensor


class Fragments(NamedTuple):
    """A consumer warpgroup's operands, descriptors but for `ds`, and accumulators."""

    q: cute.Tensor
    do: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    k_rows: cute.Tensor
    """B of dQ: K summed over its rows."""
    ds: cute.Tensor
    """A of dQ, in registers."""
    dq: cute.Tensor
    """float32 (64 queries, D)."""


class States(NamedTuple):
    """Positions in the rings of K, for scores and for dQ a step later, and of V."""

    k: pipeline.PipelineState
    k_rows: pipeline.PipelineState
    v: pipeline.PipelineState


class Shared(NamedTuple):
    """Rings and tiles of all consumer warpgroups, and their products."""

    rings: Rings
    tiles: SharedTiles
    mmas: Mmas


class Resources(NamedTuple):
    """Records that are shared, and the registers of a consumer warpgroup."""

    shared: Shared
    fragments: Fragments
    rows: Rows


@cute.jit
def consume(
    spec: cutlass.Constexpr,
    shared: Shared,
    output: Output,
    work: Work,
    numbers: RowNumbers,
    tile: WorkTile,
    group: Int32,
):
    """Consumer warpgroup number `group`: its 64 rows of one query tile."""
    rings, tiles, mmas = shared
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    row = tile.at.m * spec.tile_m + group * WGMMA_M + thread // 32 * 16 + thread % 32 // 4
    site = Site(Tile(*tile, row, thread % 4 * 2), work, group, thread)
    fragments = make_fragments(spec, mmas, tiles, group, thread)
    rows = Rows(
        row_values(spec, numbers.tiles, numbers.lse, site),
        row_values(spec, numbers.tiles, numbers.row_sums, site),
    )
    resources = Resources(shared, fragments, rows)
    fragments.dq.fill(0.0)
    rings.q.consumer_wait(consumer_state(1))
    walk(spec, resources, site)
    for i in cutlass.range_constexpr(cute.size(fragments.dq)):
        fragments.dq[i] = fragments.dq[i] * work.scores.scale
    staging = tiles.staging[None, None, None, group]
    store_output(spec, mmas.out, fragments.dq, output, staging, site)
    epi.drain(spec.epilogue, thread)


def make_fragments(spec: DqSpec, mmas: Mmas, tiles: SharedTiles, group: Int32, thread: Int32) -> Fragments:
    """Operand descriptors in shared memory, and registers."""
    s, dq = mmas.s.get_slice(thread), mmas.dq.get_slice(thread)
    own_q = cute.local_tile(tiles.q[None, None, 0], (WGMMA_M, spec.dim), (group, 0))
    own_do = cute.local_tile(tiles.do[None, None, 0], (WGMMA_M, spec.dim_v), (group, 0))
    # An accumulator of 64 x 16 and an operand A of 64 x 16 have the same elements in the same order.
    ds = cute.make_layout(((2, 2, 2), 1, spec.tile_n // 16), stride=((1, 2, 4), 0, 8))
    return Fragments(
        q=mmas.s.make_fragment_A(s.partition_A(own_q)),
        do=mmas.s.make_fragment_A(s.partition_A(own_do)),
        k=mmas.s.make_fragment_B(s.partition_B(tiles.k)),
        v=mmas.s.make_fragment_B(s.partition_B(tiles.v)),
        k_rows=mmas.dq.make_fragment_B(dq.partition_B(turned(tiles.k))),
        ds=cute.make_rmem_tensor(ds, spec.dtype),
        dq=cute.make_rmem_tensor(mmas.dq.partition_shape_C((WGMMA_M, spec.dim)), Float32),
    )


@cute.jit
def row_values(spec: cutlass.Constexpr, tiles: RowTiles, values: cute.Tensor, site: Site) -> cute.Tensor:
    """The numbers of this thread's rows; 0 after the last row of the sequence."""
    at, seq = site.tile.at, site.tile.seq
    found = cute.make_rmem_tensor(2, Float32)
    found.fill(0.0)
    for r in cutlass.range_constexpr(2):
        row = site.tile.row + 8 * r
        if row < seq.q_len:
            block = row // spec.row_tile
            number = tiles.number(spec.row_tile, spec.varlen, seq, at.batch, at.head, block)
            found[r] = values[number * spec.row_tile + row - block * spec.row_tile]
    return found


@cute.jit
def walk(spec: cutlass.Constexpr, resources: Resources, site: Site):
    """dQ of one query tile, not scaled, over the key blocks of its visit."""
    visit, rings = site.tile.visit, resources.shared.rings
    states = States(
        consumer_state(spec.k_stages), consumer_state(spec.k_stages), consumer_state(spec.v_stages)
    )
    states = step(spec, resources, states, site, Int32(0), first_is_masked(spec, visit), True)
    # The first block has been taken from the first segment that has one.
    right_end = cutlass.max(visit.right, 1)
    whole_end = cutlass.max(visit.right + visit.whole, 1)
    for position in cutlass.range(1, right_end, unroll=1):
        states = step(spec, resources, states, site, position, True, False)
    for position in cutlass.range(right_end, whole_end, unroll=1):
        states = step(spec, resources, states, site, position, False, False)
    if cutlass.const_expr(spec.variant.left):
        for position in cutlass.range(whole_end, visit.count, unroll=1):
            states = step(spec, resources, states, site, position, True, False)
    issue_dq(resources, states)
    warpgroup.wait_group(0)
    rings.k.consumer_release(states.k_rows)


def issue_dq(resources: Resources, states: States) -> None:
    """Issues dQ += dS K of the step before."""
    fragments = resources.fragments
    keys = fragments.k_rows[None, None, None, states.k_rows.index]
    issue_product(resources.shared.mmas.dq, fragments.dq, fragments.ds, keys, True)


def step(
    spec: DqSpec,
    resources: Resources,
    states: States,
    site: Site,
    position: Int32,
    masked: bool | Boolean,
    first: bool,
) -> States:
    """dS of the blocks at `position`, and dQ of the step before."""
    (rings, tiles, mmas), fragments, rows = resources
    k_rows = states.k_rows
    scores = cute.make_rmem_tensor(mmas.s.partition_shape_C((WGMMA_M, spec.tile_n)), Float32)
    d_probs = cute.make_rmem_tensor(scores.layout, Float32)
    rings.k.consumer_wait(states.k)
    clears = spec.clears_each_block or (spec.varlen and first)
    if clears:
        rings.v.consumer_wait(states.v)
        clear_tail(spec, tiles, states, site, position)
    if first:
        start_apart(spec, site)
    else:
        issue_dq(resources, states)
    issue_product(mmas.s, scores, fragments.q, fragments.k[None, None, None, states.k.index], False)
    if first:
        rings.do.consumer_wait(consumer_state(1))
        blocks = (block_at(spec.variant, site.tile.visit, site.tile.at, site.work.lists, position),)
    else:
        blocks = blocks_to_mask(spec, site, position, masked)
        warpgroup.wait_group(1)
        k_rows = release(rings.k, states.k_rows)
    if not clears:
        rings.v.consumer_wait(states.v)
    issue_product(mmas.s, d_probs, fragments.do, fragments.v[None, None, None, states.v.index], False)
    warpgroup.wait_group(1)
    scored = ScoreBlock(site.tile, site.work, blocks)
    weigh(spec, scores, rows.lse, scored, masked, tiles.scratch[None, site.warpgroup])
    if first:
        let_other_start(spec, site)
    warpgroup.wait_group(0)
    v = release(rings.v, states.v)
    slope(scores, d_probs, rows.row_sums)
    to_operand(d_probs, fragments.ds)
    settle(fragments.ds)
    k = states.k
    k.advance()
    return States(k, k_rows, v)


def weigh(
    spec: DqSpec,
    scores: cute.Tensor,
    lse: cute.Tensor,
    scored: ScoreBlock,
    masked: bool | Boolean,
    scratch: cute.Tensor,
) -> None:
    """Turns products of queries and keys into probabilities, times the slopes of bent scores."""
    slopes = None
    if spec.variant.bends_scores:
        slopes = cute.make_rmem_tensor(scores.layout, Float32)
    change_and_mask(spec, scores, scored, masked, slopes)
    factor = scale_of_scores(spec, scored.work, slopes is not None)
    view = softmax.rows_and_columns(scores)
    for r in range(cute.size(view, mode=[0])):
        for c in range(cute.size(view, mode=[1])):
            view[r, c] = cute.math.exp2(view[r, c] * factor - lse[r], fastmath=True)
    keep_order(view, scratch)
    if slopes is not None:
        bend(by_queries(view), softmax.rows_and_columns(slopes))


def keep_order(view: cute.Tensor, scratch: cute.Tensor) -> None:
    """Keeps the compiler from scheduling what follows before these exponentials, by a store of their sum that
    nobody reads: ptxas moves the wait for a product ahead of arithmetic, but not of a store."""
    sums = [softmax.fold(view, r, softmax.plus) for r in range(cute.size(view, mode=[0]))]
    scratch[cute.arch.thread_idx()[0] % WARPGROUP_THREADS] = sums[0] + sums[1]


def slope(probs: cute.Tensor, d_probs: cute.Tensor, row_sums: cute.Tensor) -> None:
    """d_probs = probs * (d_probs - row sum), accumulators whose rows are queries."""
    view, d_view = softmax.rows_and_columns(probs), softmax.rows_and_columns(d_probs)
    for r in range(cute.size(view, mode=[0])):
        for c in range(cute.size(view, mode=[1])):
            d_view[r, c] = view[r, c] * (d_view[r, c] - row_sums[r])


@cute.jit
def start_apart(spec: cutlass.Constexpr, site: Site):
    """The second of two warpgroups starts when the first has its probabilities: one has the tensor cores
    while the other computes exponentials."""
    if cutlass.const_expr(spec.consumers == 2):
        if site.warpgroup == 1:
            wait_turn(NamedBarrier.MMA_ORDER, site.warpgroup)


@cute.jit
def let_other_start(spec: cutlass.Constexpr, site: Site):
    """See `start_apart`."""
    if cutlass.const_expr(spec.consumers == 2):
        if site.warpgroup == 0:
            give_turn(NamedBarrier.MMA_ORDER, 1 - site.warpgroup)


@cute.jit
def clear_tail(spec: cutlass.Constexpr, tiles: SharedTiles, states: States, site: Site, position: Int32):
    """Sets rows of K and V after a sequence's last key to 0: they belong to another, and may hold NaN. The
    warpgroups share the work."""
    tile = site.tile
    block = block_at(spec.variant, tile.visit, tile.at, site.work.lists, position)
    first = cutlass.max(tile.seq.k_len - block * spec.tile_n, 0)
    if first < spec.tile_n:
        clear_rows(spec, tiles.k[None, None, states.k.index], first, site)
        clear_rows(spec, tiles.v[None, None, states.v.index], first, site)
        fence_for_async_readers()
        sync_consumers(spec.consumers)


@cute.jit
def clear_rows(spec: cutlass.Constexpr, tile: cute.Tensor, first: Int32, site: Site):
    """Sets rows of a tile (rows, columns) from `first` on to 0, a row for each warpgroup."""
    columns = cute.size(tile, mode=[1])
    for row in cutlass.range(first + site.warpgroup, spec.tile_n, spec.consumers, unroll=1):
        for column in cutlass.range(site.thread, columns, WARPGROUP_THREADS, unroll=1):
            tile[row, column] = spec.dtype(0.0)
