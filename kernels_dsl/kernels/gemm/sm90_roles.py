"""Device side of the SM90 GEMM: the kernel that hands out roles, and one function a role."""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline

from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, NamedBarrier, give_turn, wait_turn
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.pipeline import consumer_state, producer_state, skip
from kernels_dsl.blocks.mainloop.operand_ring import (
    held_address,
    main_loop,
    pass_turn,
    start,
    warpgroup_share,
)
from kernels_dsl.blocks.mainloop.promoted_ring import (
    begin_ahead,
    by_rows,
    chunk_factors,
    end_ahead,
    overlapped_set,
    promoted_loop,
)
from kernels_dsl.blocks.mainloop.scale_ring import copy_stages, staged_scales
from kernels_dsl.blocks.reduce import shared_tiles
from kernels_dsl.blocks.schedule.groups import (
    Cursor,
    Group,
    GroupedGrid,
    decode_group_tile,
    first_cursor,
    from_row,
    rows_of,
    tile_count,
)
from kernels_dsl.blocks.schedule.scheduler import (
    TileCoord,
    TileGrid,
    decode_tile,
    first_work,
    k_range,
    next_work,
    piece_of,
    split_range,
)


@entry_name("gemm_sm90")
@cute.kernel
def gemm_kernel(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    mmas: tuple,  # (main loop's, epilogue's) TiledMma
    smem_layouts: tuple,  # of A, B and the epilogue's staging
    loads: tuple,  # (atom A, coordinates of A (M, K, L), atom B, coordinates of B (N, K, L))
    output: tuple,  # (atom D or None, D or its coordinates (M, N, L), epilogue operands; with groups: D)
    scales: tuple | None,  # of A and B, for promoted sums
    schedule: tuple,  # (tiles, (M, N, K))
    memory: tuple | None,  # of `shared_tiles`, where tiles are shared
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    dtypes = (*spec.mma_dtypes, spec.epilogue.dtype)
    atoms = (loads[0], loads[2], output[0])
    extra = staged_scales(spec.scales, spec.stages)
    if cutlass.const_expr(spec.stream_k):
        extra = shared_tiles.with_flags(extra, spec.consumers)
    ring, (sA, sB, sD), warp, *sS = start(spec, atoms, dtypes, smem_layouts, spec.cluster, extra)
    pieces = None
    if cutlass.const_expr(spec.stream_k):
        pieces, sS = (memory, sS[0][-1]), [sS[0][:-1]]
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers[0])
        if warp == spec.consumers * 4:
            produce(spec, ring, loads, (sA, sB), *schedule)
        if cutlass.const_expr(spec.scales is not None):
            if warp == spec.consumers * 4 + 1:
                produce_scales(spec, ring, scales, sS[0], *schedule)
    else:
        cute.arch.setmaxregister_increase(spec.registers[1])
        kept_b = sB
        if cutlass.const_expr(spec.promotion is not None):
            kept_b = held_address(sB, smem_layouts[1].inner)
        consume((spec, epilogue), ring, mmas, (sA, kept_b, sD, *sS), output, (*schedule, pieces), group)


@cute.jit
def produce(
    spec: cutlass.Constexpr,
    ring: pipeline.PipelineTmaAsync,
    loads: tuple,
    s_tiles: tuple,
    grid: TileGrid | GroupedGrid,
    problem: tuple,
):
    """Producer warp: for each work tile of this cluster, loads its K tiles into the ring."""
    a_atom, tma_a, b_atom, tma_b = loads
    rank_m, rank_n, cluster = cute.arch.block_idx()
    gA = cute.local_tile(tma_a, (spec.tile_m, spec.tile_k), (None, None, None))  # (bM, bK, restM, restK, L)
    gB = cute.local_tile(tma_b, (spec.tile_n, spec.tile_k), (None, None, None))  # (bN, bK, restN, restK, L)
    # CTAs of one cluster row share A's tile, those of one column B's: each loads a slice for all.
    tAsA, tAgA = tma.load_partition(a_atom, gA, s_tiles[0], cute.make_layout(spec.cluster[1]), rank_n)
    tBsB, tBgB = tma.load_partition(b_atom, gB, s_tiles[1], cute.make_layout(spec.cluster[0]), rank_m)
    a_mask, b_mask = tma.multicast_masks(spec.cluster, (rank_m, rank_n))

    k_tiles = cute.ceil_div(problem[2], spec.tile_k)
    clusters = cute.arch.grid_dim()[2]
    state = producer_state(spec.stages)
    work, size, cursor = first_work(grid, cluster, k_tiles), work_items(spec, grid), first_cursor()
    while work < size:
        at, group = work_tile(spec, grid, work, cursor)
        cursor = cursor if group is None else group.cursor
        m, n = at.m * spec.cluster[0] + rank_m, at.n * spec.cluster[1] + rank_n
        rows = tAgA
        if cutlass.const_expr(group is not None):
            tiles = cute.local_tile(from_row(tma_a, group), (spec.tile_m, spec.tile_k), (None, None, None))
            peers = cute.make_layout(spec.cluster[1])
            rows = tma.load_partition(a_atom, tiles, s_tiles[0], peers, rank_n)[1]
        load_a = tma.tile_loader(a_atom, rows[None, m, None, at.batch], tAsA, a_mask)
        load_b = tma.tile_loader(b_atom, tBgB[None, n, None, at.batch], tBsB, b_mask)
        first, end = k_part(spec, grid, (work, at.split), cluster, k_tiles)
        for k in cutlass.range(first, end, unroll=1):
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            load_a(k, state.index, full)
            load_b(k, state.index, full)
            ring.producer_commit(state)
            state.advance()
        work = next_work(grid, work, cluster, clusters, k_tiles)
    # Peers may still write into this CTA's shared memory, or signal its barriers: stay until they are done.
    ring.producer_tail(state)


