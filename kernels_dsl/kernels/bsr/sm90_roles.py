"""Device side of the SM90 block-sparse GEMM: the kernel that hands out roles, and one function a role."""

from collections.abc import Callable
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, NamedBarrier, give_turn, wait_turn
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.pipeline import consumer_state, make_tma_ring, producer_state, skip
from kernels_dsl.blocks.mainloop.operand_ring import (
    main_loop,
    pass_turn,
    start,
    two_ring_loop,
    warpgroup_share,
)
from kernels_dsl.blocks.mainloop.promoted_blocks import promoted_blocks
from kernels_dsl.blocks.reduce import list_pieces
from kernels_dsl.blocks.schedule import item_queue
from kernels_dsl.blocks.schedule.block_lists import (
    LANES,
    ListGrid,
    ListItem,
    entries_of_lane,
    entries_of_pair,
    group_count,
    list_item,
    list_place,
    list_scales,
    of_pair,
    place_word,
)
from kernels_dsl.config.bsr import PIECE, SHARED

from .sm90_spec import PAIR

ASK, LOOK_UP, PASS_ON = 10, 6, 4
"""Groups before the end of a list at which the next item is taken, looked up and passed on."""


def queue_and_kept_ring(spec, words: cute.Pointer) -> tuple:
    """In shared memory at `words`: the queue of items, the kept blocks' own ring or None, the rest."""
    warps = spec.consumers * 4
    # Each CTA's second producer warp receives the items too.
    queue = item_queue.make_item_queue(words, warps + spec.two_rings, spec.cluster[0] * spec.cluster[1])
    words += item_queue.QUEUE_WORDS
    if not spec.two_rings:
        return queue, None, words
    ring = make_tma_ring(
        words, spec.kept_stages, spec.kept_bytes, warps, spec.cluster, alone=spec.pairs
    )  # fmt: skip
    return queue, ring, words + 2 * spec.kept_stages


@entry_name("bsr_sm90")
@cute.kernel
def bsr_kernel(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    mmas: tuple,  # (main loop's, epilogue's) TiledMma
    smem_layouts: tuple,  # of A, B and the epilogue's staging
    loads: tuple,  # (atom A, coordinates of A, atom B, coordinates of B), each (MN, block_k, blocks, L)
    output: tuple,  # (atom D or None, D or its coordinates (M, N, L), epilogue operands)
    pattern: tuple,  # (BlockLists, counters, workspace, (kept blocks, dense blocks), extent of D, scales)
    grid: ListGrid,
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    dtypes = (*spec.dtypes, spec.epilogue.dtype)
    atoms = (loads[0], loads[2], output[0])
    words = item_queue.QUEUE_WORDS + 2 * spec.kept_stages + (spec.consumers if spec.split else 0)
    extra = (words, partial(queue_and_kept_ring, spec))
    ring, (sA, sB, sD), warp, (queue, kept_ring, flags) = start(
        spec, atoms, dtypes, smem_layouts, spec.cluster, extra, alone=spec.two_rings and not spec.pairs
    )
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers[0])
        if warp == spec.consumers * 4:
            produce(spec, (ring, queue), loads, (sA, sB), pattern, grid)
        if cutlass.const_expr(spec.two_rings):
            if warp == spec.consumers * 4 + 1:
                produce_kept(spec, (kept_ring, queue), loads[:2], sA, (pattern[0], pattern[3], grid.panels))
    else:
        cute.arch.setmaxregister_increase(spec.registers[1])
        consume(
            spec, epilogue, (ring, queue, kept_ring), mmas, (sA, sB, sD), (*output, pattern[4]),
            (pattern[0], pattern[5], grid.panels, pattern[1:3], flags), group,
        )  # fmt: skip


