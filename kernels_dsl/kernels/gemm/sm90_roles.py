"""Device side of the SM90 GEMM: the kernel, and what it fills into the skeleton's loops."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline
from cutlass.pipeline import PipelineState

from kernels_dsl.blocks.epilogue import gated_tile
from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.epilogue.gates import GatedEpilogue
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, Consumer
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.pipeline import expecting
from kernels_dsl.blocks.mainloop.last_rows import fill_rows, last_rows_loader
from kernels_dsl.blocks.mainloop.operand_ring import (
    ExtraWords,
    Layouts,
    Share,
    SharedTiles,
    held_address,
    main_loop,
    start,
    warpgroup_share,
)
from kernels_dsl.blocks.mainloop.promoted_ring import (
    ChunkFactors,
    NextStage,
    begin_ahead,
    by_rows,
    end_ahead,
    overlapped_set,
    promoted_loop,
)
from kernels_dsl.blocks.mainloop.scale_ring import ScaleLoader, Scales, StagedScales, staged_scales
from kernels_dsl.blocks.reduce.cluster_sums import ClusterSums, Place, SumBuffers
from kernels_dsl.blocks.reduce.lines import WarpgroupReduction, inner_of
from kernels_dsl.blocks.reduce.partial_sums import Part, PartialSums, Piece, SumMemory
from kernels_dsl.blocks.reduce.reductions import ReducedEpilogue
from kernels_dsl.blocks.reduce.ring_sums import RingBarriers, RingSums
from kernels_dsl.blocks.schedule.groups import (
    Group,
    GroupedGrid,
    GroupedTiles,
    GroupPosition,
    from_row,
    rows_of,
)
from kernels_dsl.blocks.schedule.scheduler import DenseTiles, KPart, Tile, TileGrid
from kernels_dsl.blocks.schedule.tile_source import KRange
from kernels_dsl.kernels import skeleton
from kernels_dsl.kernels.skeleton import Cta, Loads, Mmas, Output, this_cta

from .sm90_spec import GemmSpec


class Extent(NamedTuple):
    """Sizes of the problem."""

    m: Int32
    n: Int32
    k: Int32


class LastLoads(NamedTuple):
    """TMA loads of the rows that the last tile of A or B has; None where it is loaded whole."""

    a: tma.TmaCopy | None
    b: tma.TmaCopy | None


class BesideTiles(NamedTuple):
    """Shared memory beside the tiles: sums of the cluster's CTAs, scales, and flags of the warpgroups for
    partial sums; None without."""

    sums: SumBuffers | RingBarriers | None
    scales: StagedScales | None
    flags: cute.Pointer | None


def beside_tiles(spec: GemmSpec) -> ExtraWords:
    """Memory of `BesideTiles`."""
    scales = staged_scales(spec.scales, spec.stages) or ExtraWords(0, lambda _: None)
    shape = spec.shared_sums
    words = 0 if shape is None else shape.words

    def set_up(pointer: cute.Pointer) -> BesideTiles:
        sums = None
        if shape is not None:
            if shape.in_ring:
                sums = RingBarriers.set_up(pointer, shape, spec.loading_ctas)
            else:
                sums = SumBuffers.set_up(pointer, shape)
        behind = pointer + words
        flags = behind + scales.words if spec.stream_k else None
        return BesideTiles(sums, scales.set_up(behind), flags)

    return ExtraWords(words + scales.words + (spec.consumers if spec.stream_k else 0), set_up)


@entry_name("gemm_sm90")
@cute.kernel
def gemm_kernel(
    spec: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    mmas: Mmas,
    layouts: Layouts,
    loads: Loads,
    last: LastLoads,
    output: Output,
    scales: Scales | None,  # for promoted sums
    grid: TileGrid | GroupedGrid,
    problem: Extent,
    memory: SumMemory | None,  # for tiles that are cut along K
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    ring, shared, warp, beside = start(
        spec,
        [loads.a.atom, loads.b.atom, *(load.atom for load in last if load is not None), *output.atoms],
        layouts,
        beside_tiles(spec),
        wait=not spec.l2_prefetch,
        launch=not spec.late,
    )
    roles = GemmRoles(
        spec, epilogue, ring, shared, layouts=layouts, mmas=mmas, loads=loads, last=last, output=output,
        scales=scales, grid=grid, problem=problem, memory=memory, beside=beside,
    )  # fmt: skip
    if cutlass.const_expr(max(spec.last) > 0):
        tiles, rows = (shared.a, spec.last[0]) if spec.last[0] else (shared.b, spec.last[1])
        fill_rows(tiles, rows, spec.threads)
    if cutlass.const_expr(spec.l2_prefetch):
        roles.prefetch(warp)
        cute.arch.griddepcontrol_wait()
    skeleton.run_roles(spec, warp, roles)


@dataclass(frozen=True)
class GemmRoles:
    """All that the roles of a CTA know; `skeleton.Roles`."""

    spec: GemmSpec
    epilogue: Callable[..., Any]
    ring: pipeline.PipelineTmaAsync
    shared: SharedTiles
    layouts: Layouts
    mmas: Mmas
    loads: Loads
    last: LastLoads
    output: Output
    scales: Scales | None
    grid: TileGrid | GroupedGrid
    problem: Extent
    memory: SumMemory | None
    beside: BesideTiles

    def k_tiles(self) -> Int32:
        """K tiles of the whole of K."""
        return cute.ceil_div(self.problem.k, self.spec.tile_k)

    def tiles(self, cta: Cta, k_tiles: Int32, clusters: Int32, turns: int = 1) -> DenseTiles | GroupedTiles:
        """The tiles of this CTA's cluster, or those of each of `turns` warpgroups."""
        spec, grid, cluster, part = self.spec, self.grid, cta.cluster, None
        if spec.cluster_k > 1:
            part = KPart(cluster % spec.cluster_k, spec.cluster_k)
            cluster, clusters = cluster // spec.cluster_k, clusters // spec.cluster_k
        walk = (k_tiles, cluster, clusters, clusters * turns)
        if isinstance(grid, TileGrid):
            return DenseTiles(grid, spec.raster, spec.split_k, *walk, part)
        return GroupedTiles(grid, spec.raster, spec.cluster_rows, *walk)

    @cute.jit
    def prefetch(self, warp: Int32):
        """Producer warp: has L2 fetch the first K tiles of the larger operand."""
        cta = this_cta()
        if warp == self.spec.consumers * 4:
            if self.problem.m >= self.problem.n:
                self.prefetch_tile(cta, of_a=True)
            else:
                self.prefetch_tile(cta, of_a=False)

    @cute.jit
    def prefetch_tile(self, cta: Cta, of_a: cutlass.Constexpr):
        """The same of A or B."""
        spec, tiles = self.spec, self.tiles(cta, self.k_tiles(), skeleton.cluster_count())
        first, size = tiles.first(), tiles.size()
        if tiles.more(first, size):
            tile, _ = tiles.decode(first)
            k = tiles.k_range(tile)
            load, shared = (self.loads.a, self.shared.a) if of_a else (self.loads.b, self.shared.b)
            mode, rows = (0, spec.tile_m) if of_a else (1, spec.tile_n)
            place, peer = (cta.m, cta.n) if of_a else (cta.n, cta.m)
            at = tile.at.m if of_a else tile.at.n
            gX = cute.local_tile(load.coordinates, (rows, spec.tile_k), (None, None, None))
            peers = cute.make_layout(spec.cluster[1 - mode])
            part = tma.load_partition(load.atom, gX, shared, peers, peer)
            mine = part.tiles[None, at * spec.cluster[mode] + place, None, tile.at.batch]
            count = cutlass.min(k.end - k.first, Int32(spec.prefetched_stages(rows)))
            for i in cutlass.range(count, unroll=1):
                cute.prefetch(load.atom, mine[None, k.first + i])

    def produce(self) -> None:
        """Producer warp: for each work tile of this cluster, loads its K tiles into the ring."""
        spec, (load_a, load_b), shared = self.spec, self.loads, self.shared
        cta = this_cta()
        tile_a, tile_b, every = (spec.tile_m, spec.tile_k), (spec.tile_n, spec.tile_k), (None, None, None)
        gB = cute.local_tile(load_b.coordinates, tile_b, every)  # (bN, bK, restN, restK, L)
        # CTAs of one cluster row share A's tile, those of one column B's: each loads a slice for all.
        peers_a, peers_b = (cute.make_layout(spec.cluster[mode]) for mode in (1, 0))
        tBsB, tBgB = tma.load_partition(load_b.atom, gB, shared.b, peers_b, cta.m)
        first = cta.cluster % spec.cluster_k * spec.loading_ctas if spec.cluster_k > 1 else None
        a_mask, b_mask = tma.multicast_masks(spec.cluster, (cta.m, cta.n), first)
        tiles = self.tiles(cta, self.k_tiles(), skeleton.cluster_count())

        def rows_from(group: Group | None) -> tma.Partition:
            gA = cute.local_tile(
                from_row(load_a.coordinates, group), tile_a, every
            )  # (bM, bK, restM, restK, L)
            return tma.load_partition(load_a.atom, gA, shared.a, peers_a, cta.n)

        all_rows = rows_from(None)

        def load(tile: Tile, state: PipelineState) -> PipelineState:
            if isinstance(self.beside.sums, RingBarriers):
                self.beside.sums.await_ring(tile.number // tiles.clusters)
            m, n = tile.at.m * spec.cluster[0] + cta.m, tile.at.n * spec.cluster[1] + cta.n
            rows = all_rows if tile.group is None else rows_from(tile.group)
            a = tma.tile_loader(
                load_a.atom, rows.tiles[None, m, None, tile.at.batch], all_rows.shared, a_mask,
                spec.evict_first,
            )  # fmt: skip
            b = tma.tile_loader(
                load_b.atom, tBgB[None, n, None, tile.at.batch], tBsB, b_mask, spec.evict_first_b
            )
            k, whole = tiles.k_range(tile), tma.both(a, b)
            if self.last.a is not None:
                first, left = m * spec.tile_m, self.problem.m - m * spec.tile_m
                last = partial(last_rows_loader, self.last.a, shared.a, spec.last[0], first)
                part = tma.both(last(tile.at.batch, spec.evict_first), b)
            elif self.last.b is not None:
                first, left = n * spec.tile_n, self.problem.n - n * spec.tile_n
                last = partial(last_rows_loader, self.last.b, shared.b, spec.last[1], first)
                part = tma.both(a, last(tile.at.batch, spec.evict_first_b))
            else:
                return skeleton.load_stages(self.ring, state, k, whole)
            return self.load_either(state, k, whole, part, left)

        state = skeleton.load_tiles(spec.stages, tiles, load)
        if spec.late:
            cute.arch.griddepcontrol_launch_dependents()
        # Peers may still write into this CTA's shared memory, or signal its barriers: stay until then.
        self.ring.producer_tail(state)

    @cute.jit
    def load_either(
        self,
        state: PipelineState,
        k: KRange,
        whole: cutlass.Constexpr,
        part: cutlass.Constexpr,
        left: Int32,
    ) -> PipelineState:
        """Loads of a tile, in part where it has `left` rows and no more are to be loaded."""
        spec = self.spec
        if left <= max(spec.last):
            state = skeleton.load_stages(expecting(self.ring, spec.last_stage_bytes), state, k, part)
        else:
            state = skeleton.load_stages(self.ring, state, k, whole)
        return state

    def assist(self) -> None:
        """Copying warp: for each work tile, the scales of its K tiles, into the stages of `produce`."""
        spec, tiles_of_scales, staged = self.spec, self.spec.scales, self.beside.scales
        assert self.scales is not None and tiles_of_scales is not None and staged is not None
        scale_a, scale_b = self.scales
        cta = this_cta()
        tiles = self.tiles(cta, self.k_tiles(), skeleton.cluster_count())

        def load(tile: Tile, state: PipelineState) -> PipelineState:
            m = (tile.at.m * spec.cluster[0] + cta.m) * spec.tile_m
            n = (tile.at.n * spec.cluster[1] + cta.n) * spec.tile_n
            of_a = scale_a if tile.group is None else rows_of(scale_a, tile.group)
            scales = Scales(of_a[None, None, tile.at.batch], scale_b[None, None, tile.at.batch])
            loader = ScaleLoader(self.ring, tiles_of_scales, staged, scales, m, n)
            return loader.copy(state, *tiles.k_range(tile))

        skeleton.load_tiles(spec.stages, tiles, load)

    def consume(self, group: Int32) -> None:
        """Consumer warpgroup number `group`: main loop and epilogue of its share of the tiles."""
        spec, (sA, sB, sD) = self.spec, self.shared
        if spec.promotion is not None:
            sB = held_address(sB, self.layouts.b.inner)
        staging = sD[None, None, None, group]
        cta, clusters = this_cta(), skeleton.cluster_count()
        consumer = Consumer(group, cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
        share = warpgroup_share(spec, self.mmas.main, sA, sB, consumer)
        tiles = self.tiles(cta, self.k_tiles(), clusters, turns=2 if spec.pingpong else 1)
        function = inner_of(self.epilogue)
        epilogue = epi.Epilogue(spec.epilogue, function, self.mmas.epilogue, staging, consumer)
        skeleton.consume_tiles(spec, tiles, GemmConsumer(self, tiles, cta, share, epilogue), group)


class Walk(NamedTuple):
    """Carried from tile to tile. Of promoted sums: `NextStage.ready`, and K tiles of the next tile that are
    summed already."""

    position: Int32 | GroupPosition
    state: PipelineState
    ready: Boolean
    done: Int32


class OutputTile(NamedTuple):
    """K tiles of a warpgroup's tile, where it lies in D, the operands of its epilogue."""

    k: KRange
    region: epi.Region
    operands: epi.Operands


@dataclass(frozen=True)
class GemmConsumer:
    """A consumer warpgroup's work on its tiles; `skeleton.TileConsumer`."""

    roles: GemmRoles
    tiles: DenseTiles | GroupedTiles
    cta: Cta
    share: Share
    epilogue: epi.Epilogue
    factors: ChunkFactors | None = None

    def begin(self, position: Int32 | GroupPosition, state: PipelineState) -> tuple["GemmConsumer", Walk]:
        """The consumer with its factors; nothing is summed yet."""
        roles, factors = self.roles, None
        if roles.spec.scales is not None and roles.beside.scales is not None:
            zero = roles.problem.k >> 31
            factors = ChunkFactors(
                roles.spec.scales, roles.beside.scales, roles.mmas.main, self.share.row,
                self.epilogue.consumer, zero,
            )  # fmt: skip
        if roles.spec.ahead:
            self.share.fragments.acc.fill(0.0)
        return replace(self, factors=factors), Walk(position, state, Boolean(False), Int32(0))

    def prepare(self, tile: Tile) -> OutputTile:
        """Loads what the epilogue needs early."""
        k = self.tiles.k_range(tile)
        roles, at, group = self.roles, tile.at, tile.group
        spec, cta = roles.spec, self.cta
        m = (at.m * spec.cluster[0] + cta.m) * spec.tile_m + self.share.row
        n = (at.n * spec.cluster[1] + cta.n) * spec.tile_n
        rows, operands = roles.problem.m, roles.output.operands
        if group is not None:
            rows, operands = group.rows, tuple(rows_of(operand, group) for operand in operands)
        region = epi.Region(
            (m, n, at.batch * spec.split_k + at.split), (rows, roles.problem.n, self.tiles.slices())
        )
        return OutputTile(k, region, self.epilogue.prefetch(operands, region))

    def compute(self, tile: Tile, output: OutputTile, walk: Walk) -> Walk:
        """The main loop, of one level of sums or of two."""
        spec, ring, mma, fragments = (
            self.roles.spec,
            self.roles.ring,
            self.roles.mmas.main,
            self.share.fragments,
        )
        stages = output.k.end - output.k.first
        if spec.promotion is None:
            turn = skeleton.pass_turn(self.epilogue.consumer.warpgroup) if spec.pingpong else None
            state = main_loop(ring, walk.state, mma, fragments, stages, pass_turn=turn)
            return walk._replace(state=state)
        if not spec.ahead:
            fragments.acc.fill(0.0)
        stage, left = NextStage(walk.state, walk.ready), stages - walk.done
        stage = promoted_loop(ring, stage, mma, fragments, left, self.factors, spec.two_partial_sets)
        return walk._replace(state=stage.state, ready=stage.ready)

    def finish(self, tile: Tile, output: OutputTile, walk: Walk, more: Boolean) -> Walk:
        """The epilogue; perhaps the next tile's first stage is multiplied beside it."""
        if not self.roles.spec.ahead:
            self.store(tile, output, more)
            return walk
        ring, mma, fragments = self.roles.ring, self.roles.mmas.main, self.share.fragments
        ahead = overlapped_set(mma, self.factors)
        stage = NextStage(walk.state, walk.ready)
        begin_ahead(ring, stage, more, mma, fragments, ahead, self.factors)
        self.store(tile, output, more)
        state = end_ahead(ring, walk.state, more, fragments.acc, ahead, self.factors)
        return walk._replace(state=state, ready=Boolean(False), done=Int32(1))

    @cute.jit
    def store(self, tile: cutlass.Constexpr, output: cutlass.Constexpr, more: Boolean):
        """Stores the tile; one that is cut along K only where this warpgroup has the sums of all pieces."""
        acc = self.share.fragments.acc
        gated = isinstance(self.epilogue.function, GatedEpilogue)
        store = partial(
            gated_tile.store_tile if gated else epi.store_tile,
            self.epilogue, by_rows(acc), output.operands, output.region,
            self.gated_writers(output.region) if gated else self.writer(tile, output.region),
        )  # fmt: skip
        if cutlass.const_expr(self.roles.output.partials is not None):
            store = partial(store, reduction=self.reduction(output.region))
        if cutlass.const_expr(self.roles.spec.stream_k):
            whole = output.k.end - output.k.first == self.tiles.k_tiles
            if not whole:
                whole = self.partial_sums(tile).keep_or_leave(acc)
            if whole:
                store()
        elif cutlass.const_expr(self.roles.spec.cluster_k > 1):
            if self.cluster_sums(tile).gather(acc, more):
                store()
        else:
            store()

    def reduction(self, region: epi.Region) -> WarpgroupReduction:
        """Of the tile's rows or columns, beside D."""
        assert isinstance(self.roles.epilogue, ReducedEpilogue) and self.roles.output.partials is not None
        return WarpgroupReduction.of_tile(
            self.roles.epilogue, self.roles.output.partials, region, self.epilogue.plan.tile,
            self.epilogue.consumer.thread,
        )  # fmt: skip

    def cluster_sums(self, tile: Tile) -> ClusterSums | RingSums:
        """This warpgroup's sums of its part of a tile whose K the CTAs of the cluster share."""
        tiles, roles, consumer = self.tiles, self.roles, self.epilogue.consumer
        assert isinstance(tiles, DenseTiles) and tiles.part is not None
        (rank, count), number, sums = tiles.part, tile.number // tiles.clusters, roles.beside.sums
        spec, cta = roles.spec, self.cta
        place = Place(cta.m + cta.n * spec.cluster[0], spec.loading_ctas)
        if isinstance(sums, RingBarriers):
            return RingSums(sums, roles.shared.a, spec.shared_sums, rank, number, consumer, place)
        assert sums is not None
        return ClusterSums(sums, rank, count, number, consumer, place)

    def partial_sums(self, tile: Tile) -> PartialSums:
        """This warpgroup's piece of its part of a tile that is cut.

        Along the K tiles each next piece has another tile or another cluster: their sum numbers the pieces.
        """
        spec, tiles, consumer = self.roles.spec, self.tiles, self.epilogue.consumer
        assert isinstance(tiles, DenseTiles) and self.roles.memory is not None
        share, number = tiles.grid.cut.share, tile.number
        first = number * tiles.k_tiles // share
        last = ((number + 1) * tiles.k_tiles - 1) // share
        piece = Piece(number + first, last - first + 1, tiles.cluster - first)
        own = (self.cta.m * spec.cluster[1] + self.cta.n) * spec.consumers + consumer.warpgroup
        part = Part(own, spec.cluster[0] * spec.cluster[1] * spec.consumers)
        return PartialSums(self.roles.memory, self.roles.beside.flags, piece, part, consumer)

    def gated_writers(self, region: epi.Region) -> gated_tile.Writers:
        """Stores to D of half of the columns, and to the product where that is kept."""
        plan, sD, thread = self.epilogue.plan, self.epilogue.staging, self.epilogue.consumer.thread
        output, (m, n, slices) = self.roles.output, region.extent

        def to(store: tma.TmaCopy, columns: Int32) -> Callable:
            if plan.use_tma:
                return epi.tma_writer(store.atom, store.coordinates, sD, plan.subtile)
            return epi.plain_writer(store.coordinates, sD, (m, columns, slices), thread)

        result = to(tma.TmaCopy(output.atom, output.coordinates), n // 2)
        return gated_tile.Writers(result, None if output.product is None else to(output.product, n))

    def writer(self, tile: Tile, region: epi.Region) -> Any:
        """Stores of the tile's staging buffers: by TMA, by threads, or where rows are in groups by both."""
        plan, sD, thread = self.epilogue.plan, self.epilogue.staging, self.epilogue.consumer.thread
        output, group = self.roles.output, tile.group
        if group is None and plan.use_tma:
            return epi.tma_writer(output.atom, output.coordinates, sD, plan.subtile)
        mD = output.coordinates if group is None else rows_of(output.tensor, group)
        by_threads = epi.plain_writer(mD, sD, region.extent, thread)
        if not plan.use_tma:
            return by_threads
        by_tma = epi.tma_writer(output.atom, from_row(output.coordinates, group), sD, plan.subtile)
        return epi.ClippedWriter(by_tma, by_threads, group.rows)
