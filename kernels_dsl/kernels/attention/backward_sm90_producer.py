"""Producer role of the SM90 attention backward: K and V once, then Q and dO of each query block."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from kernels_dsl.blocks.hw import tma

from .backward_sm90_spec import BackwardSpec
from .backward_sm90_visits import Site, Visit, first_visit, for_each_block, rank_of, site_of
from .backward_work import BackwardWork, KeyJob


class Loads(NamedTuple):
    """TMA loads of the four operands, (rows, D, heads, B)."""

    q: tma.TmaCopy
    k: tma.TmaCopy
    v: tma.TmaCopy
    do: tma.TmaCopy


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
    """Pipelines of the four operands. By tiles of keys K and V have one stage each, Q comes with its
    log-sum-exp and dO with its row sums; by tiles of queries Q and dO have one stage each."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync
    do: pipeline.PipelineTmaAsync


class Supply(NamedTuple):
    """Loads of the producer warp, and their targets."""

    rings: Rings
    loads: Loads
    tiles: SharedTiles
    batch: Int32
    """Number of the sequence among the images that TMA sees: 0 where sequences are packed."""
    q_start: Int32
    """First row of the sequence's queries in its image."""


class States(NamedTuple):
    """Positions of the producer: in the rings of Q and dO, in those of K and of V."""

    rows: pipeline.PipelineState
    k: pipeline.PipelineState
    v: pipeline.PipelineState


@cute.jit
def produce(
    spec: cutlass.Constexpr,
    rings: Rings,
    loads: Loads,
    tiles: SharedTiles,
    work: BackwardWork,
    states: States,
    job: KeyJob,
) -> States:
    """Producer warp: the operands of one tile of keys, in the order of their use. Returns the states for the
    next one."""
    at, seq, walk = job.at, job.seq, job.walk
    rows, k, v = states
    batch = at.batch
    q_start, k_start = Int32(0), Int32(0)
    if cutlass.const_expr(spec.varlen):
        batch, q_start, k_start = Int32(0), seq.q_start, seq.k_start
    site = site_of(spec, work, job, Int32(0), 0)
    supply = Supply(rings, loads, tiles, batch, q_start)
    image = (at.kv_head, batch)
    load_k = tile_loader(loads.k, tiles.k, (spec.cta_keys, spec.dim), k_start, image)
    load_v = tile_loader(loads.v, tiles.v, (spec.cta_keys, spec.dim_v), k_start, image)
    number = at.n * spec.ctas + rank_of(spec)
    if walk.count > 0:
        # The first product is of K and Q.
        first = first_visit(spec, site)
        load_keys(rings.k, k, load_k, number, spec.ctas)
        load_queries(spec, supply, site, rows, first)
        load_keys(rings.v, v, load_v, number, 1)
        load_gradients(spec, supply, site, rows, first)
        rows.advance()
        rows = for_each_block(spec, site, rows, partial(load_block, spec, supply, site), skipped=1)
        k.advance()
        v.advance()
    elif cutlass.const_expr(spec.roles):
        load_keys(rings.k, k, load_k, number, spec.ctas)
        load_keys(rings.v, v, load_v, number, 1)
    return States(rows, k, v)


def load_keys(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    load: Callable[..., None],
    number: Int32,
    parts: int,
) -> None:
    """Starts the loads of K or V, of which other CTAs have tiles besides `number`."""
    ring.producer_acquire(state)
    for i in range(parts):
        load(number ^ i, state.index + i, ring.producer_get_barrier(state))
    ring.producer_commit(state)


@cute.jit
def load_block(
    spec: cutlass.Constexpr, supply: Supply, site: Site, state: pipeline.PipelineState, visit: Visit
) -> pipeline.PipelineState:
    """Starts the loads of a query block, to the stage of `state`."""
    load_queries(spec, supply, site, state, visit)
    load_gradients(spec, supply, site, state, visit)
    state.advance()
    return state


def load_queries(
    spec: BackwardSpec, supply: Supply, site: Site, state: pipeline.PipelineState, visit: Visit
) -> None:
    """Starts the loads of Q of a block, and of its log-sum-exp."""
    rings, loads, tiles = supply.rings, supply.loads, supply.tiles
    numbers = site.work.sums.lse, tiles.lse
    load_operand(spec, supply, state, visit, Operand(rings.q, loads.q, tiles.q, spec.dim, *numbers))


def load_gradients(
    spec: BackwardSpec, supply: Supply, site: Site, state: pipeline.PipelineState, visit: Visit
) -> None:
    """Starts the loads of dO of a block, and of its row sums."""
    rings, loads, tiles = supply.rings, supply.loads, supply.tiles
    numbers = site.work.sums.row_sums, tiles.row_sums
    load_operand(spec, supply, state, visit, Operand(rings.do, loads.do, tiles.do, spec.dim_v, *numbers))


class Operand(NamedTuple):
    """Q or dO: ring, loads and tiles of so many columns, and numbers of its rows with their place."""

    ring: pipeline.PipelineTmaAsync
    load: tma.TmaCopy
    tiles: cute.Tensor
    columns: int
    numbers: cute.Tensor
    place: cute.Tensor


def load_operand(
    spec: BackwardSpec, supply: Supply, state: pipeline.PipelineState, visit: Visit, operand: Operand
) -> None:
    """Starts the loads of an operand's rows of a block, and of their numbers."""
    ring, image = operand.ring, (visit.query.head, supply.batch)
    ring.producer_acquire(state)
    full = ring.producer_get_barrier(state)
    shape = (spec.tile_q, operand.columns)
    load = tile_loader(operand.load, operand.tiles, shape, supply.q_start, image, spec.ctas)
    load(visit.query.block, state.index, full)
    load_rows(operand.numbers, visit.number * spec.tile_q, operand.place[None, state.index], full)
    ring.producer_commit(state)


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
