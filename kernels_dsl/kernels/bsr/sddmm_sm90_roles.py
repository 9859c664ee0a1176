"""Device side of the SM90 sampled product: the kernel, and what it fills into the skeleton's loops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineState

from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, Consumer
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.pipeline import skip
from kernels_dsl.blocks.mainloop.operand_ring import (
    Layouts,
    Share,
    SharedTiles,
    main_loop,
    start,
    warpgroup_share,
)
from kernels_dsl.blocks.schedule.tile_source import KRange
from kernels_dsl.kernels import skeleton
from kernels_dsl.kernels.skeleton import Loads, Mmas, Output

from .sddmm_sm90_spec import SampledSpec


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


class SampledLayouts(NamedTuple):
    """Layouts in shared memory: the tiles, B by units (unit_n, tile_k, stages * units), staging by blocks."""

    tiles: Layouts
    units: cute.ComposedLayout
    parts: cute.ComposedLayout


class Item(NamedTuple):
    """A work item: tile of A, tile of the block along its rows and columns, batch, entries, K tiles.

    `others`: in ping-pong, K tiles of the item after it, which is the other warpgroup's.
    """

    tile_m: Int32
    sub_m: Int32
    sub_n: Int32
    batch: Int32
    entry: Int32
    count: Int32
    k_tiles: Int32
    others: Int32 | None = None


@cute.jit
def item_of(spec: cutlass.Constexpr, chunks: Chunks, work: Int32, size: Int32) -> Item:
    """Work item number `work`; past the end, the last one again, so that it may be fetched ahead.

    An empty chunk has one K tile, of which nothing is stored.
    """
    work = cutlass.min(work, size - 1)
    tiles = spec.subs[0] * spec.subs[1]
    in_batches, sub = work // tiles, work % tiles
    number = cute.size(chunks.rows)
    batch = in_batches // number
    chunk = in_batches - batch * number
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
    """Number along N of the unit that this lane's entry of the chunk names; after its end, that of zeros."""
    lane = cute.arch.lane_idx()
    unit = chunks.units_n
    if lane < item.count:
        unit = chunks.columns[item.entry + lane] * spec.subs[1] + item.sub_n
    return unit


