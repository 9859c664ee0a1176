"""A static persistent schedule of output tiles, with a rasterisation that L2 likes.

Clusters walk the list of cluster tiles with a stride of the number of clusters. Neighbours in the
list are neighbours in the output: `group` tiles along one mode are visited before the next along the
other, so that the tiles in flight at one time share rows of A and columns of B in L2.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64
from cutlass.pipeline import PipelineState

from kernels_dsl.blocks.hw.pipeline import skip
from kernels_dsl.blocks.schedule.tile_source import KRange


class TileCoord(NamedTuple):
    """Coordinates of a CTA's work: tile along M and N, batch, and split of K."""

    m: Int32
    n: Int32
    batch: Int32
    split: Int32


class Divisor(NamedTuple):
    """A divisor from 1 to 2^31 - 1, and what takes the place of dividing 0 to 2^31 - 1 by it.

    With 2^shift the least power of two that is no smaller, the quotient of n is n * magic / 2^(31 + shift),
    rounded down: Granlund and Montgomery, "Division by invariant integers using multiplication", 1994.
    """

    value: Int32
    magic: Uint32
    shift: Int32

    @staticmethod
    def of(value: Int32) -> "Divisor":
        """Worked out once, on the host."""
        shift = Int32(0)
        for bit in range(31):
            shift += Int32(value > (1 << bit))
        magic = (Int64(1) << (Int64(shift) + 31)) // Int64(value) + 1
        return Divisor(value, Uint32(magic), shift)

    def into(self, n: Int32) -> tuple[Int32, Int32]:
        """(n // value, n % value)."""
        high = (Uint64(Uint32(n) << 1) * Uint64(self.magic)) >> 32
        quotient = Int32(Uint32(high) >> Uint32(self.shift))
        return quotient, n - quotient * self.value


class GridDivisors(NamedTuple):
    """The divisors of `decode_tile`."""

    plane: Divisor
    per_group: Divisor
    last_width: Divisor
    """Tiles of the inner mode in the last group."""


class CutTiles(NamedTuple):
    """The first `tiles` cluster tiles, K tile after K tile: `share` of these for each cluster."""

    tiles: Int32
    share: Int32


class TileGrid(NamedTuple):
    """Extent of the problem in cluster tiles, batches and splits."""

    m: Int32
    n: Int32
    batch: Int32
    splits: int
    divisors: GridDivisors | None = None
    """Set for a launch that calls `decode_tile` with one group and order."""
    cut: CutTiles | None = None
    """Tiles that are cut along K; their sums meet in `blocks.reduce.partial_sums`."""

    @property
    def size(self) -> Int32:
        """Number of cluster tiles in all."""
        return self.m * self.n * self.batch * self.splits


def with_divisors(grid: TileGrid, group: int, along_m: bool) -> TileGrid:
    """`grid` with divisors for `decode_tile` with these arguments; on the host."""
    inner, outer = (grid.m, grid.n) if along_m else (grid.n, grid.m)
    last = inner - (inner - 1) // group * group
    sizes = cutlass.max(grid.m * grid.n, Int32(1)), cutlass.max(outer, Int32(1)) * group, last
    return grid._replace(divisors=GridDivisors(*(Divisor.of(Int32(size)) for size in sizes)))


@cute.jit
def grouped_raster(
    index: Int32,
    extent_in: Int32,
    extent_out: Int32,
    group: cutlass.Constexpr,
    divisors: GridDivisors | None = None,
) -> tuple[Int32, Int32]:
    """Position `index` of a walk in which `group` tiles of the inner mode go before a step of the outer.

    Returns (inner, outer). The last group holds what is left, extent_in % group.
    """
    if cutlass.const_expr(divisors is not None):
        number, within = divisors.per_group.into(index)
        first, outer = number * group, within // group
        inner = within - outer * group
        if extent_in - first < group:
            outer, inner = divisors.last_width.into(within)
        return first + inner, outer
    per_group = group * extent_out
    number = index // per_group
    within = index - number * per_group
    first = number * group
    width = cutlass.min(extent_in - first, Int32(group))
    outer = within // width
    return first + within - outer * width, outer


@cute.jit
def decode_tile(
    index: Int32, grid: TileGrid, group: cutlass.Constexpr, along_m: cutlass.Constexpr
) -> TileCoord:
    """Cluster tile number `index`: the mn-plane varies fastest, then the split of K, then the batch."""
    plane = grid.m * grid.n
    plane_index, in_plane = Int32(0), index
    if cutlass.const_expr(grid.divisors is not None):
        plane_index, in_plane = grid.divisors.plane.into(index)
    else:
        plane_index = index // plane
        in_plane = index - plane_index * plane
    if cutlass.const_expr(along_m):
        m, n = grouped_raster(in_plane, grid.m, grid.n, group, grid.divisors)
    else:
        n, m = grouped_raster(in_plane, grid.n, grid.m, group, grid.divisors)
    batch = plane_index // grid.splits
    return TileCoord(m, n, batch, plane_index - batch * grid.splits)


