"""Device side of the SM90 sampled product: the kernel that hands out roles, and one function a role."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, NamedBarrier, give_turn, wait_turn
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.pipeline import consumer_state, producer_state, skip
from kernels_dsl.blocks.mainloop.operand_ring import main_loop, pass_turn, start, warpgroup_share


class Chunks(NamedTuple):
    """The pattern, int32 vectors: rows and first entries of chunks, columns, first entries of rows.

    `k`: extent of the contraction. `units_n`: units along N, the number that reads zeros. `kept`: None, or
    (entries, block rows of a tile), the blocks that an entry stands for.
    """

    rows: cute.Tensor
    entries: cute.Tensor
    columns: cute.Tensor
    first: cute.Tensor
    k: Int32
    units_n: Int32
    kept: cute.Tensor | None


class Item(NamedTuple):
    """A work item: tile of A, tile of the block along its rows and columns, batch, entries, K tiles."""

    tile_m: Int32
    sub_m: Int32
    sub_n: Int32
    batch: Int32
    entry: Int32
    count: Int32
    k_tiles: Int32


@cute.jit
def item_of(spec: cutlass.Constexpr, chunks: Chunks, work: Int32, size: Int32) -> Item:
    """Work item number `work`; past the end, the last one again, so that it may be fetched ahead.

    An empty chunk has one K tile, of which nothing is stored.
    """
    work = cutlass.min(work, size - 1)
    rest, sub = work // (spec.subs[0] * spec.subs[1]), work % (spec.subs[0] * spec.subs[1])
    number = cute.size(chunks.rows)
    batch = rest // number
    chunk = rest - batch * number
    sub_n, sub_m = sub // spec.subs[0], sub % spec.subs[0]
    row, entry = chunks.rows[chunk], chunks.entries[chunk]
    left = chunks.first[row + 1] - entry
    k_tiles = cute.ceil_div(chunks.k, spec.tile_k)
    if left <= 0:
        k_tiles = Int32(1)
    if cutlass.const_expr(spec.peers > 1):
        before = cute.arch.block_idx()[0] * spec.units
        entry += before
        left -= before
    count = cutlass.min(left, Int32(spec.units))
    return Item(row * spec.subs[0] + sub_m, sub_m, sub_n, batch, entry, count, k_tiles)


@cute.jit
def unit_of_lane(spec: cutlass.Constexpr, chunks: Chunks, item: Item) -> Int32:
    """Number along N of the unit that this lane's entry of the chunk names; behind its end, that of zeros."""
    lane = cute.arch.lane_idx()
    unit = chunks.units_n
    if lane < item.count:
        unit = chunks.columns[item.entry + lane] * spec.subs[1] + item.sub_n
    return unit


