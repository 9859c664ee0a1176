"""The skeleton of the warp-specialised kernels of products: roles, loops over work tiles, ping-pong.

A kernel starts with `blocks.mainloop.operand_ring.start` and hands out roles with `run_roles`. Its producer
fills in a tile's loads for `load_tiles`, its consumers a `TileConsumer` for `consume_tiles`. Both walk
through a `TileSource`.

In ping-pong the two consumer warpgroups take turns with a tile each: the source moves a warpgroup past the
tiles of the other one, named barriers pass the tensor cores back and forth.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline
from cutlass.pipeline import PipelineState

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.epilogue.tile_store import Epilogue
from kernels_dsl.blocks.hw.barriers import NamedBarrier, give_turn, wait_turn
from kernels_dsl.blocks.hw.pipeline import consumer_state, producer_state, put
from kernels_dsl.blocks.hw.tma import TmaCopy
from kernels_dsl.blocks.schedule.tile_source import KRange


class Mmas(NamedTuple):
    """Matrix instructions of a warpgroup: the main loop's, and the epilogue's, 64 x epi_n."""

    main: cute.TiledMma
    epilogue: cute.TiledMma


class Loads(NamedTuple):
    """TMA loads of A (M, K, L) and B (N, K, L)."""

    a: TmaCopy
    b: TmaCopy


class Output(NamedTuple):
    """The output: TMA descriptor or None, D or its coordinates (M, N, L), operands of the epilogue."""

    atom: cute.CopyAtom | None
    coordinates: cute.Tensor
    operands: Operands
    tensor: cute.Tensor | None = None
    """D itself, where rows are in groups."""
    product: TmaCopy | None = None
    """Stores to the product, where it is kept beside a gated D: as those of D."""
    partials: cute.Tensor | None = None
    """Partial reductions (parts, lines, L) that are written beside D."""

    @property
    def atoms(self) -> tuple[cute.CopyAtom | None, ...]:
        """The TMA descriptors."""
        return (self.atom,) if self.product is None else (self.atom, self.product.atom)


class Cta(NamedTuple):
    """A CTA of a grid (cluster along M, along N, clusters): its place in its cluster, and the cluster."""

    m: Int32
    n: Int32
    cluster: Int32


def this_cta() -> Cta:
    """The CTA that runs."""
    return Cta(*cute.arch.block_idx())


def cluster_count() -> Int32:
    """Clusters of the grid."""
    return cute.arch.grid_dim()[2]


class Roles(Protocol):
    """All that a kernel's roles know, and one method a role."""

    def produce(self) -> None:
        """Role of the producer warp: the TMA loads."""

    def assist(self) -> None:
        """Role of a second producer warp, where `spec.assists`."""

    def consume(self, group: Int32) -> None:
        """Role of consumer warpgroup number `group`."""


@cute.jit
def run_roles(spec: cutlass.Constexpr, warp: Int32, roles: cutlass.Constexpr):
    """Gives each warpgroup its registers and its role. The last one is the producer, of which one warp loads,
    perhaps a second one too, and the others only give up their registers."""
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers.producer)
        if warp == spec.consumers * 4:
            roles.produce()
        if cutlass.const_expr(spec.assists):
            if warp == spec.consumers * 4 + 1:
                roles.assist()
    else:
        cute.arch.setmaxregister_increase(spec.registers.consumer)
        roles.consume(group)


@cute.jit
def load_tiles(stages: cutlass.Constexpr, tiles: cutlass.Constexpr, load: cutlass.Constexpr) -> PipelineState:
    """Producer warps: load(tile, state) for each tile, which returns the state after the tile's stages.

    `stages`: of the ring.
    """
    state = producer_state(stages)
    position, size = tiles.first(), tiles.size()
    while tiles.more(position, size):
        tile, position = tiles.decode(position)
        state = load(tile, state)
        position = tiles.next(position)
    return state


@cute.jit
def load_stages(
    ring: pipeline.PipelineTmaAsync,
    state: PipelineState,
    k_range: KRange,
    load: cutlass.Constexpr,
) -> PipelineState:
    """Fills a stage with load(K tile, stage, full barrier) for each K tile."""
    for k in cutlass.range(k_range.first, k_range.end, unroll=1):
        state = put(ring, state, partial(load, k))
    return state


class TileConsumer(Protocol):
    """The kernel's part of `consume_tiles`.

    `walk` is all that the loop carries from tile to tile: a record with the `position` in the source, the
    `state` of the ring, and more if the kernel likes.
    """

    epilogue: Epilogue

    def begin(self, position: Any, state: PipelineState) -> tuple["TileConsumer", Any]:
        """The consumer, ready for tiles, and the walk before the first."""

    def prepare(self, tile: Any) -> Any:
        """All that can be had before the warpgroup's turn comes."""

    def compute(self, tile: Any, prepared: Any, walk: Any) -> Any:
        """Main loop; in ping-pong it passes the turn after its last WGMMA. Returns the walk."""

    def finish(self, tile: Any, prepared: Any, walk: Any, more: Boolean) -> Any:
        """Epilogue. Returns the walk. `more`: there is another tile, where the source looks ahead."""


@cute.jit
def consume_tiles(spec: cutlass.Constexpr, tiles: cutlass.Constexpr, kernel: cutlass.Constexpr, group: Int32):
    """Consumer warpgroup number `group`: main loop and epilogue of its tiles. `kernel`: a `TileConsumer`."""
    # Names of their own: the loop would carry a `position` and a `state` beside those of its walk.
    first, start = tiles.first(), consumer_state(spec.stages)
    if cutlass.const_expr(spec.pingpong):
        if group == 1:
            give_turn(NamedBarrier.MMA_ORDER, Int32(0))
            first, start = tiles.leave_first(first, start)
    size = tiles.size()
    work, walk = kernel.begin(first, start)
    while tiles.more(walk.position, size):
        tile, position = tiles.decode(walk.position)
        walk = walk._replace(position=position)
        prepared = work.prepare(tile)
        if cutlass.const_expr(spec.pingpong):
            wait_turn(NamedBarrier.MMA_ORDER, group)
        if cutlass.const_expr(tiles.looks_ahead):
            walk = walk._replace(position=tiles.next(position))
        walk = work.compute(tile, prepared, walk)
        walk = work.finish(tile, prepared, walk, tiles.more(walk.position, size))
        if cutlass.const_expr(not tiles.looks_ahead):
            walk = walk._replace(position=tiles.next(position))
        if cutlass.const_expr(spec.pingpong):
            position, state = tiles.leave_other(tile, walk.position, walk.state)
            walk = walk._replace(position=position, state=state)
    work.epilogue.drain()


def pass_turn(group: Int32) -> Callable[[], None]:
    """`main_loop`'s `pass_turn` of warpgroup `group` of two in ping-pong."""
    return lambda: give_turn(NamedBarrier.MMA_ORDER, 1 - group)