@cute.jit
def split_range(k_tiles: Int32, split: Int32, splits: cutlass.Constexpr) -> KRange:
    """The K tiles of a split; splits differ by one tile at most."""
    if cutlass.const_expr(splits == 1):
        return KRange(Int32(0), k_tiles)
    return KRange(k_tiles * split // splits, k_tiles * (split + 1) // splits)


class Raster(NamedTuple):
    """Order of a plane's tiles: `group` tiles along M or else N go before a step along the other mode."""

    group: int
    along_m: bool


class KPart(NamedTuple):
    """A CTA of `of` that share each tile's K: its number."""

    rank: Int32
    of: int


class Tile(NamedTuple):
    """A cluster's tile of the output."""

    number: Int32
    at: TileCoord
    group: Any = None
    """The `Group` from whose first row `at.m` counts, where rows are in groups."""


@dataclass(frozen=True)
class DenseTiles:
    """A `TileSource`: each cluster takes the tile with its own number, then every so many further on.

    Where tiles are cut along K, those come first. A position is a tile's number.
    """

    grid: TileGrid
    raster: Raster
    splits: int
    k_tiles: Int32
    cluster: Int32
    clusters: Int32
    stride: Int32  # from one position to the next: `clusters`, or twice as many where warpgroups take turns
    part: KPart | None = None
    looks_ahead = True

    @cute.jit
    def first(self) -> Int32:
        """The first of this cluster's tiles."""
        number, cut = self.cluster, self.grid.cut
        if cutlass.const_expr(cut is not None):
            begin, tiles = self.cluster * cut.share, cut.tiles
            number = tiles + self.cluster
            if begin < tiles * self.k_tiles:
                number = begin // self.k_tiles
        return number

    def slices(self) -> Int32:
        """Batches times splits: the third extent of the output."""
        return self.grid.batch * self.splits

    def size(self) -> Int32:
        """The number of tiles in all."""
        return self.grid.size

    def more(self, position: Int32, size: Int32) -> Boolean:
        """True where there is such a tile."""
        return position < size

    def coordinates(self, position: Int32) -> TileCoord:
        """Coordinates of the tile."""
        return decode_tile(position, self.grid, self.raster.group, self.raster.along_m)

    def decode(self, position: Int32) -> tuple[Tile, Int32]:
        """The tile with its coordinates."""
        return Tile(position, self.coordinates(position)), position

    @cute.jit
    def next(self, position: Int32) -> Int32:
        """The number of this cluster's tile after number `position`."""
        following, cut = position + self.stride, self.grid.cut
        if cutlass.const_expr(cut is not None):
            tiles = cut.tiles
            end = cutlass.min((self.cluster + 1) * cut.share, tiles * self.k_tiles)
            if position < tiles:
                following = tiles + self.cluster
                if (position + 1) * self.k_tiles < end:
                    following = position + 1
        return following

    @cute.jit
    def k_range(self, tile: Tile) -> KRange:
        """K tiles of its split, or this CTA's part of them; those of a cut tile that are this cluster's."""
        cut, part = self.grid.cut, self.part
        if cutlass.const_expr(part is not None):
            return split_range(self.k_tiles, part.rank, part.of)
        if cutlass.const_expr(cut is None):
            return split_range(self.k_tiles, tile.at.split, self.splits)
        first, end = Int32(0), self.k_tiles
        if tile.number < cut.tiles:
            begin = self.cluster * cut.share - tile.number * self.k_tiles
            first, end = cutlass.max(begin, Int32(0)), cutlass.min(begin + cut.share, self.k_tiles)
        return KRange(first, end)

    def leave_first(self, position: Int32, state: PipelineState) -> tuple[Int32, PipelineState]:
        """Past the first tile, which is the other warpgroup's."""
        state = skip(state, self._stages(position))
        return position + self.clusters, state

    def leave_other(self, tile: Tile, position: Int32, state: PipelineState) -> tuple[Int32, PipelineState]:
        """Past the other warpgroup's tile before the one at `position`."""
        return position, skip(state, self._stages(position - self.clusters))

    def _stages(self, position: Int32) -> Int32:
        """K tiles of a tile in a grid without cut ones."""
        if self.splits == 1:
            return self.k_tiles
        first, end = split_range(self.k_tiles, self.coordinates(position).split, self.splits)
        return end - first
