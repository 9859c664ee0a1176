"""Rows of A and D in groups, each with a B of its own: the GPU reads where a group lies.

`offsets` (groups), int32, has the row before which a group ends; it starts where the one before ends. The
output tiles of a group are those of a GEMM of its rows alone, and come after those of the groups before it.
Rows of another group in a tile of A make rows that are not stored.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.pipeline import PipelineState

from kernels_dsl.blocks.hw.pipeline import skip
from kernels_dsl.blocks.schedule.scheduler import Raster, Tile, TileCoord, grouped_raster
from kernels_dsl.blocks.schedule.tile_source import KRange

LANES = 32
LAST_TILE = 2**31 - 1


class GroupedGrid(NamedTuple):
    """Extent of the problem: all that it takes to find a tile."""

    offsets: cute.Tensor  # (groups) int32
    rows: Int32  # of all groups
    n: Int32  # cluster tiles along N

    def most(self, tile_m: int) -> Int32:
        """Cluster tiles of `tile_m` rows at most, whatever the offsets."""
        groups = self.offsets.shape[0]
        return (self.rows + groups * (tile_m - 1)) // tile_m * self.n


class Cursor(NamedTuple):
    """Place in the offsets from which the search for a later tile goes on: 32 groups from `block` on, and the
    number of tiles before them."""

    block: Int32
    before: Int32


class Group(NamedTuple):
    """A group of rows: its number, first row, number of rows, number of tiles before it, and the cursor from
    which a later tile is searched for."""

    number: Int32
    start: Int32
    rows: Int32
    tiles_before: Int32
    cursor: Cursor


@cute.jit
def find_group(index: Int32, grid: GroupedGrid, tile_m: cutlass.Constexpr, cursor: Cursor) -> Group:
    """The group of cluster tile number `index`; beyond the last tile one without rows after all tiles.

    All lanes of a warp take part, with the same index: each looks at one of 32 groups at a time. Rows beyond
    all rows, and groups that end before they start, do not exist.
    """
    lane = cute.arch.lane_idx()
    groups = cute.size(grid.offsets)
    block, before = cursor.block, cursor.before
    number, start, rows, in_block = Int32(0), Int32(0), Int32(0), Int32(0)
    searching = block < groups
    while searching:
        g = block + lane
        begin, end = Int32(0), Int32(0)
        if g < groups:
            end = cutlass.min(cutlass.max(grid.offsets[g], Int32(0)), grid.rows)
            if g > 0:
                begin = cutlass.min(cutlass.max(grid.offsets[g - 1], Int32(0)), grid.rows)
        own = cutlass.max(end - begin, Int32(0))
        tiles = (own + (tile_m - 1)) // tile_m * grid.n
        upto = tiles
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, offset=1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                upto = upto + other
        after = cute.arch.vote_ballot_sync(before + upto > index)
        if after != 0:
            first = cute.arch.popc(~after & (after - 1))  # the lowest bit that is set
            number = block + first
            start = cute.arch.shuffle_sync(begin, first)
            rows = cute.arch.shuffle_sync(own, first)
            in_block = cute.arch.shuffle_sync(upto - tiles, first)
            searching = cutlass.Boolean(False)
        else:
            before = before + cute.arch.shuffle_sync(upto, LANES - 1)
            block = block + LANES
            searching = block < groups
    uniform = cute.arch.make_warp_uniform
    block, before = uniform(block), uniform(before)
    found = before + uniform(in_block)
    return Group(uniform(number), uniform(start), uniform(rows), found, Cursor(block, before))


def first_cursor() -> Cursor:
    """Start of a search through all groups."""
    return Cursor(Int32(0), Int32(0))


def tile_count(grid: GroupedGrid, tile_m: int) -> Int32:
    """Cluster tiles of all groups. All lanes of a warp take part."""
    return find_group(Int32(LAST_TILE), grid, tile_m, first_cursor()).tiles_before


@cute.jit
def decode_group_tile(
    index: Int32, grid: GroupedGrid, tile_m: cutlass.Constexpr, raster: cutlass.Constexpr, cursor: Cursor
) -> tuple[TileCoord, Group]:
    """Cluster tile number `index`, its batch the group's number, m counted from the group's start; the group.
    Beyond the last tile one at the origin, of a group without rows.

    `raster`: a `Raster`. `cursor`: that of an earlier tile's group, or the first.
    """
    group = find_group(index, grid, tile_m, cursor)
    in_group = index - group.tiles_before if group.rows > 0 else Int32(0)
    tiles_m = cutlass.max((group.rows + (tile_m - 1)) // tile_m, Int32(1))
    if cutlass.const_expr(raster.along_m):
        m, n = grouped_raster(in_group, tiles_m, grid.n, raster.group)
    else:
        n, m = grouped_raster(in_group, grid.n, tiles_m, raster.group)
    return TileCoord(m, n, group.number, Int32(0)), group


class GroupPosition(NamedTuple):
    """Number of a cluster tile, and the cursor from which its group is searched for."""

    cursor: Cursor
    number: Int32


@dataclass(frozen=True)
class GroupedTiles:
    """A `TileSource`: cluster tiles of all groups, which clusters take as those of `DenseTiles`."""

    grid: GroupedGrid
    raster: Raster
    tile_m: int  # rows of a cluster's tile
    k_tiles: Int32
    cluster: Int32
    clusters: Int32
    stride: Int32  # from one position to the next: `clusters`, or twice as many where warpgroups take turns
    looks_ahead = True

    def first(self) -> GroupPosition:
        """The first of this cluster's tiles."""
        return GroupPosition(first_cursor(), self.cluster)

    def slices(self) -> Int32:
        """The number of groups: the third extent of the output."""
        return cute.size(self.grid.offsets)

    def size(self) -> Int32:
        """The number of tiles of all groups."""
        return tile_count(self.grid, self.tile_m)

    def more(self, position: GroupPosition, size: Int32) -> Boolean:
        """True where there is such a tile."""
        return position.number < size

    def decode(self, position: GroupPosition) -> tuple[Tile, GroupPosition]:
        """The tile with its coordinates and group."""
        cursor, number = position
        at, group = decode_group_tile(number, self.grid, self.tile_m, self.raster, cursor)
        return Tile(number, at, group), GroupPosition(group.cursor, number)

    def next(self, position: GroupPosition) -> GroupPosition:
        """The position after that."""
        return GroupPosition(position.cursor, position.number + self.stride)

    def k_range(self, tile: Tile) -> KRange:
        """All K tiles."""
        return KRange(Int32(0), self.k_tiles)

    def leave_first(
        self, position: GroupPosition, state: PipelineState
    ) -> tuple[GroupPosition, PipelineState]:
        """Past the first tile, which is the other warpgroup's."""
        state = skip(state, self.k_tiles)
        return GroupPosition(position.cursor, position.number + self.clusters), state

    def leave_other(
        self, tile: Tile, position: GroupPosition, state: PipelineState
    ) -> tuple[GroupPosition, PipelineState]:
        """Past the other warpgroup's tile before the one at `position`."""
        return position, skip(state, self.k_tiles)


def from_row(tma_tensor: cute.Tensor, group: Group | None) -> cute.Tensor:
    """Coordinates (M, …) for TMA, counted from the group's first row; as they are without a group."""
    if group is None:
        return tma_tensor
    return cute.domain_offset((group.start, 0, 0), tma_tensor)


def rows_of(mX: Any, group: Group) -> Any:
    """The group's rows of a tensor (M, …) with as many as all groups; anything else as it is."""
    if not isinstance(mX, cute.Tensor):
        return mX
    stride = mX.stride[0]
    if isinstance(stride, int) and stride == 0:
        return mX
    layout = cute.make_layout((group.rows, *mX.shape[1:]), stride=mX.stride)
    step = (stride if isinstance(stride, int) else cute.get_divisibility(stride)) * mX.element_type.width // 8
    alignment = min(mX.iterator.alignment, step & -step)
    return cute.make_tensor((mX.iterator + group.start * stride).align(alignment), layout)
