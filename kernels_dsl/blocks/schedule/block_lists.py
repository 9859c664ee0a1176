"""Lists of kept blocks, and the order in which their products are worked on."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.config.bsr import PAIR_ROWS, SECOND

LANES = 32


class BlockLists(NamedTuple):
    """The pattern, by blocks along D's blocked mode: int32.

    `table` (R, 4): number, first entry, entry after the last, and 0, of each list, longest first. An entry
    has `dense`, the number of the dense matrix' block along K, and `kept`, that of the kept block. `heavy`
    (1): how many lists at the start of `table` are much longer than the mean.

    Where lists may come in pieces, each piece has its line in the table, with `config.bsr.PIECE` in place of
    0; `heavy` (2) also has how many lines of the table count. `pieces` has at a piece's first entry the word
    of its `partial_sums.Piece`. Else `pieces` is None.

    For clusters that take two lists, a line's number is made of two: the smaller one, the other one times
    `config.bsr.PAIR_ROWS` (the same for a list without a partner), and SECOND in the second line of a pair,
    of which each is half of the work. `dense` and `kept` have two halves: the first list of a pair has its
    entries in the one, the second list in the other, at the same places, with numbers past the extents where
    one has no entry. A block of the dense matrix that both lists meet has one place, and SHARED added to its
    number in both halves.
    """

    table: cute.Tensor
    dense: cute.Tensor
    kept: cute.Tensor
    heavy: cute.Tensor
    pieces: cute.Tensor | None = None


class ListEnds(NamedTuple):
    """Numbers past the blocks: kept ones, and the dense matrix' along K. A load there brings zeros."""

    kept: Int32
    dense: Int32


HEADER = 4
"""Words before the table in the one tensor of a pattern's lists: `heavy`, and what aligns the table."""


def unpack_lists(packed: cute.Tensor, lists: Int32, entries: Int32, split: bool = False) -> BlockLists:
    """The parts of one int32 vector: `heavy` and three words, table, dense, kept; 16-byte aligned.

    With `split` `pieces` follow, and there are as many lines in the table as the vector's extent says.
    """
    if split:
        lists = (packed.shape[0] - HEADER - 3 * entries) // 4
    base = packed.iterator
    dense = base + HEADER + lists * 4
    table = cute.make_layout((lists, 4), stride=(4, 1))
    return BlockLists(
        cute.make_tensor(base + HEADER, table),
        cute.make_tensor(dense, cute.make_layout(entries)),
        cute.make_tensor(dense + entries, cute.make_layout(entries)),
        cute.make_tensor(base, cute.make_layout(2 if split else 1)),
        cute.make_tensor(dense + 2 * entries, cute.make_layout(entries)) if split else None,
    )


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
    """A work item: cluster tile along the blocked mode (negative: there is none), panel of the dense mode
    counted through all batches (and PIECE), entries of its list.
    """

    tile: Int32
    panel: Int32
    begin: Int32
    end: Int32


