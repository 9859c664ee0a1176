"""Producer role of the SM90 attention backward: K and V once, then Q and dO of each query block."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.pipeline import producer_state

from .backward_work import BackwardWork, KeyJob


class Loads(NamedTuple):
    """TMA loads of the four operands, (rows, D, heads, B)."""

    q: tma.TmaCopy
    k: tma.TmaCopy
    v: tma.TmaCopy
    do: tma.TmaCopy


class Rings(NamedTuple):
    """Pipelines: K and V have one stage each; Q comes with its log-sum-exp, dO with its row sums."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync
    do: pipeline.PipelineTmaAsync


class SharedTiles(NamedTuple):
    """Tiles in shared memory."""

    k: cute.Tensor
    """(keys, D)"""
    v: cute.Tensor
    """(keys, Dv)"""
    q: cute.Tensor
    """(queries, D, stages)"""
    do: cute.Tensor
    """(queries, Dv, stages)"""
    ds: cute.Tensor
    """(queries, keys, stages), contiguous along the queries"""
    lse: cute.Tensor
    """float32 (queries, stages): log-sum-exp in base 2, +inf for rows without a key and after the last"""
    row_sums: cute.Tensor
    """float32 (queries, stages): sum of dO * O along each row, less the gradient of its log-sum-exp"""
    staging: cute.Tensor
    """(64 keys, columns of a subtile, buffers, consumers): dK and dV on their way out, where K was"""


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
    load_k = tile_loader(loads.k, tiles.k, (spec.tile_k, spec.dim), k_start, (at.kv_head, batch))
    load_v = tile_loader(loads.v, tiles.v, (spec.tile_k, spec.dim_v), k_start, (at.kv_head, batch))
    for ring, load in ((rings.k, load_k), (rings.v, load_v)):
        ring.producer_acquire(once)
        load(at.n, once.index, ring.producer_get_barrier(once))
        ring.producer_commit(once)
    state = producer_state(spec.stages)
    for member in cutlass.range(work.heads_per_kv, unroll=1):
        head = at.kv_head * work.heads_per_kv + member
        load_q = tile_loader(loads.q, tiles.q, (spec.tile_q, spec.dim), q_start, (head, batch))
        load_do = tile_loader(loads.do, tiles.do, (spec.tile_q, spec.dim_v), q_start, (head, batch))
        for block in cutlass.range(walk.first, walk.end, unroll=1):
            number = work.rows.number(spec.tile_q, spec.varlen, seq, at.batch, head, block)
            row = number * spec.tile_q
            rings.q.producer_acquire(state)
            full = rings.q.producer_get_barrier(state)
            load_q(block, state.index, full)
            load_rows(spec, work.sums.lse, row, tiles.lse[None, state.index], full)
            rings.q.producer_commit(state)
            rings.do.producer_acquire(state)
            full = rings.do.producer_get_barrier(state)
            load_do(block, state.index, full)
            load_rows(spec, work.sums.row_sums, row, tiles.row_sums[None, state.index], full)
            rings.do.producer_commit(state)
            state.advance()


@cute.jit
def load_rows(
    spec: cutlass.Constexpr, source: cute.Tensor, row: Int32, target: cute.Tensor, full: cute.Pointer
):
    """Copies float32 numbers of `tile_q` rows from `row` on, in bulk."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=spec.stats_bytes * 8)
    start = (source.iterator + cute.assume(row, divby=spec.tile_q)).align(16)
    with cute.arch.elect_one():
        cute.copy(atom, cute.make_tensor(start, cute.make_layout(spec.tile_q)), target, mbar_ptr=full)


def tile_loader(
    load: tma.TmaCopy, tiles: cute.Tensor, tile: tuple[int, int], start: Int32, image: tuple[Int32, Int32]
):
    """`load(tile number, stage, barrier)` of rows from `start` on of one (head, batch)."""
    rows = cute.domain_offset((start, 0), load.coordinates[None, None, image[0], image[1]])
    g_tiles = cute.local_tile(rows, tile, (None, 0))  # (rows, D, tiles)
    part = tma.load_partition(load.atom, g_tiles, tiles, cute.make_layout(1), Int32(0))
    return tma.tile_loader(load.atom, part.tiles, part.shared, None)
