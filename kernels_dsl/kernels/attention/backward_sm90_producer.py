"""Producer role of the SM90 attention backward: K and V once, then Q and dO of each query block."""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.pipeline import producer_state

from .backward_sm90_spec import BackwardSpec
from .backward_sm90_visits import rank_of
from .backward_work import BackwardWork, KeyJob, Sums, listed_block


class Loads(NamedTuple):
    """TMA loads of the four operands, (rows, D, heads, B)."""

    q: tma.TmaCopy
    k: tma.TmaCopy
    v: tma.TmaCopy
    do: tma.TmaCopy


class QueryLoaders(NamedTuple):
    """Loads of Q and dO of one head: `load(block, stage, barrier)`."""

    q: Callable[[Int32, Int32, cute.Pointer], None]
    do: Callable[[Int32, Int32, cute.Pointer], None]


class SharedTiles(NamedTuple):
    """Tiles in shared memory."""

    k: cute.Tensor
    """(keys, D, CTAs): this CTA's own, then those of the other that shares the tile"""
    v: cute.Tensor
    """(keys, Dv)"""
    q: cute.Tensor
    """(queries, D, stages)"""
    do: cute.Tensor
    """(queries, Dv, stages)"""
    ds: cute.Tensor
    """(queries, keys, stages), contiguous along the queries; the last is the other CTA's, if there is one"""
    lse: cute.Tensor
    """float32 (queries, stages): log-sum-exp in base 2, +inf for rows without a key and after the last"""
    row_sums: cute.Tensor
    """float32 (queries, stages): sum of dO * O along each row, less the gradient of its log-sum-exp"""
    probs: cute.Tensor
    """P on its way to another warpgroup; nothing where there is no such way"""
    staging: cute.Tensor
    """(64 keys, columns of a subtile, buffers, consumers): dK and dV on their way out, where K and V were"""
    sums: cute.Tensor
    """float32 (elements of a part, buffers): dQ on its way to the sums"""


class Rings(NamedTuple):
    """Pipelines: K and V have one stage each; Q comes with its log-sum-exp, dO with its row sums."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync
    do: pipeline.PipelineTmaAsync

    def load(
        self,
        loaders: QueryLoaders,
        sums: Sums,
        tiles: SharedTiles,
        block: Int32,
        number: Int32,
        state: pipeline.PipelineState,
    ) -> None:
        """Starts the loads of query block `block`, which is `number` of all, to the stage of `state`."""
        rows = tiles.lse.shape[0]
        row = number * rows
        self.q.producer_acquire(state)
        full = self.q.producer_get_barrier(state)
        loaders.q(block, state.index, full)
        load_rows(sums.lse, row, tiles.lse[None, state.index], full)
        self.q.producer_commit(state)
        self.do.producer_acquire(state)
        full = self.do.producer_get_barrier(state)
        loaders.do(block, state.index, full)
        load_rows(sums.row_sums, row, tiles.row_sums[None, state.index], full)
        self.do.producer_commit(state)


@cute.jit
def produce(
    spec: cutlass.Constexpr,
    rings: Rings,
    loads: Loads,
    tiles: SharedTiles,
    work: BackwardWork,
    job: KeyJob,
):
    """Producer warp: the operands of one work tile, in the order of their use."""
    at, seq, walk = job.at, job.seq, job.walk
    batch = at.batch
    q_start, k_start = Int32(0), Int32(0)
    if cutlass.const_expr(spec.varlen):
        batch, q_start, k_start = Int32(0), seq.q_start, seq.k_start
    once = producer_state(1)
    load_k = tile_loader(loads.k, tiles.k, (spec.cta_keys, spec.dim), k_start, (at.kv_head, batch))
    load_v = tile_loader(loads.v, tiles.v, (spec.cta_keys, spec.dim_v), k_start, (at.kv_head, batch))
    number = at.n * spec.ctas + rank_of(spec)
    for ring, load, parts in ((rings.k, load_k, spec.ctas), (rings.v, load_v, 1)):
        ring.producer_acquire(once)
        for i in range(parts):
            load(number ^ i, Int32(i), ring.producer_get_barrier(once))
        ring.producer_commit(once)
    state = producer_state(spec.stages)
    if cutlass.const_expr(work.lists is not None):
        for place in cutlass.range(walk.first, walk.first + walk.count, unroll=1):
            query = listed_block(work, job, place)
            load = query_loaders(spec, loads, tiles, q_start, (query.head, batch))
            number = work.rows.number(spec.tile_q, spec.varlen, seq, at.batch, query.head, query.block)
            rings.load(load, work.sums, tiles, query.block, number, state)
            state.advance()
    else:
        for member in cutlass.range(work.heads_per_kv, unroll=1):
            head = at.kv_head * work.heads_per_kv + member
            load = query_loaders(spec, loads, tiles, q_start, (head, batch))
            for block in cutlass.range(walk.first, walk.end, unroll=1):
                number = work.rows.number(spec.tile_q, spec.varlen, seq, at.batch, head, block)
                rings.load(load, work.sums, tiles, block, number, state)
                state.advance()


def query_loaders(
    spec: BackwardSpec, loads: Loads, tiles: SharedTiles, start: Int32, image: tuple[Int32, Int32]
) -> QueryLoaders:
    """Loads of Q and dO of one (head, batch), whose rows begin at `start`."""
    return QueryLoaders(
        tile_loader(loads.q, tiles.q, (spec.tile_q, spec.dim), start, image, spec.ctas),
        tile_loader(loads.do, tiles.do, (spec.tile_q, spec.dim_v), start, image, spec.ctas),
    )


@cute.jit
def load_rows(source: cute.Tensor, row: Int32, target: cute.Tensor, full: cute.Pointer):
    """Copies float32 numbers of a query block's rows, from `row` on, in bulk."""
    rows = cute.size(target)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=rows * Float32.width)
    start = (source.iterator + cute.assume(row, divby=rows)).align(16)
    with cute.arch.elect_one():
        cute.copy(atom, cute.make_tensor(start, cute.make_layout(rows)), target, mbar_ptr=full)


def tile_loader(
    load: tma.TmaCopy,
    tiles: cute.Tensor,
    tile: tuple[int, int],
    start: Int32,
    image: tuple[Int32, Int32],
    ctas: int = 1,
):
    """`load(tile number, stage, barrier)` of rows from `start` on of one (head, batch). Each of `ctas` CTAs
    loads a part of the tile for all of them."""
    rows = cute.domain_offset((start, 0), load.coordinates[None, None, image[0], image[1]])
    g_tiles = cute.local_tile(rows, tile, (None, 0))  # (rows, D, tiles)
    place, mask = Int32(0), None
    if ctas > 1:
        place, mask = cute.arch.block_idx_in_cluster(), Int16((1 << ctas) - 1)
    part = tma.load_partition(load.atom, g_tiles, tiles, cute.make_layout(ctas), place)
    return tma.tile_loader(load.atom, part.tiles, part.shared, mask)
