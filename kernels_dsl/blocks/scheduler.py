"""Which output tile a CTA works on next: a static persistent schedule with a rasterisation that L2 likes.

Clusters walk the list of cluster tiles with a stride of the number of clusters. Neighbours in the
list are neighbours in the output: `group` tiles along one mode are visited before the next along the
other, so that the tiles in flight at one time share rows of A and columns of B in L2.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class TileCoord(NamedTuple):
    """Coordinates of a CTA's work: tile along M and N, batch, and split of K."""

    m: Int32
    n: Int32
    batch: Int32
    split: Int32


class TileGrid(NamedTuple):
    """Extent of the problem in cluster tiles, batches and splits."""

    m: Int32
    n: Int32
    batch: Int32
    splits: int

    @property
    def size(self) -> Int32:
        """Number of cluster tiles in all."""
        return self.m * self.n * self.batch * self.splits


@cute.jit
def grouped_raster(
    index: Int32, extent_in: Int32, extent_out: Int32, group: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """Position `index` of a walk in which `group` tiles of the inner mode go before a step of the outer.

    Returns (inner, outer). The last group holds what is left, extent_in % group.
    """
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
    rest = index // plane
    in_plane = index - rest * plane
    if cutlass.const_expr(along_m):
        m, n = grouped_raster(in_plane, grid.m, grid.n, group)
    else:
        n, m = grouped_raster(in_plane, grid.n, grid.m, group)
    batch = rest // grid.splits
    return TileCoord(m, n, batch, rest - batch * grid.splits)


@cute.jit
def split_range(k_tiles: Int32, split: Int32, splits: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """First and past-the-last K tile of a split; splits differ by one tile at most."""
    if cutlass.const_expr(splits == 1):
        return Int32(0), k_tiles
    return k_tiles * split // splits, k_tiles * (split + 1) // splits