@cute.jit
def tile_numbers(spec: cutlass.Constexpr, item: ListItem, panels: Int32) -> tuple[Int32, Int32, Int32]:
    """(M, N) number of this CTA's tile in D of a cluster's item, and the batch."""
    rank_m, rank_n, _ = cute.arch.block_idx()
    panel = item.panel & (PIECE - 1) if cutlass.const_expr(spec.split) else item.panel
    batch = panel // panels
    if cutlass.const_expr(spec.pairs):
        number, part = of_pair(item.tile, rank_m + rank_n)
        x = (panel - batch * panels) * PAIR + part
        m, n = (number, x) if spec.sparse_on_m else (x, number)
        return m, n, batch
    m, n = item.tile, panel - batch * panels
    if cutlass.const_expr(not spec.sparse_on_m):
        m, n = n, m
    return m * spec.cluster[0] + rank_m, n * spec.cluster[1] + rank_n, batch


def shared_parts(spec, load: tuple, s_tiles: tuple, rank: Int32):
    """What CTA `rank` of a pair loads for both, in shared and global memory; None without pairs."""
    if not spec.pairs:
        return None
    atom, coordinates = load
    tile = (spec.wg_n, spec.unit_k) if spec.sparse_on_m else (spec.tile_m, spec.kept_k)
    gX = cute.local_tile(coordinates, tile, (None, None, None, None))
    sX = s_tiles[1 if spec.sparse_on_m else 0]
    return tma.load_partition(atom, gX, sX, cute.make_layout(PAIR), rank)


def share_loaders(atom: cute.CopyAtom, parts: tuple, place: tuple, count: int, mask) -> list[Callable]:
    """`load((piece, block), slot, barrier)` of each of `count` tiles from `place` = (tile, batch) on.

    `parts` of this CTA in shared and global memory; `mask`: the CTAs that it loads for.
    """
    (s_part, g_part), (tile, batch) = parts, place
    return [
        tma.tile_loader(atom, cute.group_modes(g_part[None, tile + i, None, None, batch], 1, 3), s_part, mask)
        for i in range(count)
    ]


def load_shares(own: list[Callable], for_both: list[Callable] | None, place: tuple, slot: Int32, full):
    """Of an operand `place` = (piece, block) to `slot`; `for_both`: None, or loads of what a pair shares."""
    if for_both is not None:
        load_of_pair(own, for_both, place[0], place[1], slot, full)
        return
    for i, load in enumerate(own):
        load(place, slot * len(own) + i, full)


@cute.jit
def load_of_pair(
    own: cutlass.Constexpr,
    for_both: cutlass.Constexpr,
    piece: cutlass.Constexpr,
    block: Int32,
    slot: Int32,
    full: cute.Pointer,
):
    """All of a stage for this CTA; or of what both need, this CTA's part for both."""
    if block >= SHARED:
        for i in cutlass.range_constexpr(len(own)):
            for_both[i]((piece, block - SHARED), slot * len(own) + i, full)
    else:
        for i in cutlass.range_constexpr(len(own)):
            own[i]((piece, block), slot * len(own) + i, full)


