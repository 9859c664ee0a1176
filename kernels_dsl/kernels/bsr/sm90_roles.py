"""Device side of the SM90 block-sparse GEMM: the kernel, and what it fills into the skeleton's loops."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, pipeline
from cutlass.pipeline import PipelineState

from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, Consumer
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.pipeline import consumer_state, make_tma_ring, producer_state, skip
from kernels_dsl.blocks.mainloop.operand_ring import (
    ExtraWords,
    Layouts,
    Share,
    SharedTiles,
    TwoRings,
    TwoStates,
    main_loop,
    start,
    two_ring_loop,
    warpgroup_share,
)
from kernels_dsl.blocks.mainloop.promoted_blocks import promoted_blocks
from kernels_dsl.blocks.reduce import nan_word
from kernels_dsl.blocks.reduce.partial_sums import Part, PartialSums, Piece, SumMemory
from kernels_dsl.blocks.schedule import item_queue
from kernels_dsl.blocks.schedule.block_lists import (
    LANES,
    BlockLists,
    ListEnds,
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
from kernels_dsl.blocks.schedule.tile_source import KRange
from kernels_dsl.config.bsr import PIECE, SHARED, NanRule
from kernels_dsl.kernels import skeleton
from kernels_dsl.kernels.skeleton import Cta, Mmas, Output, this_cta

from .sm90_spec import PAIR, BsrSpec

ASK, LOOK_UP, PASS_ON = 10, 6, 4
"""Groups before the end of a list at which the next item is taken, looked up and passed on."""

Load = Callable[[tuple[int, Int32], Int32, cute.Pointer], None]
"""load((piece, block), slot, full barrier)."""


class BsrLoads(NamedTuple):
    """TMA loads of A and B, each (MN, block_k, blocks, L), and of what CTAs with two lists share, or None."""

    a: tma.TmaCopy
    b: tma.TmaCopy
    shared: tma.TmaCopy | None


class Pattern(NamedTuple):
    """The kept blocks and what belongs to them."""

    lists: BlockLists
    memory: SumMemory  # counters of `item_queue` and of partial sums; no workspace where lists are whole
    ends: ListEnds
    extent: epi.Coord  # of D
    scales: cute.Tensor | None  # (blocks, L)


class BesideTiles(NamedTuple):
    """Shared memory beside the tiles: queue of items, kept blocks' own ring, flags of the warpgroups."""

    queue: item_queue.ItemQueue
    kept: pipeline.PipelineTmaAsync | None
    flags: cute.Pointer


def beside_tiles(spec: BsrSpec) -> ExtraWords:
    """Memory of `BesideTiles`."""

    def set_up(words: cute.Pointer) -> BesideTiles:
        warps, ring = spec.consumers * 4, None
        # Each CTA's second producer warp receives the items too.
        queue = item_queue.make_item_queue(words, warps + spec.two_rings, spec.cluster_size)
        words += item_queue.QUEUE_WORDS
        if spec.two_rings:
            ring = make_tma_ring(
                words, spec.kept_stages, spec.kept_bytes, warps, spec.cluster, alone=spec.pairs
            )  # fmt: skip
        return BesideTiles(queue, ring, words + 2 * spec.kept_stages)

    flags = spec.consumers if spec.split else 0
    return ExtraWords(item_queue.QUEUE_WORDS + 2 * spec.kept_stages + flags, set_up)