@cute.jit
def of_pair(word: Int32, rank: Int32) -> tuple[Int32, Int32]:
    """Number of the list, and which of a panel's two tiles, of CTA `rank` of a cluster that takes two lists.

    A pair's two lists are worked on in one tile, a list without a partner in both.
    """
    number, other = word % PAIR_ROWS, (word // PAIR_ROWS) % PAIR_ROWS
    part = rank
    if number != other:
        part = word // SECOND
        if rank == 1:
            number = other
    return number, part


@cute.jit
def entries_of_pair(item: ListItem, rank: Int32, half: Int32) -> ListItem:
    """The item with the entries of CTA `rank` of a cluster that takes two lists, of `half` each."""
    begin, end = item.begin, item.end
    if rank == 1:
        if item.tile % PAIR_ROWS != (item.tile // PAIR_ROWS) % PAIR_ROWS:
            begin += half
            end += half
    return ListItem(item.tile, item.panel, begin, end)


class ListPlace(NamedTuple):
    """Place of a work item: its line in the table, which of the block's tiles it is, and its panel of the
    dense mode counted through all batches (negative: there is no item).
    """

    line: Int32
    part: Int32
    panel: Int32


@cute.jit
def list_place(work: Int32, grid: ListGrid, heavy: Int32, sub_tiles: cutlass.Constexpr) -> ListPlace:
    """Place of work item number `work`; none past the end. `heavy` is lists.heavy[0], read beforehand.

    Heavy lists first, with all panels: nobody should begin one when the others are about to end. Then, as
    among the heavy ones, chunk by chunk of panels, and in a chunk longest list first. The panels of one list
    are neighbours, then the `sub_tiles` tiles of one block.
    """
    inside = cutlass.min(work, grid.size - 1)
    plane = grid.tiles * grid.panels
    batch = Int32(0)
    if grid.batch > 1:
        batch = inside // plane
    remaining = inside - batch * plane
    start, tiles = Int32(0), heavy * sub_tiles
    if remaining >= tiles * grid.panels:
        remaining -= tiles * grid.panels
        start = tiles
        tiles = grid.tiles - tiles
    per_chunk = tiles * grid.chunk
    chunk = remaining // per_chunk
    remaining = remaining - chunk * per_chunk
    width = cutlass.min(grid.panels - chunk * grid.chunk, grid.chunk)
    position = remaining // width
    panel = chunk * grid.chunk + remaining - position * width
    position += start
    line = position // sub_tiles
    part = position - line * sub_tiles
    panel += batch * grid.panels
    if work >= grid.size:
        panel = Int32(-1)
    return ListPlace(line, part, panel)


@cute.jit
def place_word(lists: BlockLists, place: ListPlace) -> Int32:
    """The word of this lane for `list_item`: lanes 0 to 3 load the place's line of the table, 4 has its
    panel, 5 its part.

    A load of what is the same in all lanes would be waited for at once, and more registers are not to be had.
    """
    lane = cute.arch.lane_idx()
    word = place.panel
    if lane == 5:
        word = place.part
    if lane < 4:
        word = lists.table[place.line, lane]
    return word


@cute.jit
def list_item(word: Int32, pieces: cutlass.Constexpr, sub_tiles: cutlass.Constexpr) -> ListItem:
    """The work item whose `place_word` is `word`. `pieces`: lists come in pieces."""
    tile, panel = cute.arch.shuffle_sync(word, 0), cute.arch.shuffle_sync(word, 4)
    if cutlass.const_expr(sub_tiles > 1):
        tile = tile * sub_tiles + cute.arch.shuffle_sync(word, 5)
    if panel < 0:
        tile = Int32(-1)
    if cutlass.const_expr(pieces):
        panel += cute.arch.shuffle_sync(word, 3)
    return ListItem(tile, panel, cute.arch.shuffle_sync(word, 1), cute.arch.shuffle_sync(word, 2))


@cute.jit
def group_count(item: ListItem, units: cutlass.Constexpr) -> Int32:
    """Groups of `units` entries that an item's list makes; one, of zeros, where it is empty."""
    return cutlass.max((item.end - item.begin + units - 1) // units, Int32(1))


@cute.jit
def entries_of_lane(lists: BlockLists, at: Int32, end: Int32, ends: ListEnds) -> tuple[Int32, Int32]:
    """(dense, kept) of entry `at` + this lane; from `end` on, those of `ends`."""
    mine = at + cute.arch.lane_idx()
    dense, kept = ends.dense, ends.kept
    if mine < end:
        dense = lists.dense[mine]
        kept = lists.kept[mine]
    return dense, kept


@dataclass(frozen=True)
class ListScales:
    """The scales of an item's kept blocks, in its list's order: 32 are held, one a lane, 32 are ahead."""

    kept: cute.Tensor
    scales: cute.Tensor  # (blocks) float32
    begin: Int32
    end: Int32
    held: cute.Tensor  # (2) float32 registers

    @cute.jit
    def fetch(self, at: Int32) -> Float32:
        """The scale of entry `at` + this lane; 0 after the list's end."""
        scale = Float32(0.0)
        if at + cute.arch.lane_idx() < self.end:
            scale = self.scales[self.kept[at + cute.arch.lane_idx()]]
        return scale

    @cute.jit
    def of(self, number: Int32, unit: cutlass.Constexpr) -> Float32:
        """The scale of entry `number` + `unit` of the list; to be called for 0, 1, 2, ... by whole warps.

        A group of `unit`s begins at a `number` that is a multiple of their count, a divisor of 32.
        """
        if cutlass.const_expr(unit == 0):
            if number % LANES == 0:
                self.held[0] = self.held[1]
                self.held[1] = self.fetch(self.begin + number + LANES)
        return cute.arch.shuffle_sync(self.held[0], number % LANES + unit)


def list_scales(lists: BlockLists, scales: cute.Tensor, item: ListItem) -> ListScales:
    """The scales of the kept blocks of an item, of all of which are in `scales`."""
    held = cute.make_rmem_tensor(2, Float32)
    found = ListScales(lists.kept, scales, item.begin, item.end, held)
    held[1] = found.fetch(item.begin)
    return found
