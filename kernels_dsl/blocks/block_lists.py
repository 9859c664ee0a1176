"""Lists of kept blocks, and the order in which their products are worked on."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LANES = 32


class BlockLists(NamedTuple):
    """The pattern, by blocks along D's blocked mode: int32 vectors.

    `order` (R): the lists, longest first. List r has the entries first[r] .. first[r + 1] - 1: `dense` is
    the number of the dense matrix' block along K, `kept` that of the kept block. `heavy` (1): how many lists
    at the start of `order` are much longer than the mean.
    """

    order: cute.Tensor
    first: cute.Tensor
    dense: cute.Tensor
    kept: cute.Tensor
    heavy: cute.Tensor


class ListGrid(NamedTuple):
    """Extent of the schedule: cluster tiles along D's blocked mode, panels of the dense mode, batches.

    `chunk` panels are worked on together: as many as stay in L2.
    """

    tiles: Int32
    panels: Int32
    batch: Int32
    chunk: Int32

    @property
    def size(self) -> Int32:
        """Number of work items."""
        return self.tiles * self.panels * self.batch


class ListItem(NamedTuple):
    """A work item: cluster tile along the blocked and the dense mode, batch, entries of its list."""

    tile: Int32
    panel: Int32
    batch: Int32
    begin: Int32
    end: Int32


@cute.jit
def work_number(turn: Int32, cluster: Int32, clusters: Int32) -> Int32:
    """The item that `cluster` of `clusters` works on in its turn number `turn`: dealt out and back again.

    Items come longest first, so whoever got the longest of one round gets the shortest of the next, and
    lists of uneven length add up to about the same for all. Only the last round may be short.
    """
    place = cluster
    if turn % 2 == 1:
        place = clusters - 1 - cluster
    return turn * clusters + place


@cute.jit
def list_item(work: Int32, grid: ListGrid, lists: BlockLists, sub_tiles: cutlass.Constexpr) -> ListItem:
    """Work item number `work`; past the end, the last one again, so that it may be fetched ahead.

    Heavy lists first, with all panels: nobody should begin one when the others are about to end. Then, as
    among the heavy ones, chunk by chunk of panels, and in a chunk longest list first. The panels of one list
    are neighbours, then the `sub_tiles` tiles of one block.
    """
    work = cutlass.min(work, grid.size - 1)
    plane = grid.tiles * grid.panels
    batch = work // plane
    rest = work - batch * plane
    start, tiles = Int32(0), lists.heavy[0] * sub_tiles
    if rest >= tiles * grid.panels:
        rest -= tiles * grid.panels
        start = tiles
        tiles = grid.tiles - tiles
    per_chunk = tiles * grid.chunk
    chunk = rest // per_chunk
    rest = rest - chunk * per_chunk
    width = cutlass.min(grid.panels - chunk * grid.chunk, grid.chunk)
    position = rest // width
    panel = chunk * grid.chunk + rest - position * width
    position += start
    place = position // sub_tiles
    block = lists.order[place]
    tile = block * sub_tiles + position - place * sub_tiles
    return ListItem(tile, panel, batch, lists.first[block], lists.first[block + 1])


@cute.jit
def group_count(item: ListItem, units: cutlass.Constexpr) -> Int32:
    """Groups of `units` entries that an item's list makes; one, of zeros, where it is empty."""
    return cutlass.max((item.end - item.begin + units - 1) // units, Int32(1))


@cute.jit
def entries_of_lane(lists: BlockLists, at: Int32, end: Int32, ends: tuple) -> tuple[Int32, Int32]:
    """(dense, kept) of entry `at` + this lane; behind `end`, the extents `ends` = (kept, dense).

    A load there brings zeros.
    """
    mine = at + cute.arch.lane_idx()
    dense, kept = ends[1], ends[0]
    if mine < end:
        dense = lists.dense[mine]
        kept = lists.kept[mine]
    return dense, kept