@cute.jit
def blocks_of_lane(spec: cutlass.Constexpr, chunks: Chunks, item: Item, absent: Int32) -> tuple[Int32, ...]:
    """This lane's numbers of the tile's blocks (unit, block row), every 32nd of them; `absent` for none."""
    together = spec.rows_together
    lane = cute.arch.lane_idx()
    kept = cute.make_rmem_tensor(-(-spec.units * together // 32), Int32)
    for i in cutlass.range_constexpr(cute.size(kept)):
        unit = (i * 32 + lane) // together
        kept[i] = absent
        if unit < item.count:
            kept[i] = chunks.kept[item.entry + unit, (i * 32 + lane) % together]
    return tuple(kept[i] for i in range(cute.size(kept)))


def rows_writer(
    spec: SampledSpec, atom: cute.CopyAtom, mV: cute.Tensor, parts: cute.Tensor, item: Item, chunks: Chunks
) -> Callable[[int, epi.Coord], None]:
    """`write(stage, (m, n, _))` by a TMA store for each block row of the tile that keeps the column at n.

    parts (rows of a block, epi_n, stages * block rows): the staging buffers.
    """
    together = spec.rows_together
    kept = blocks_of_lane(spec, chunks, item, mV.shape[2])
    tiler = (cute.size(parts, mode=[0]), spec.epilogue.epi_n)

    @cute.jit
    def write(stage: int, first: epi.Coord):
        _, n, _ = first
        corner = cute.domain_offset((0, n % spec.unit_n, 0, 0), mV)
        for r in cutlass.range_constexpr(together):
            number = n // spec.unit_n * together + r
            block = cute.arch.shuffle_sync(kept[0], number % 32)
            for i in cutlass.range_constexpr(1, len(kept)):
                other = cute.arch.shuffle_sync(kept[i], number % 32)
                if number // 32 == i:
                    block = other
            if block < mV.shape[2]:
                gD = cute.local_tile(corner, tiler, (0, 0, block, item.batch))
                tDsD, tDgD = cpasync.tma_partition(
                    atom, 0, cute.make_layout(1), cute.group_modes(parts, 0, 2), cute.group_modes(gD, 0, 2)
                )
                cute.copy(atom, tDsD[None, stage * together + r], tDgD)

    return write


def block_writer(
    spec: SampledSpec, atom: cute.CopyAtom, mV: cute.Tensor, sD: cute.Tensor, item: Item
) -> Callable[[int, epi.Coord], None]:
    """`write(stage, (m, n, _))` by one TMA store: n counts along the chunk's units, whose blocks take it."""

    @cute.jit
    def write(stage: int, first: epi.Coord):
        m, n, _ = first
        unit = n // spec.unit_n
        column = item.sub_n * spec.unit_n + n - unit * spec.unit_n
        if unit < item.count:
            corner = cute.domain_offset((m, column, 0, 0), mV)
            gD = cute.local_tile(corner, spec.epilogue.subtile, (0, 0, item.entry + unit, item.batch))
            tDsD, tDgD = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
            )
            cute.copy(atom, tDsD[None, stage], tDgD)

    return write


@dataclass(frozen=True)
class SampledTiles:
    """A `TileSource` for consumers: work items, whose numbers are their positions."""

    spec: SampledSpec
    chunks: Chunks
    items: Int32
    begin: Int32
    ctas: Int32
    stride: Int32
    looks_ahead = False

    def first(self) -> Any:
        """The first of this CTA's items."""
        return self.begin

    def size(self) -> Int32:
        """Items in all."""
        return self.items

    def more(self, position: Any, size: Int32) -> Boolean:
        """True where there is such an item."""
        return position < size

    def decode(self, position: Any) -> tuple[Any, Any]:
        """The item, and in ping-pong what the other warpgroup does after it."""
        item = item_of(self.spec, self.chunks, position, self.items)
        if self.spec.pingpong:
            other = item_of(self.spec, self.chunks, position + self.ctas, self.items)
            item = item._replace(others=other.k_tiles)
        return item, position

    def k_range(self, item: Item) -> KRange:
        """All K tiles."""
        return KRange(Int32(0), item.k_tiles)

    def next(self, position: Any) -> Any:
        """The number of the item after that."""
        return position + self.stride

    def leave_first(self, position: Int32, state: PipelineState) -> tuple[Int32, PipelineState]:
        """Past the first item, which is the other warpgroup's."""
        state = skip(state, item_of(self.spec, self.chunks, position, self.items).k_tiles)
        return position + self.ctas, state

    def leave_other(self, item: Item, position: Int32, state: PipelineState) -> tuple[Int32, PipelineState]:
        """Past the other warpgroup's item after `item`."""
        return position, skip(state, item.others)


class Fetched(NamedTuple):
    """A position of the producer: an item's number, the item, the unit of this lane's entry."""

    number: Int32
    item: Item
    unit: Int32


class FetchedTiles(SampledTiles):
    """A `TileSource` for the producer: the chain of loads to an item's columns starts an item ahead."""

    def _fetched(self, number: Int32) -> Fetched:
        item = item_of(self.spec, self.chunks, number, self.items)
        return Fetched(number, item, unit_of_lane(self.spec, self.chunks, item))

    def first(self) -> Fetched:
        """The first of this CTA's items."""
        return self._fetched(self.begin)

    def more(self, position: Fetched, size: Int32) -> Boolean:
        """True where there is such an item."""
        return position.number < size

    def decode(self, position: Fetched) -> tuple[Fetched, Fetched]:
        """The item, and the next one, whose loads start."""
        return position, self._fetched(position.number + self.ctas)

    def next(self, position: Fetched) -> Fetched:
        """The position itself, which `decode` moved on."""
        return position


@entry_name("bsr_sddmm_sm90")
@cute.kernel
def sddmm_kernel(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    mmas: Mmas,
    layouts: SampledLayouts,
    loads: Loads,
    output: Output,  # of values: coordinates (rows, columns, blocks, L), operands are scalars
    chunks: Chunks,
    items: Int32,
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    atoms = [loads.a.atom, loads.b.atom, output.atom]
    ring, shared, warp, _ = start(spec, atoms, layouts.tiles)
    skeleton.run_roles(
        spec, warp, SampledRoles(spec, epilogue, ring, shared, layouts, mmas, loads, output, chunks, items)
    )


@dataclass(frozen=True)
class SampledRoles:
    """All that the roles of a CTA know; `skeleton.Roles`."""

    spec: SampledSpec
    epilogue: Callable[..., Any]
    ring: pipeline.PipelineTmaAsync
    shared: SharedTiles
    layouts: SampledLayouts
    mmas: Mmas
    loads: Loads
    output: Output
    chunks: Chunks
    items: Int32

    def produce(self) -> None:
        """Producer warp: for each work item, the rows of A and the columns of B that its entries name."""
        spec, (load_a, load_b) = self.spec, self.loads
        every = (None, None, None)
        gA = cute.local_tile(load_a.coordinates, (spec.tile_m, spec.tile_k), every)
        gB = cute.local_tile(load_b.coordinates, (spec.unit_n, spec.tile_k), every)
        sB = cute.make_tensor(
            self.shared.b.iterator, self.layouts.units.outer
        )  # (unit_n, tile_k, stages * units)
        peer, begin, _ = cute.arch.block_idx()
        peers, own = cute.make_layout(spec.peers), peer if spec.peers > 1 else 0
        tAsA, tAgA = tma.load_partition(load_a.atom, gA, self.shared.a, peers, own)
        a_mask, _ = tma.multicast_masks(spec.cluster, (Int32(0), peer))
        tBsB, tBgB = tma.load_partition(load_b.atom, gB, sB, cute.make_layout(1), 0)
        ctas = cute.arch.grid_dim()[1]
        tiles = FetchedTiles(spec, self.chunks, self.items, begin, ctas, ctas)

        def load(fetched: Fetched, state: PipelineState) -> PipelineState:
            item = fetched.item
            a = tma.tile_loader(load_a.atom, tAgA[None, item.tile_m, None, item.batch], tAsA, a_mask)
            units = [cute.arch.shuffle_sync(fetched.unit, u) for u in range(spec.units)]
            b = [
                tma.tile_loader(load_b.atom, tBgB[None, unit, None, item.batch], tBsB, None) for unit in units
            ]

            def load_stage(k: Int32, stage: Int32, full: cute.Pointer) -> None:
                a(k, stage, full)
                for u, load_unit in enumerate(b):
                    load_unit(k, stage * spec.units + u, full)

            return skeleton.load_stages(self.ring, state, tiles.k_range(item), load_stage)

        self.ring.producer_tail(skeleton.load_tiles(spec.stages, tiles, load))

    def consume(self, group: Int32) -> None:
        """Consumer warpgroup number `group`: main loop and epilogue of its share of the items."""
        spec, (sA, sB, sD) = self.spec, self.shared
        staging = sD[None, None, None, group]
        parts = cute.make_tensor(staging.iterator, self.layouts.parts.outer)
        ctas = cute.arch.grid_dim()[1]
        consumer = Consumer(group, cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
        share = warpgroup_share(spec, self.mmas.main, sA, sB, consumer)
        begin, stride = cute.arch.block_idx()[1], ctas * (2 if spec.pingpong else 1)
        tiles = SampledTiles(spec, self.chunks, self.items, begin, ctas, stride)
        epilogue = epi.Epilogue(spec.epilogue, self.epilogue, self.mmas.epilogue, staging, consumer)
        skeleton.consume_tiles(spec, tiles, SampledConsumer(self, share, epilogue, parts), group)


class Walk(NamedTuple):
    """Carried from item to item."""

    position: Int32
    state: PipelineState


@dataclass(frozen=True)
class SampledConsumer:
    """A consumer warpgroup's work on its items; `skeleton.TileConsumer`."""

    roles: SampledRoles
    share: Share
    epilogue: epi.Epilogue
    parts: cute.Tensor  # (rows of a block, epi_n, stages * block rows): the staging buffers, block by block

    def begin(self, position: Int32, state: PipelineState) -> tuple["SampledConsumer", Walk]:
        """Nothing to add."""
        return self, Walk(position, state)

    def prepare(self, item: Item) -> None:
        """Nothing."""

    def compute(self, item: Item, prepared: None, walk: Walk) -> Walk:
        """The main loop."""
        turn = skeleton.pass_turn(self.epilogue.consumer.warpgroup) if self.roles.spec.pingpong else None
        ring, mma, fragments = self.roles.ring, self.roles.mmas.main, self.share.fragments
        state = main_loop(ring, walk.state, mma, fragments, item.k_tiles, pass_turn=turn)
        return walk._replace(state=state)

    def finish(self, item: Item, prepared: None, walk: Walk, more: Boolean) -> Walk:
        """The epilogue."""
        spec, output = self.roles.spec, self.roles.output
        if spec.rows_together == 1:
            write = block_writer(spec, output.atom, output.coordinates, self.epilogue.staging, item)
        else:
            write = rows_writer(spec, output.atom, output.coordinates, self.parts, item, self.roles.chunks)
        origin = (item.sub_m * spec.tile_m + self.share.row, Int32(0), item.batch)
        region = epi.Region(origin, (0, 0, 0))
        epi.store_tile(self.epilogue, self.share.fragments.acc, output.operands, region, write)
        return walk