@entry_name("bsr_sm90")
@cute.kernel
def bsr_kernel(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    mmas: Mmas,
    layouts: Layouts,
    loads: BsrLoads,
    output: Output,
    pattern: Pattern,
    grid: ListGrid,
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    atoms = [loads.a.atom, loads.b.atom, output.atom]
    ring, shared, warp, beside = start(spec, atoms, layouts, beside_tiles(spec))
    roles = BsrRoles(
        spec,
        epilogue,
        ring,
        shared,
        beside,
        mmas=mmas,
        loads=loads,
        output=output,
        pattern=pattern,
        grid=grid,
    )
    skeleton.run_roles(spec, warp, roles)


class TileNumbers(NamedTuple):
    """Numbers of a CTA's tile along M and N of D, and its batch."""

    m: Int32
    n: Int32
    batch: Int32


@cute.jit
def tile_numbers(spec: cutlass.Constexpr, item: ListItem, panels: Int32) -> TileNumbers:
    """This CTA's tile of a cluster's item."""
    cta = this_cta()
    panel = item.panel & (PIECE - 1) if cutlass.const_expr(spec.split) else item.panel
    batch = panel // panels
    if cutlass.const_expr(spec.pairs):
        number, part = of_pair(item.tile, cta.m + cta.n)
        x = (panel - batch * panels) * PAIR + part
        m, n = (number, x) if spec.sparse_on_m else (x, number)
        return TileNumbers(m, n, batch)
    m, n = item.tile, panel - batch * panels
    if cutlass.const_expr(not spec.sparse_on_m):
        m, n = n, m
    return TileNumbers(m * spec.cluster[0] + cta.m, n * spec.cluster[1] + cta.n, batch)


@cute.jit
def next_item(spec: cutlass.Constexpr, queue: item_queue.ItemQueue, state: PipelineState) -> ListItem:
    """Receivers: the next item of the cluster, whoever is to work on it."""
    return ListItem(*item_queue.receive(queue, state, spec.cluster_size))


class Received(NamedTuple):
    """A position in the queue: the item that was received last, state of the queue."""

    item: ListItem
    state: PipelineState


@dataclass(frozen=True)
class ReceivedItems:
    """A `TileSource` for all but the leader's producer warp: the cluster's items as they come."""

    spec: BsrSpec
    queue: item_queue.ItemQueue
    looks_ahead = False

    def receive(self, state: PipelineState) -> Received:
        """The next item of the cluster, whoever is to work on it."""
        item = next_item(self.spec, self.queue, state)
        state.advance()
        return Received(item, state)

    def first(self) -> Received:
        """The cluster's first item."""
        return self.receive(consumer_state(item_queue.STAGES))

    def size(self) -> None:
        """Nobody knows how many items a cluster will have."""

    def more(self, position: Received, size: None) -> Boolean:
        """True until the queue says that there are no more."""
        return position.item.tile >= 0

    def decode(self, position: Received) -> tuple[ListItem, Received]:
        """The item as it is."""
        return position.item, position

    def k_range(self, item: ListItem) -> KRange:
        """The pieces of all groups of the item's list."""
        return KRange(Int32(0), group_count(item, self.spec.units) * len(self.spec.pieces))

    def next(self, position: Received) -> Received:
        """The next item."""
        return self.receive(position.state)

    @cute.jit
    def leave_first(self, position: Received, state: PipelineState) -> tuple[Received, PipelineState]:
        """Past the first item, which is the other warpgroup's."""
        state = skip(state, self.k_range(position.item).end)
        if not cutlass.const_expr(self.spec.may_idle) or position.item.tile >= 0:
            position = self.receive(position.state)
        return position, state

    @cute.jit
    def leave_other(
        self, item: ListItem, position: Received, state: PipelineState
    ) -> tuple[Received, PipelineState]:
        """Past the other warpgroup's item, if there is one."""
        if position.item.tile >= 0:
            state = skip(state, self.k_range(position.item).end)
            position = self.receive(position.state)
        return position, state


def operand_loads(
    atom: cute.CopyAtom,
    parts: tma.Partition,
    tile: Int32,
    batch: Int32,
    count: int,
    mask: Int16 | None,
    step: int = 1,
) -> list[Load]:
    """Loads of `count` tiles from number `tile` on, each `step` parts; `mask`: the CTAs that this one loads
    for."""
    tiles = [parts.tiles[None, (tile + i) * step, None, None, batch] for i in range(count)]
    return [tma.tile_loader(atom, cute.group_modes(x, 1, 3), parts.shared, mask) for x in tiles]


@cute.jit
def load_operand(
    own: cutlass.Constexpr,
    for_both: cutlass.Constexpr,  # None, or loads of what a pair shares
    piece: cutlass.Constexpr,
    block: Int32,
    slot: Int32,
    full: cute.Pointer,
):
    """Loads an operand's slot for this CTA; or of a block that both CTAs of a pair need, a part for both."""
    if cutlass.const_expr(for_both is None):
        for i in cutlass.range_constexpr(len(own)):
            own[i]((piece, block), slot * len(own) + i, full)
    elif block >= SHARED:
        for i in cutlass.range_constexpr(len(own)):
            for_both[i]((piece, block - SHARED), slot * len(own) + i, full)
    else:
        for i in cutlass.range_constexpr(len(own)):
            own[i]((piece, block), slot * len(own) + i, full)


class Operands(NamedTuple):
    """This CTA's loads of A, of B, and of what a pair shares, or None; masks of multicasts of A and B."""

    a: tma.Partition
    b: tma.Partition
    shared: tma.Partition | None
    mask_a: Int16 | None
    mask_b: Int16 | None


class Entries(NamedTuple):
    """Numbers of a list's blocks, one entry a lane."""

    dense: Int32
    kept: Int32


class ItemLoads(NamedTuple):
    """Loads of an item's blocks, of A and B, for this CTA and for both of a pair, or None."""

    a: list[Load]
    b: list[Load]
    shared_a: list[Load] | None = None
    shared_b: list[Load] | None = None


@dataclass(frozen=True)
class BsrRoles:
    """All that the roles of a CTA know; `skeleton.Roles`."""

    spec: BsrSpec
    epilogue: Callable[..., Any]
    ring: pipeline.PipelineTmaAsync
    shared: SharedTiles
    beside: BesideTiles
    mmas: Mmas
    loads: BsrLoads
    output: Output
    pattern: Pattern
    grid: ListGrid

    @cute.jit
    def produce(self):
        """Producer warp: for each work item of this cluster, loads the blocks of its list, but for kept ones
        that have a ring of their own.

        The cluster's first CTA takes the items and passes them on, each some loads before the end of the one
        before: what it reads on the way has arrived when it is needed.
        """
        spec, ring, queue, lists, ends = (
            self.spec,
            self.ring,
            self.beside.queue,
            self.pattern.lists,
            self.pattern.ends,
        )
        counters, grid, sub_tiles = self.pattern.memory.counters, self.grid, self.spec.sub_clusters
        if cutlass.const_expr(spec.split):
            grid = grid._replace(tiles=lists.heavy[1] * sub_tiles)
        cta = this_cta()
        in_cluster = cta.m + cta.n
        operands = self.partition_operands(cta, in_cluster)
        clusters = skeleton.cluster_count()
        leader = in_cluster == 0
        heavy = lists.heavy[0]
        state = producer_state(spec.stages)
        sent, received = producer_state(item_queue.STAGES), consumer_state(item_queue.STAGES)
        # Of the next item: first its number, then its line of the table. One register, for there are few.
        word = place_word(lists, list_place(cta.cluster, grid, heavy, sub_tiles))
        item = list_item(word, spec.split, sub_tiles)
        if cutlass.const_expr(spec.nans is NanRule.REDO):
            item = item._replace(tile=nan_word.tile_to_redo(counters, item.tile))
        if leader:
            item_queue.send(queue, sent, tuple(item), spec.cluster_size)
        else:
            next_item(spec, queue, received)
        sent.advance()
        received.advance()
        if cutlass.const_expr(spec.pairs):
            item = entries_of_pair(item, in_cluster, ends.kept)
        dense, kept = entries_of_lane(lists, item.begin, item.end, ends)
        while item.tile >= 0:
            if cutlass.const_expr(not spec.asks_late):
                if leader:
                    word = item_queue.ask_number(counters, grid.size)
            loads = self.item_loads(operands, item)
            groups = group_count(item, spec.units)
            at = item.begin
            while groups > 0:
                next_dense, next_kept = entries_of_lane(lists, at + LANES, item.end, ends)
                count = cutlass.min(groups, Int32(LANES // spec.units))
                last = Int32(0)
                if groups == count:  # the rest of the list has been fetched
                    last = count
                for g in cutlass.range(count, unroll=1):
                    if cutlass.const_expr(spec.asks_late):
                        if groups - g == cutlass.min(last, Int32(ASK)):
                            if leader:
                                word = item_queue.ask_number(counters, grid.size)
                    if groups - g == cutlass.min(last, Int32(LOOK_UP)):
                        if leader:
                            number = item_queue.number_taken(word, clusters)
                            word = place_word(lists, list_place(number, grid, heavy, sub_tiles))
                    if groups - g == cutlass.min(last, Int32(PASS_ON)):
                        if leader:
                            item = list_item(word, spec.split, sub_tiles)
                            item_queue.send(queue, sent, tuple(item), spec.cluster_size)
                        else:
                            item = next_item(spec, queue, received)
                        sent.advance()
                        received.advance()
                        if cutlass.const_expr(spec.pairs):
                            item = entries_of_pair(item, in_cluster, ends.kept)
                        next_dense, next_kept = entries_of_lane(lists, item.begin, item.end, ends)
                    for piece in cutlass.range_constexpr(len(spec.pieces)):
                        ring.producer_acquire(state)
                        full = ring.producer_get_barrier(state)
                        self.load_piece(loads, piece, g, Entries(dense, kept), state.index, full)
                        ring.producer_commit(state)
                        state.advance()
                groups -= count
                at += LANES
                dense, kept = next_dense, next_kept
        # Peers may still write into this CTA's shared memory, or signal its barriers: stay until then.
        ring.producer_tail(state)
        if leader:
            item_queue.wait_until_received(queue, sent)

    def partition_operands(self, cta: Cta, in_cluster: Int32) -> Operands:
        """The tiles of A and B, and this CTA's part of the loads of each."""
        spec, (load_a, load_b, load_shared), (sA, sB, _) = self.spec, self.loads, self.shared
        every = (None, None, None, None)
        gA = cute.local_tile(load_a.coordinates, (spec.tile_m, spec.kept_k), every)
        gB = cute.local_tile(load_b.coordinates, (spec.wg_n, spec.unit_k), every)
        # (bMN, bK, restMN, pieces, blocks, L)
        peers, rank = ((1, 1), (Int32(0), Int32(0))) if spec.pairs else (spec.cluster, (cta.m, cta.n))
        peers_m, peers_n = (cute.make_layout(size) for size in peers)
        a = tma.load_partition(load_a.atom, gA, sA, peers_n, rank[1])
        b = tma.load_partition(load_b.atom, gB, sB, peers_m, rank[0])
        masks, shared = tma.multicast_masks(peers, rank), None
        if spec.halves:
            tile = (spec.part_n, spec.unit_k)
            mine = cute.domain_offset((in_cluster * spec.part_n, 0, 0, 0), load_shared.coordinates)
            sX = cute.local_tile(sB, tile, (in_cluster, 0, None))
            gX = cute.local_tile(mine, tile, every)
            shared = tma.load_partition(load_shared.atom, gX, sX, peers_m, 0)
        elif spec.pairs:
            tile = (spec.wg_n, spec.unit_k) if spec.sparse_on_m else (spec.tile_m, spec.kept_k)
            gX = cute.local_tile(load_shared.coordinates, tile, every)
            sX = sB if spec.sparse_on_m else sA
            shared = tma.load_partition(load_shared.atom, gX, sX, cute.make_layout(PAIR), in_cluster)
        return Operands(a, b, shared, *masks)

    def item_loads(self, operands: Operands, item: ListItem) -> ItemLoads:
        """Loads of an item's blocks, of A and of B."""
        spec = self.spec
        m, n, batch = tile_numbers(spec, item, self.grid.panels)
        s_tile = (m if spec.sparse_on_m else n) % spec.block_tiles
        m, n = (s_tile, n) if spec.sparse_on_m else (m, s_tile)
        n *= spec.shares_n
        a = operand_loads(self.loads.a.atom, operands.a, m, batch, 1, operands.mask_a)
        b = operand_loads(self.loads.b.atom, operands.b, n, batch, spec.shares_n, operands.mask_b)
        if operands.shared is None:
            return ItemLoads(a, b)
        x, both = (n if spec.sparse_on_m else m), Int16((1 << PAIR) - 1)
        step = PAIR if spec.halves else 1
        shared = operand_loads(self.loads.shared.atom, operands.shared, x, batch, spec.shares_n, both, step)
        return ItemLoads(a, b, shared_b=shared) if spec.sparse_on_m else ItemLoads(a, b, shared_a=shared)

    def load_piece(
        self, loads: ItemLoads, piece: int, group: Int32, entries: Entries, stage: Int32, full: cute.Pointer
    ) -> None:
        """Loads a piece of the group of entries number `group`, of which each lane has one, into a stage."""
        spec = self.spec
        for unit in range(spec.units):
            lane = group * spec.units + unit
            of_dense = cute.arch.shuffle_sync(entries.dense, lane)
            of_kept = cute.arch.shuffle_sync(entries.kept, lane)
            of_a, of_b = (of_kept, of_dense) if spec.sparse_on_m else (of_dense, of_kept)
            slot = stage * spec.units + unit
            if not spec.two_rings:
                load_operand(loads.a, loads.shared_a, piece, of_a, slot, full)
            load_operand(loads.b, loads.shared_b, piece, of_b, slot, full)

    @cute.jit
    def assist(self):
        """Second producer warp: loads the kept blocks of each work item, which are A, into their own ring."""
        spec, load, lists, ends = self.spec, self.loads.a, self.pattern.lists, self.pattern.ends
        ring, queue, cta = self.beside.kept, self.beside.queue, this_cta()
        gA = cute.local_tile(load.coordinates, (spec.tile_m, spec.kept_k), (None, None, None, None))
        parts = tma.load_partition(load.atom, gA, self.shared.a, cute.make_layout(spec.cluster[1]), cta.n)
        mask, _ = tma.multicast_masks(spec.cluster, (cta.m, cta.n))
        state, received = producer_state(spec.kept_stages), consumer_state(item_queue.STAGES)
        item = next_item(spec, queue, received)
        received.advance()
        while item.tile >= 0:
            m, _, batch = tile_numbers(spec, item, self.grid.panels)
            if cutlass.const_expr(spec.pairs):
                item = entries_of_pair(item, cta.m, ends.kept)
            (load_block,) = operand_loads(load.atom, parts, m % spec.sub_clusters, batch, 1, mask)
            groups, at = group_count(item, 1), item.begin
            _, kept = entries_of_lane(lists, at, item.end, ends)
            while groups > 0:
                at += LANES
                _, next_kept = entries_of_lane(lists, at, item.end, ends)
                count = cutlass.min(groups, Int32(LANES))
                for g in cutlass.range(count, unroll=1):
                    number = cute.arch.shuffle_sync(kept, g)
                    for part in cutlass.range_constexpr(spec.kept_parts):
                        ring.producer_acquire(state)
                        load_block((part, number), state.index, ring.producer_get_barrier(state))
                        ring.producer_commit(state)
                        state.advance()
                groups -= count
                kept = next_kept
            item = next_item(spec, queue, received)
            received.advance()
        # Peers may still write into this CTA's shared memory.
        ring.producer_tail(state)

    def consume(self, group: Int32) -> None:
        """Consumer warpgroup number `group`: main loop and epilogue of its share of the items."""
        spec = self.spec
        consumer = Consumer(group, cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
        staging = self.shared.d[None, None, None, group]
        share = share_of(spec, self.mmas.main, self.shared, consumer)
        epilogue = epi.Epilogue(spec.epilogue, self.epilogue, self.mmas.epilogue, staging, consumer)
        items = ReceivedItems(spec, self.beside.queue)
        skeleton.consume_tiles(spec, items, BsrConsumer(self, share, epilogue), group)


def share_of(spec: BsrSpec, tiled_mma: cute.TiledMma, shared: SharedTiles, consumer: Consumer) -> Share:
    """The share of a consumer warpgroup: rows of a tile, or columns where those have loads of their own."""
    sA, sB, _ = shared
    if spec.shares_n == 1:
        return warpgroup_share(spec, tiled_mma, sA, sB, consumer)
    group = consumer.warpgroup
    # (wgN, bK, shares, slots)
    sB = cute.local_tile(sB, (spec.wg_n, spec.unit_k, spec.shares_n), (0, 0, None))[None, None, group, None]
    whole = warpgroup_share(spec, tiled_mma, sA, sB, consumer._replace(warpgroup=Int32(0)))
    return whole._replace(column=group * spec.wg_n)


class Walk(NamedTuple):
    """Carried from item to item: states of the operands' ring and of the kept blocks' own, the last item."""

    state: PipelineState
    kept: PipelineState
    position: Received


@dataclass(frozen=True)
class BsrConsumer:
    """A consumer warpgroup's work on its items; `skeleton.TileConsumer`."""

    roles: BsrRoles
    share: Share
    epilogue: epi.Epilogue

    def begin(self, position: Received, state: PipelineState) -> tuple["BsrConsumer", Walk]:
        """At the start of the kept blocks' ring too."""
        kept = consumer_state(self.roles.spec.kept_stages or self.roles.spec.stages)
        return self, Walk(state, kept, position)

    def prepare(self, item: ListItem) -> TileNumbers:
        """The tile's place in D."""
        return tile_numbers(self.roles.spec, item, self.roles.grid.panels)

    def compute(self, item: ListItem, numbers: TileNumbers, walk: Walk) -> Walk:
        """The main loop."""
        roles, (state, kept, position) = self.roles, walk
        spec, ring, mma, fragments = roles.spec, roles.ring, roles.mmas.main, self.share.fragments
        turn = skeleton.pass_turn(self.epilogue.consumer.warpgroup) if spec.pingpong else None
        if spec.promoted:
            scales = roles.pattern.scales[None, numbers.batch]
            factor = list_scales(roles.pattern.lists, scales, item).of
            groups = group_count(item, spec.units)
            state = promoted_blocks(
                ring, state, mma, fragments, groups, spec.pieces, spec.units, factor=factor, pass_turn=turn
            )
        elif spec.two_rings:
            rings, states = TwoRings(roles.beside.kept, ring), TwoStates(kept, state)
            groups = group_count(item, 1)
            kept, state = two_ring_loop(rings, states, mma, fragments, groups, spec.pieces)
        else:
            groups = group_count(item, spec.units)
            state = main_loop(ring, state, mma, fragments, groups, spec.pieces, spec.units, pass_turn=turn)
        return Walk(state, kept, position)

    def finish(self, item: ListItem, numbers: TileNumbers, walk: Walk, more: Boolean) -> Walk:
        """The epilogue."""
        self.store(item, numbers)
        return walk

    @cute.jit
    def store(self, item: cutlass.Constexpr, numbers: cutlass.Constexpr):
        """Stores the item's tile; of a list in pieces once the sums of all are there."""
        roles, acc, (_, thread) = self.roles, self.share.fragments.acc, self.epilogue.consumer
        spec, plan, staging = roles.spec, self.epilogue.plan, self.epilogue.staging
        atom, mD, operands = roles.output.atom, roles.output.coordinates, roles.output.operands
        m, n, batch = numbers
        origin = (m * spec.tile_m + self.share.row, n * spec.tile_n + self.share.column, batch)
        region = epi.Region(origin, roles.pattern.extent)
        if cutlass.const_expr(plan.use_tma):
            write = epi.tma_writer(atom, mD, staging, plan.subtile)
        else:
            write = epi.plain_writer(mD, staging, region.extent, thread)
        store = partial(epi.store_tile, self.epilogue, acc, operands, region, write)
        if cutlass.const_expr(spec.split):
            if item.panel >= PIECE:
                sums = self.partial_sums(item)
                if sums.leave(acc):
                    store(fetch=partial(sums.add_up, cute.size(acc)))
            else:
                store()
        else:
            if cutlass.const_expr(spec.nans is NanRule.TELL):
                nan_word.tell(acc, roles.pattern.memory.counters)
            store()

    def partial_sums(self, item: ListItem) -> PartialSums:
        """This warpgroup's piece of its part of a list's sums."""
        roles, consumer = self.roles, self.epilogue.consumer
        spec, cta = roles.spec, this_cta()
        piece = Piece.of_word(roles.pattern.lists.pieces[item.begin])
        tile = (item.panel & (PIECE - 1)) * spec.sub_clusters + item.tile % spec.sub_clusters
        number = tile * spec.cluster_size + cta.n * spec.cluster[0] + cta.m
        parts = spec.sub_clusters * spec.cluster_size * spec.wgs_per_tile
        if spec.wgs_per_tile > 1:
            number = number * spec.wgs_per_tile + consumer.warpgroup
        _, _, batches = roles.pattern.extent
        part = Part(number, roles.grid.panels * batches * parts)
        return PartialSums(roles.pattern.memory, roles.beside.flags, piece, part, consumer)