@cute.jit
def produce_scales(
    spec: cutlass.Constexpr,
    ring: pipeline.PipelineTmaAsync,
    scales: tuple,
    places: tuple,  # of `staged_scales`
    grid: TileGrid | GroupedGrid,
    problem: tuple,
):
    """Copying warp: for each work tile, the scales of its K tiles, into the stages that `produce` fills."""
    rank_m, rank_n, cluster = cute.arch.block_idx()
    k_tiles = cute.ceil_div(problem[2], spec.tile_k)
    state = producer_state(spec.stages)
    work, size, cursor = first_work(grid, cluster, k_tiles), work_items(spec, grid), first_cursor()
    while work < size:
        at, rows = work_tile(spec, grid, work, cursor)
        cursor = cursor if rows is None else rows.cursor
        m = (at.m * spec.cluster[0] + rank_m) * spec.tile_m
        n = (at.n * spec.cluster[1] + rank_n) * spec.tile_n
        of_a = scales[0] if rows is None else rows_of(scales[0], rows)
        of_batch = of_a[None, None, at.batch], scales[1][None, None, at.batch]
        first, end = k_part(spec, grid, (work, at.split), cluster, k_tiles)
        state = copy_stages(ring, state, spec.scales, places, of_batch, (m, n), (first, end))
        work = next_work(grid, work, cluster, cute.arch.grid_dim()[2], k_tiles)


@cute.jit
def consume(
    how: cutlass.Constexpr,  # (spec, epilogue)
    ring: pipeline.PipelineTmaAsync,
    mmas: tuple,
    s_tiles: tuple,
    output: tuple,
    schedule: tuple,  # (grid, problem, memory and flags of `shared_tiles` or None)
    group: Int32,
):
    """Consumer warpgroup number `group`: main loop and epilogue of its share of the tiles."""
    spec, epilogue = how
    grid, problem, pieces = schedule
    sA, sB, sD = s_tiles[0], s_tiles[1], s_tiles[2][None, None, None, group]
    rank_m, rank_n, cluster = cute.arch.block_idx()
    clusters = cute.arch.grid_dim()[2]
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    row, fragments = warpgroup_share(spec, mmas[0], (sA, sB), thread, group)

    k_tiles = cute.ceil_div(problem[2], spec.tile_k)
    state = consumer_state(spec.stages)
    work, stride = first_work(grid, cluster, k_tiles), clusters
    if cutlass.const_expr(spec.pingpong):
        stride = clusters * 2
        if group == 1:
            give_turn(NamedBarrier.MMA_ORDER, Int32(0))
            state = skip(state, k_tile_count(spec, grid, k_tiles, work))
            work += clusters
    size, cursor = work_items(spec, grid), first_cursor()
    if cutlass.const_expr(spec.promotion is not None):
        factors = chunk_factors(spec.scales, s_tiles[3:], mmas[0], row, thread, problem[2] >> 31)
        if cutlass.const_expr(spec.ahead):
            fragments[0].fill(0.0)
    done, ready = Int32(0), Boolean(False)  # K tiles of the next tile that are summed already
    while work < size:
        at, rows = work_tile(spec, grid, work, cursor)
        cursor = cursor if rows is None else rows.cursor
        first, end = k_part(spec, grid, (work, at.split), cluster, k_tiles)
        m = (at.m * spec.cluster[0] + rank_m) * spec.tile_m + row
        n = (at.n * spec.cluster[1] + rank_n) * spec.tile_n
        origin, where = (m, n, at.batch * spec.split_k + at.split), (grid, problem, rows)
        extent, operands = gathered(spec, output[2], where)
        operands = epi.operands_before(spec.epilogue, operands, origin, extent, mmas[1], thread)
        if cutlass.const_expr(spec.pingpong):
            wait_turn(NamedBarrier.MMA_ORDER, group)
        this, work = work, next_work(grid, work, cluster, stride, k_tiles)
        if cutlass.const_expr(spec.promotion is None):
            state = main_loop(
                ring, state, mmas[0], fragments, end - first, pieces=(None,), units=1,
                next_turn=pass_turn(group) if spec.pingpong else None,
            )  # fmt: skip
        else:
            if cutlass.const_expr(not spec.ahead):
                fragments[0].fill(0.0)
            state, ready = promoted_loop(
                ring, (state, ready), mmas[0], fragments, end - first - done, factors, spec.two_partial_sets
            )
            if cutlass.const_expr(spec.ahead):
                ahead = overlapped_set(mmas[0], factors)
                begin_ahead(ring, (state, ready), work < size, mmas[0], fragments, ahead, factors)
        write = writer(spec, output, sD, where, extent, thread)
        store = partial(
            epi.store_tile, spec.epilogue, by_rows(fragments[0]), epilogue, operands, origin=origin,
            extent=extent, sD=sD, tiled_mma_epi=mmas[1], write=write, thread=thread, warpgroup=group,
        )  # fmt: skip
        if cutlass.const_expr(spec.stream_k):
            whole = end - first == k_tiles
            if not whole:
                piece = piece_of(grid, this, cluster, k_tiles)
                place = place_in_cluster(spec, (rank_m, rank_n), group)
                whole = shared_tiles.settle(piece, fragments[0], pieces, place, (thread, group))
            if whole:
                store()
        else:
            store()
        if cutlass.const_expr(spec.ahead):
            state = end_ahead(ring, state, work < size, fragments[0], ahead, factors)
            done, ready = Int32(1), Boolean(False)
        if cutlass.const_expr(spec.pingpong):
            state = skip(state, k_tile_count(spec, grid, k_tiles, work - clusters))
    epi.drain(spec.epilogue, thread)