@cute.jit
def produce(
    spec: cutlass.Constexpr,
    rings: tuple,  # (operands, items)
    loads: tuple,
    s_tiles: tuple,
    pattern: tuple,
    grid: ListGrid,
):
    """Producer warp: for each work item of this cluster, follows its list and loads what it names, but for
    kept blocks where those have a ring of their own.

    The cluster's first CTA takes the items and passes them on, each some loads before the end of the one
    before: what it reads on the way has arrived when it is needed.
    """
    ring, queue = rings
    a_atom, tma_a, b_atom, tma_b, shared_atom, tma_shared = loads
    lists, counter, _, ends, _, _ = pattern
    if cutlass.const_expr(spec.split):
        grid = grid._replace(tiles=lists.heavy[1] * spec.sub_clusters)
    rank_m, rank_n, cluster = cute.arch.block_idx()
    gA = cute.local_tile(tma_a, (spec.tile_m, spec.kept_k), (None, None, None, None))
    gB = cute.local_tile(tma_b, (spec.wg_n, spec.unit_k), (None, None, None, None))
    # (bMN, bK, restMN, pieces, blocks, L)
    peers, rank = ((1, 1), (Int32(0), Int32(0))) if spec.pairs else (spec.cluster, (rank_m, rank_n))
    parts_a = tma.load_partition(a_atom, gA, s_tiles[0], cute.make_layout(peers[1]), rank[1])
    parts_b = tma.load_partition(b_atom, gB, s_tiles[1], cute.make_layout(peers[0]), rank[0])
    a_mask, b_mask = tma.multicast_masks(peers, rank)
    in_cluster = rank_m + rank_n
    parts_shared = shared_parts(spec, (shared_atom, tma_shared), s_tiles, in_cluster)

    clusters = cute.arch.grid_dim()[2]
    sub_tiles, cluster_size = spec.sub_clusters, spec.cluster[0] * spec.cluster[1]
    leader = in_cluster == 0
    heavy = lists.heavy[0]
    state = producer_state(spec.stages)
    sent, received = producer_state(item_queue.STAGES), consumer_state(item_queue.STAGES)
    # Of the next item: first its number, then what is at its place. One register, for there are few.
    word = place_word(lists, list_place(cluster, grid, heavy, sub_tiles))
    item = list_item(word, spec.split, sub_tiles)
    if leader:
        item_queue.send(queue, sent, tuple(item), cluster_size)
    else:
        next_item(spec, queue, received)
    sent.advance()
    received.advance()
    if cutlass.const_expr(spec.pairs):
        item = entries_of_pair(item, in_cluster, ends[0])
    dense, kept = entries_of_lane(lists, item.begin, item.end, ends)
    while item.tile >= 0:
        if cutlass.const_expr(not spec.asks_late):
            if leader:
                word = item_queue.ask_number(counter, grid.size)
        m, n, batch = tile_numbers(spec, item, grid.panels)
        s_tile = (m if spec.sparse_on_m else n) % spec.block_tiles
        if cutlass.const_expr(spec.sparse_on_m):
            m = s_tile
        else:
            n = s_tile
        n *= spec.shares_n
        load_a = share_loaders(a_atom, parts_a, (m, batch), 1, a_mask)
        load_b = share_loaders(b_atom, parts_b, (n, batch), spec.shares_n, b_mask)
        shared_a, shared_b = None, None
        if cutlass.const_expr(spec.pairs):
            x = (n if spec.sparse_on_m else m, batch)
            both = share_loaders(shared_atom, parts_shared, x, spec.shares_n, cutlass.Int16((1 << PAIR) - 1))
            shared_a, shared_b = (None, both) if spec.sparse_on_m else (both, None)
        groups = group_count(item, spec.units)
        at = item.begin
        while groups > 0:
            next_dense, next_kept = entries_of_lane(lists, at + LANES, item.end, ends)
            here = cutlass.min(groups, Int32(LANES // spec.units))
            last = Int32(0)
            if groups == here:  # the rest of the list has been fetched
                last = here
            for g in cutlass.range(here, unroll=1):
                if cutlass.const_expr(spec.asks_late):
                    if groups - g == cutlass.min(last, Int32(ASK)):
                        if leader:
                            word = item_queue.ask_number(counter, grid.size)
                if groups - g == cutlass.min(last, Int32(LOOK_UP)):
                    if leader:
                        number = item_queue.number_taken(word, clusters)
                        word = place_word(lists, list_place(number, grid, heavy, sub_tiles))
                if groups - g == cutlass.min(last, Int32(PASS_ON)):
                    if leader:
                        item = list_item(word, spec.split, sub_tiles)
                        item_queue.send(queue, sent, tuple(item), cluster_size)
                    else:
                        item = next_item(spec, queue, received)
                    sent.advance()
                    received.advance()
                    if cutlass.const_expr(spec.pairs):
                        item = entries_of_pair(item, in_cluster, ends[0])
                    next_dense, next_kept = entries_of_lane(lists, item.begin, item.end, ends)
                for piece in cutlass.range_constexpr(len(spec.pieces)):
                    ring.producer_acquire(state)
                    full = ring.producer_get_barrier(state)
                    for unit in cutlass.range_constexpr(spec.units):
                        lane = g * spec.units + unit
                        of_dense = (piece, cute.arch.shuffle_sync(dense, lane))
                        of_kept = (piece, cute.arch.shuffle_sync(kept, lane))
                        of_a, of_b = (of_kept, of_dense) if spec.sparse_on_m else (of_dense, of_kept)
                        slot = state.index * spec.units + unit
                        if cutlass.const_expr(not spec.two_rings):
                            load_shares(load_a, shared_a, of_a, slot, full)
                        load_shares(load_b, shared_b, of_b, slot, full)
                    ring.producer_commit(state)
                    state.advance()
            groups -= here
            at += LANES
            dense, kept = next_dense, next_kept
    # Peers may still write into this CTA's shared memory, or signal its barriers: stay until they are done.
    ring.producer_tail(state)
    if leader:
        item_queue.wait_until_received(queue, sent)


@cute.jit
def produce_kept(
    spec: cutlass.Constexpr,
    rings: tuple,  # (kept blocks, items)
    load: tuple,  # atom and coordinates of the kept blocks, which are A
    sA: cute.Tensor,
    pattern: tuple,  # (BlockLists, (kept blocks, dense blocks), panels)
):
    """Second producer warp: loads the kept blocks of each work item into a ring of their own."""
    ring, queue = rings
    atom, coordinates = load
    lists, ends, panels = pattern
    rank_m, rank_n, _ = cute.arch.block_idx()
    gA = cute.local_tile(coordinates, (spec.tile_m, spec.kept_k), (None, None, None, None))
    tAsA, tAgA = tma.load_partition(atom, gA, sA, cute.make_layout(spec.cluster[1]), rank_n)
    mask, _ = tma.multicast_masks(spec.cluster, (rank_m, rank_n))
    state, received = producer_state(spec.kept_stages), consumer_state(item_queue.STAGES)
    item = next_item(spec, queue, received)
    received.advance()
    while item.tile >= 0:
        m, _, batch = tile_numbers(spec, item, panels)
        if cutlass.const_expr(spec.pairs):
            item = entries_of_pair(item, rank_m, ends[0])
        load_a = tma.tile_loader(
            atom, cute.group_modes(tAgA[None, m % spec.sub_clusters, None, None, batch], 1, 3), tAsA, mask
        )
        groups, at = group_count(item, 1), item.begin
        _, kept = entries_of_lane(lists, at, item.end, ends)
        while groups > 0:
            at += LANES
            _, next_kept = entries_of_lane(lists, at, item.end, ends)
            here = cutlass.min(groups, Int32(LANES))
            for g in cutlass.range(here, unroll=1):
                number = cute.arch.shuffle_sync(kept, g)
                for part in cutlass.range_constexpr(spec.kept_parts):
                    ring.producer_acquire(state)
                    load_a((part, number), state.index, ring.producer_get_barrier(state))
                    ring.producer_commit(state)
                    state.advance()
            groups -= here
            kept = next_kept
        item = next_item(spec, queue, received)
        received.advance()
    # Peers may still write into this CTA's shared memory.
    ring.producer_tail(state)


def share(spec, tiled_mma: cute.TiledMma, tiles: tuple, thread: Int32, group: Int32) -> tuple:
    """(first row, first column, fragments for the main loop) of consumer warpgroup `group`."""
    if spec.shares_n == 1:
        row, fragments = warpgroup_share(spec, tiled_mma, tiles, thread, group)
        return row, Int32(0), fragments
    sA, sB = tiles
    # (wgN, bK, shares, slots)
    sB = cute.local_tile(sB, (spec.wg_n, spec.unit_k, spec.shares_n), (0, 0, None))[None, None, group, None]
    _, fragments = warpgroup_share(spec, tiled_mma, (sA, sB), thread, Int32(0))
    return Int32(0), group * spec.wg_n, fragments


@cute.jit
def next_item(
    spec: cutlass.Constexpr, queue: item_queue.ItemQueue, state: pipeline.PipelineState
) -> ListItem:
    """Receivers: the next item of the cluster, whoever is to work on it."""
    return ListItem(*item_queue.receive(queue, state, spec.cluster[0] * spec.cluster[1]))


def place_in_list(spec, item: ListItem, group: Int32, panels: Int32) -> tuple[Int32, Int32]:
    """(number of a warpgroup's share among those of all tiles of a list, how many there are)."""
    rank_m, rank_n, _ = cute.arch.block_idx()
    tile = (item.panel & (PIECE - 1)) * spec.sub_clusters + item.tile % spec.sub_clusters
    number = tile * spec.cluster_size + rank_n * spec.cluster[0] + rank_m
    shares = spec.sub_clusters * spec.cluster_size * spec.wgs_per_tile
    if spec.wgs_per_tile > 1:
        number = number * spec.wgs_per_tile + group
    return number, panels * shares


@cute.jit
def consume(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    rings: tuple,  # (operands, items, kept blocks or None)
    mmas: tuple,
    s_tiles: tuple,
    output: tuple,  # (atom of D or None, D or its coordinates, epilogue operands, extent of D)
    schedule: tuple,  # (BlockLists, scales (blocks, L) or None, panels, memory and flags of `list_pieces`)
    group: Int32,
):
    """Consumer warpgroup number `group`: main loop and epilogue of its share of the items."""
    ring, queue, kept_ring = rings
    lists, scales, panels, memory, flags = schedule
    sA, sB, sD = s_tiles[0], s_tiles[1], s_tiles[2][None, None, None, group]
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    row, column, fragments = share(spec, mmas[0], (sA, sB), thread, group)

    atom_d, mD, operands, extent = output
    if cutlass.const_expr(spec.epilogue.use_tma):
        write = epi.tma_writer(atom_d, mD, sD, spec.epilogue.subtile)
    else:
        write = epi.plain_writer(mD, sD, extent, thread)

    state, received = consumer_state(spec.stages), consumer_state(item_queue.STAGES)
    of_kept = consumer_state(spec.kept_stages or spec.stages)
    item = next_item(spec, queue, received)
    received.advance()
    if cutlass.const_expr(spec.pingpong):
        if group == 1:
            give_turn(NamedBarrier.MMA_ORDER, Int32(0))
            state = skip(state, group_count(item, spec.units) * len(spec.pieces))
            # A cluster may have no item at all where only the GPU knows how many there are.
            if not cutlass.const_expr(spec.split) or item.tile >= 0:
                item = next_item(spec, queue, received)
                received.advance()
    while item.tile >= 0:
        if cutlass.const_expr(spec.pingpong):
            wait_turn(NamedBarrier.MMA_ORDER, group)
        m, n, batch = tile_numbers(spec, item, panels)
        next_turn = pass_turn(group) if cutlass.const_expr(spec.pingpong) else None
        if cutlass.const_expr(spec.promoted):
            factors = list_scales(lists, scales[None, batch], item)
            state = promoted_blocks(
                ring, state, mmas[0], fragments, group_count(item, spec.units),
                shape=(spec.pieces, spec.units), factor=factors.of, next_turn=next_turn,
            )  # fmt: skip
        elif cutlass.const_expr(spec.two_rings):
            of_kept, state = two_ring_loop(
                (kept_ring, ring), (of_kept, state), mmas[0], fragments, group_count(item, 1), spec.pieces
            )
        else:
            state = main_loop(
                ring, state, mmas[0], fragments, group_count(item, spec.units),
                pieces=spec.pieces, units=spec.units, next_turn=next_turn,
            )  # fmt: skip
        store = partial(
            epi.store_tile, spec.epilogue, fragments[0], epilogue, operands,
            origin=(m * spec.tile_m + row, n * spec.tile_n + column, batch), extent=extent, sD=sD,
            tiled_mma_epi=mmas[1], write=write, thread=thread, warpgroup=group,
        )  # fmt: skip
        if cutlass.const_expr(spec.split):
            if item.panel >= PIECE:
                place = place_in_list(spec, item, group, panels * extent[2])
                word, acc = lists.pieces[item.begin], fragments[0]
                if list_pieces.leave(word, acc, memory, place, flags, (thread, group)):
                    store(fetch=partial(list_pieces.add_up, word, memory[1], place, cute.size(acc), thread))
            else:
                store()
        else:
            store()
        item = next_item(spec, queue, received)
        received.advance()
        if cutlass.const_expr(spec.pingpong):
            if item.tile >= 0:  # the other warpgroup's
                state = skip(state, group_count(item, spec.units) * len(spec.pieces))
                item = next_item(spec, queue, received)
                received.advance()
    epi.drain(spec.epilogue, thread)
