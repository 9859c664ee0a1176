"""Device side of the SM90 block-sparse GEMM: the kernel that hands out roles, and one function a role."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from kernels_dsl.blocks import epilogue as epi
from kernels_dsl.blocks import tma
from kernels_dsl.blocks.barriers import WARPGROUP_THREADS, NamedBarrier, give_turn, wait_turn
from kernels_dsl.blocks.block_lists import (
    LANES,
    ListGrid,
    entries_of_lane,
    group_count,
    list_item,
    work_number,
)
from kernels_dsl.blocks.entry_name import entry_name
from kernels_dsl.blocks.operand_ring import main_loop, pass_turn, start, warpgroup_share
from kernels_dsl.blocks.pipeline import consumer_state, producer_state, skip


@entry_name("bsr_sm90")
@cute.kernel
def bsr_kernel(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    mmas: tuple,  # (main loop's, epilogue's) TiledMma
    smem_layouts: tuple,  # of A, B and the epilogue's staging
    loads: tuple,  # (atom A, coordinates of A, atom B, coordinates of B), each (MN, block_k, blocks, L)
    output: tuple,  # (atom D or None, D or its coordinates (M, N, L), epilogue operands)
    pattern: tuple,  # (BlockLists, (kept blocks, dense blocks), extent of D)
    grid: ListGrid,
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    dtypes = (spec.dtype, spec.dtype, spec.epilogue.dtype)
    atoms = (loads[0], loads[2], output[0])
    ring, (sA, sB, sD), warp = start(spec, atoms, dtypes, smem_layouts, spec.cluster)
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers[0])
        if warp == spec.consumers * 4:
            produce(spec, ring, loads, (sA, sB), pattern, grid)
    else:
        cute.arch.setmaxregister_increase(spec.registers[1])
        consume(spec, epilogue, ring, mmas, (sA, sB, sD), output, (pattern, grid), group)


@cute.jit
def tile_numbers(spec: cutlass.Constexpr, tile: Int32, panel: Int32) -> tuple[Int32, Int32]:
    """(M, N) number of this CTA's tile in D, of cluster tile (`tile`, `panel`)."""
    rank_m, rank_n, _ = cute.arch.block_idx()
    m, n = tile, panel
    if cutlass.const_expr(not spec.sparse_on_m):
        m, n = panel, tile
    return m * spec.cluster[0] + rank_m, n * spec.cluster[1] + rank_n