def k_part(
    spec, grid: TileGrid | GroupedGrid, work: tuple[Int32, Int32], cluster: Int32, k_tiles: Int32
) -> tuple[Int32, Int32]:
    """First and past-the-last K tile of `work`: (cluster tile, split of K)."""
    if spec.stream_k:
        return k_range(grid, work[0], cluster, k_tiles)
    return split_range(k_tiles, work[1], spec.split_k)


def place_in_cluster(spec, rank: tuple[Int32, Int32], group: Int32) -> tuple[Int32, int]:
    """(number of consumer warpgroup `group` of the CTA at `rank` in its cluster, how many those are)."""
    number = (rank[0] * spec.cluster[1] + rank[1]) * spec.consumers + group
    return number, spec.cluster[0] * spec.cluster[1] * spec.consumers


def work_items(spec, grid: TileGrid | GroupedGrid) -> Int32:
    """Cluster tiles in all. All lanes of a warp take part."""
    return grid.size if isinstance(grid, TileGrid) else tile_count(grid, spec.cluster_rows)


def work_tile(
    spec, grid: TileGrid | GroupedGrid, work: Int32, cursor: Cursor
) -> tuple[TileCoord, Group | None]:
    """Cluster tile number `work`, and the group of rows from whose start it counts, None for none.

    All lanes of a warp take part.
    """
    raster = spec.raster_group, spec.raster_along_m
    if isinstance(grid, TileGrid):
        return decode_tile(work, grid, *raster), None
    return decode_group_tile(work, grid, spec.cluster_rows, raster, cursor)


def gathered(spec, operands: tuple, where: tuple) -> tuple[tuple, tuple]:
    """(extent, operands) of a tile's epilogue; `where`: (grid, (M, N, K), group of rows or None)."""
    grid, problem, rows = where
    if rows is None:
        return (problem[0], problem[1], grid.batch * spec.split_k), operands
    extent = (rows.rows, problem[1], cute.size(grid.offsets))
    return extent, tuple(rows_of(operand, rows) for operand in operands)


def writer(spec, output: tuple, sD: cute.Tensor, where: tuple, extent: tuple, thread: Int32) -> Any:
    """How a tile's epilogue stores; `where` and `extent` as in `gathered`."""
    atom_d, mD = output[:2]
    rows = where[2]
    subtile = spec.epilogue.subtile
    if rows is None:
        if spec.epilogue.use_tma:
            return epi.tma_writer(atom_d, mD, sD, subtile)
        return epi.plain_writer(mD, sD, extent, thread)
    part = epi.plain_writer(rows_of(output[3], rows), sD, extent, thread)
    if not spec.epilogue.use_tma:
        return part
    return epi.ClippedWriter(epi.tma_writer(atom_d, from_row(mD, rows), sD, subtile), part, rows.rows)


@cute.jit
def k_tile_count(spec: cutlass.Constexpr, grid: TileGrid | GroupedGrid, k_tiles: Int32, work: Int32) -> Int32:
    """K tiles of work item `work`."""
    if cutlass.const_expr(spec.split_k == 1):
        return k_tiles
    at = decode_tile(work, grid, spec.raster_group, spec.raster_along_m)
    first, end = split_range(k_tiles, at.split, spec.split_k)
    return end - first
