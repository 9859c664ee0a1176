"""Which output tile a CTA works on next: a static persistent schedule with a rasterisation that L2 likes.

Clusters walk the list of cluster tiles with a stride of the number of clusters. Neighbours in the
list are neighbours in the output: `group` tiles along one mode are visited before the next along the
other, so that the tiles in flight at one time share rows of A and columns of B in L2.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64


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
    """What `decode_tile` divides by."""

    plane: Divisor
    per_group: Divisor
    last_width: Divisor
    """Tiles of the inner mode in the last group."""


class SharedTiles(NamedTuple):
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
    """Where `decode_tile` is called with one group and order."""
    shared: SharedTiles | None = None
    """Tiles that are cut along K; their sums are those of `blocks.shared_tiles`."""

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
    rest, in_plane = Int32(0), index
    if cutlass.const_expr(grid.divisors is not None):
        rest, in_plane = grid.divisors.plane.into(index)
    else:
        rest = index // plane
        in_plane = index - rest * plane
    if cutlass.const_expr(along_m):
        m, n = grouped_raster(in_plane, grid.m, grid.n, group, grid.divisors)
    else:
        n, m = grouped_raster(in_plane, grid.n, grid.m, group, grid.divisors)
    batch = rest // grid.splits
    return TileCoord(m, n, batch, rest - batch * grid.splits)


@cute.jit
def split_range(k_tiles: Int32, split: Int32, splits: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """First and past-the-last K tile of a split; splits differ by one tile at most."""
    if cutlass.const_expr(splits == 1):
        return Int32(0), k_tiles
    return k_tiles * split // splits, k_tiles * (split + 1) // splits


@cute.jit
def first_work(grid: TileGrid, cluster: Int32, k_tiles: Int32) -> Int32:
    """Number of the first cluster tile that `cluster` works on."""
    work = cluster
    if cutlass.const_expr(grid.shared is not None):
        begin, tiles = cluster * grid.shared.share, grid.shared.tiles
        work = tiles + cluster
        if begin < tiles * k_tiles:
            work = begin // k_tiles
    return work


@cute.jit
def next_work(grid: TileGrid, work: Int32, cluster: Int32, clusters: Int32, k_tiles: Int32) -> Int32:
    """The one after cluster tile `work`."""
    following = work + clusters
    if cutlass.const_expr(grid.shared is not None):
        tiles = grid.shared.tiles
        end = cutlass.min((cluster + 1) * grid.shared.share, tiles * k_tiles)
        if work < tiles:
            following = tiles + cluster
            if (work + 1) * k_tiles < end:
                following = work + 1
    return following


@cute.jit
def k_range(grid: TileGrid, work: Int32, cluster: Int32, k_tiles: Int32) -> tuple[Int32, Int32]:
    """First and past-the-last K tile that `cluster` does of cluster tile `work`."""
    first, end = Int32(0), k_tiles
    if cutlass.const_expr(grid.shared is not None):
        if work < grid.shared.tiles:
            begin = cluster * grid.shared.share - work * k_tiles
            first, end = cutlass.max(begin, Int32(0)), cutlass.min(begin + grid.shared.share, k_tiles)
    return first, end


@cute.jit
def piece_of(grid: TileGrid, work: Int32, cluster: Int32, k_tiles: Int32) -> tuple[Int32, Int32, Int32]:
    """(number of a shared tile's first piece, how many it has, which of them is `cluster`'s).

    Along the K tiles each next piece has another tile or another cluster, so their sum numbers the pieces.
    """
    share = grid.shared.share
    first = work * k_tiles // share
    last = ((work + 1) * k_tiles - 1) // share
    return work + first, last - first + 1, cluster - first