@cute.jit
def produce(
    spec: cutlass.Constexpr,
    ring: pipeline.PipelineTmaAsync,
    loads: tuple,
    s_tiles: tuple,
    pattern: tuple,
    grid: ListGrid,
):
    """Producer warp: for each work item of this cluster, follows its list and loads what it names."""
    a_atom, tma_a, b_atom, tma_b = loads
    lists, ends, _ = pattern
    rank_m, rank_n, cluster = cute.arch.block_idx()
    gA = cute.local_tile(tma_a, (spec.tile_m, spec.unit_k), (None, None, None, None))
    gB = cute.local_tile(tma_b, (spec.tile_n, spec.unit_k), (None, None, None, None))
    # (bMN, bK, restMN, pieces, blocks, L)
    tAsA, tAgA = tma.load_partition(a_atom, gA, s_tiles[0], cute.make_layout(spec.cluster[1]), rank_n)
    tBsB, tBgB = tma.load_partition(b_atom, gB, s_tiles[1], cute.make_layout(spec.cluster[0]), rank_m)
    a_mask, b_mask = tma.multicast_masks(spec.cluster, (rank_m, rank_n))

    clusters = cute.arch.grid_dim()[2]
    sub_tiles = spec.sub_clusters
    state = producer_state(spec.stages)
    turn = Int32(0)
    work = work_number(turn, cluster, clusters)
    item = list_item(work, grid, lists, sub_tiles)
    dense, kept = entries_of_lane(lists, item.begin, item.end, ends)
    while work < grid.size:
        # A chain of loads leads to the next item's first entries; it starts now.
        turn += 1
        work = work_number(turn, cluster, clusters)
        following = list_item(work, grid, lists, sub_tiles)
        m, n = tile_numbers(spec, item.tile, item.panel)
        s_tile = (m if spec.sparse_on_m else n) % (sub_tiles * spec.cluster[0 if spec.sparse_on_m else 1])
        if cutlass.const_expr(spec.sparse_on_m):
            m = s_tile
        else:
            n = s_tile
        load_a = tma.tile_loader(
            a_atom, cute.group_modes(tAgA[None, m, None, None, item.batch], 1, 3), tAsA, a_mask
        )
        load_b = tma.tile_loader(
            b_atom, cute.group_modes(tBgB[None, n, None, None, item.batch], 1, 3), tBsB, b_mask
        )
        groups = group_count(item, spec.units)
        at = item.begin
        while groups > 0:
            next_dense, next_kept = entries_of_lane(lists, at + LANES, item.end, ends)
            here = cutlass.min(groups, Int32(LANES // spec.units))
            for g in cutlass.range(here, unroll=1):
                for piece in cutlass.range_constexpr(len(spec.pieces)):
                    ring.producer_acquire(state)
                    full = ring.producer_get_barrier(state)
                    for unit in cutlass.range_constexpr(spec.units):
                        lane = g * spec.units + unit
                        of_dense = (piece, cute.arch.shuffle_sync(dense, lane))
                        of_kept = (piece, cute.arch.shuffle_sync(kept, lane))
                        slot = state.index * spec.units + unit
                        if cutlass.const_expr(spec.sparse_on_m):
                            load_a(of_kept, slot, full)
                            load_b(of_dense, slot, full)
                        else:
                            load_a(of_dense, slot, full)
                            load_b(of_kept, slot, full)
                    ring.producer_commit(state)
                    state.advance()
            groups -= here
            at += LANES
            dense, kept = next_dense, next_kept
        item = following
        dense, kept = entries_of_lane(lists, item.begin, item.end, ends)
    # Peers may still write into this CTA's shared memory, or signal its barriers: stay until they are done.
    ring.producer_tail(state)


@cute.jit
def consume(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    ring: pipeline.PipelineTmaAsync,
    mmas: tuple,
    s_tiles: tuple,
    output: tuple,
    schedule: tuple,  # (pattern, grid)
    group: Int32,
):
    """Consumer warpgroup number `group`: main loop and epilogue of its share of the items."""
    (lists, _, extent), grid = schedule
    sA, sB, sD = s_tiles[0], s_tiles[1], s_tiles[2][None, None, None, group]
    cluster = cute.arch.block_idx()[2]
    clusters = cute.arch.grid_dim()[2]
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    row, fragments = warpgroup_share(spec, mmas[0], (sA, sB), thread, group)

    atom_d, mD, operands = output
    if cutlass.const_expr(spec.epilogue.use_tma):
        write = epi.tma_writer(atom_d, mD, sD, spec.epilogue.subtile)
    else:
        write = epi.plain_writer(mD, sD, extent, thread)

    state = consumer_state(spec.stages)
    sub_tiles = spec.sub_clusters
    turn, stride = Int32(0), 1
    if cutlass.const_expr(spec.pingpong):
        stride = 2
        if group == 1:
            give_turn(NamedBarrier.MMA_ORDER, Int32(0))
            others = list_item(work_number(turn, cluster, clusters), grid, lists, sub_tiles)
            state = skip(state, group_count(others, spec.units) * len(spec.pieces))
            turn += 1
    work = work_number(turn, cluster, clusters)
    item = list_item(work, grid, lists, sub_tiles)
    while work < grid.size:
        others = item
        if cutlass.const_expr(spec.pingpong):
            others = list_item(work_number(turn + 1, cluster, clusters), grid, lists, sub_tiles)
        turn += stride
        work = work_number(turn, cluster, clusters)
        following = list_item(work, grid, lists, sub_tiles)
        if cutlass.const_expr(spec.pingpong):
            wait_turn(NamedBarrier.MMA_ORDER, group)
        state = main_loop(
            ring, state, mmas[0], fragments, group_count(item, spec.units),
            pieces=spec.pieces, units=spec.units, next_turn=pass_turn(group) if spec.pingpong else None,
        )  # fmt: skip
        m, n = tile_numbers(spec, item.tile, item.panel)
        epi.store_tile(
            spec.epilogue, fragments[0], epilogue, operands,
            origin=(m * spec.tile_m + row, n * spec.tile_n, item.batch), extent=extent, sD=sD,
            tiled_mma_epi=mmas[1], write=write, thread=thread, warpgroup=group,
        )  # fmt: skip
        if cutlass.const_expr(spec.pingpong):
            state = skip(state, group_count(others, spec.units) * len(spec.pieces))
        item = following
    epi.drain(spec.epilogue, thread)