@entry_name("bsr_sddmm_sm90")
@cute.kernel
def sddmm_kernel(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    mmas: tuple,  # (main loop's, epilogue's) TiledMma
    smem_layouts: tuple,  # of A, B, B by units, the epilogue's staging, and that by blocks
    loads: tuple,  # (atom A, coordinates of A (M, K, L), atom B, coordinates of B (N, K, L))
    output: tuple,  # (atom of the values, their coordinates (rows, columns, blocks, L), scalars)
    chunks: Chunks,
    size: Int32,
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    a_layout, b_layout, unit_layout, d_layout, part_layout = smem_layouts
    dtypes = (spec.dtype, spec.dtype, spec.epilogue.dtype)
    atoms = (loads[0], loads[2], output[0])
    ring, (sA, sB, sD), warp = start(spec, atoms, dtypes, (a_layout, b_layout, d_layout), (1, spec.peers))
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(40)
        if warp == spec.consumers * 4:
            produce(spec, ring, loads, (sA, cute.make_tensor(sB.iterator, unit_layout.outer)), chunks, size)
    else:
        cute.arch.setmaxregister_increase(232)
        parts = cute.make_tensor(sD[None, None, None, group].iterator, part_layout.outer)
        consume(spec, epilogue, ring, mmas, (sA, sB, sD, parts), output, (chunks, size), group)


@cute.jit
def produce(
    spec: cutlass.Constexpr,
    ring: pipeline.PipelineTmaAsync,
    loads: tuple,
    s_tiles: tuple,  # A (tile_m, tile_k, stages), B (unit_n, tile_k, stages * units)
    chunks: Chunks,
    size: Int32,
):
    """Producer warp: for each work item, the rows of A and the columns of B that its entries name."""
    a_atom, tma_a, b_atom, tma_b = loads
    gA = cute.local_tile(tma_a, (spec.tile_m, spec.tile_k), (None, None, None))
    gB = cute.local_tile(tma_b, (spec.unit_n, spec.tile_k), (None, None, None))
    peer, work, _ = cute.arch.block_idx()
    tAsA, tAgA = tma.load_partition(
        a_atom, gA, s_tiles[0], cute.make_layout(spec.peers), peer if spec.peers > 1 else 0
    )
    a_mask, _ = tma.multicast_masks((1, spec.peers), (Int32(0), peer))
    tBsB, tBgB = tma.load_partition(b_atom, gB, s_tiles[1], cute.make_layout(1), 0)
    ctas = cute.arch.grid_dim()[1]
    state = producer_state(spec.stages)
    item = item_of(spec, chunks, work, size)
    unit = unit_of_lane(spec, chunks, item)
    while work < size:
        # A chain of loads leads to the next item's columns; it starts now.
        work += ctas
        following = item_of(spec, chunks, work, size)
        next_unit = unit_of_lane(spec, chunks, following)
        load_a = tma.tile_loader(a_atom, tAgA[None, item.tile_m, None, item.batch], tAsA, a_mask)
        load_b = [
            tma.tile_loader(b_atom, tBgB[None, cute.arch.shuffle_sync(unit, u), None, item.batch], tBsB, None)
            for u in range(spec.units)
        ]
        for k in cutlass.range(item.k_tiles, unroll=1):
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            load_a(k, state.index, full)
            for u in cutlass.range_constexpr(spec.units):
                load_b[u](k, state.index * spec.units + u, full)
            ring.producer_commit(state)
            state.advance()
        item, unit = following, next_unit
    ring.producer_tail(state)


@cute.jit
def blocks_of_lane(spec: cutlass.Constexpr, chunks: Chunks, item: Item, absent: Int32) -> tuple:
    """Which block each (unit, block row) of the tile is, 32 of them to a number; `absent` for none."""
    together = spec.rows_together
    lane = cute.arch.lane_idx()
    kept = cute.make_rmem_tensor(-(-spec.units * together // 32), Int32)
    for i in cutlass.range_constexpr(cute.size(kept)):
        unit = (i * 32 + lane) // together
        kept[i] = absent
        if unit < item.count:
            kept[i] = chunks.kept[item.entry + unit, (i * 32 + lane) % together]
    return tuple(kept[i] for i in range(cute.size(kept)))


def rows_writer(spec, atom: cute.CopyAtom, mV: cute.Tensor, parts: cute.Tensor, item: Item, chunks: Chunks):
    """`write(stage, (m, n, _))` by a TMA store for each block row of the tile that keeps the column at n.

    parts (rows of a block, epi_n, stages * block rows): the staging buffers.
    """
    together = spec.rows_together
    kept = blocks_of_lane(spec, chunks, item, mV.shape[2])
    tiler = (cute.size(parts, mode=[0]), spec.epilogue.epi_n)

    @cute.jit
    def write(stage: int, at: tuple):
        corner = cute.domain_offset((0, at[1] % spec.unit_n, 0, 0), mV)
        for r in cutlass.range_constexpr(together):
            place = at[1] // spec.unit_n * together + r
            block = cute.arch.shuffle_sync(kept[0], place % 32)
            for i in cutlass.range_constexpr(1, len(kept)):
                other = cute.arch.shuffle_sync(kept[i], place % 32)
                if place // 32 == i:
                    block = other
            if block < mV.shape[2]:
                gD = cute.local_tile(corner, tiler, (0, 0, block, item.batch))
                tDsD, tDgD = cpasync.tma_partition(
                    atom, 0, cute.make_layout(1), cute.group_modes(parts, 0, 2), cute.group_modes(gD, 0, 2)
                )
                cute.copy(atom, tDsD[None, stage * together + r], tDgD)

    return write


def block_writer(spec, atom: cute.CopyAtom, mV: cute.Tensor, sD: cute.Tensor, item: Item):
    """`write(stage, (m, n, _))` by one TMA store: n counts along the chunk's units, whose blocks take it."""

    @cute.jit
    def write(stage: int, at: tuple):
        unit = at[1] // spec.unit_n
        column = item.sub_n * spec.unit_n + at[1] - unit * spec.unit_n
        if unit < item.count:
            corner = cute.domain_offset((at[0], column, 0, 0), mV)
            gD = cute.local_tile(corner, spec.epilogue.subtile, (0, 0, item.entry + unit, item.batch))
            tDsD, tDgD = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
            )
            cute.copy(atom, tDsD[None, stage], tDgD)

    return write


@cute.jit
def consume(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    ring: pipeline.PipelineTmaAsync,
    mmas: tuple,
    s_tiles: tuple,
    output: tuple,
    schedule: tuple,  # (chunks, work items)
    group: Int32,
):
    """Consumer warpgroup number `group`: main loop and epilogue of its share of the items."""
    chunks, size = schedule
    sA, sB, sD, parts = s_tiles[0], s_tiles[1], s_tiles[2][None, None, None, group], s_tiles[3]
    atom_d, mV, operands = output
    ctas = cute.arch.grid_dim()[1]
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    row, fragments = warpgroup_share(spec, mmas[0], (sA, sB), thread, group)

    state = consumer_state(spec.stages)
    work, stride = cute.arch.block_idx()[1], ctas
    if cutlass.const_expr(spec.pingpong):
        stride = ctas * 2
        if group == 1:
            give_turn(NamedBarrier.MMA_ORDER, Int32(0))
            state = skip(state, item_of(spec, chunks, work, size).k_tiles)
            work += ctas
    while work < size:
        item = item_of(spec, chunks, work, size)
        others = item.k_tiles
        if cutlass.const_expr(spec.pingpong):
            others = item_of(spec, chunks, work + ctas, size).k_tiles
            wait_turn(NamedBarrier.MMA_ORDER, group)
        state = main_loop(
            ring, state, mmas[0], fragments, item.k_tiles,
            pieces=(None,), units=1, next_turn=pass_turn(group) if spec.pingpong else None,
        )  # fmt: skip
        write = (
            block_writer(spec, atom_d, mV, sD, item)
            if spec.rows_together == 1
            else rows_writer(spec, atom_d, mV, parts, item, chunks)
        )
        epi.store_tile(
            spec.epilogue, fragments[0], epilogue, operands,
            origin=(item.sub_m * spec.tile_m + row, Int32(0), item.batch), extent=(0, 0, 0), sD=sD,
            tiled_mma_epi=mmas[1], write=write, thread=thread, warpgroup=group,
        )  # fmt: skip
        if cutlass.const_expr(spec.pingpong):
            state = skip(state, others)
        work += stride
    epi.drain(spec.epilogue, thread)
