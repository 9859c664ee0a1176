"""Keys and values in pages of a cache, by TMA: boxes of keys of one head, none of which crosses a page.

The page is a coordinate of the tensor map. A box that nobody reads has a page outside of the cache: TMA
writes zeros for it, reads nothing, and counts its bytes. A warp looks up the pages of 32 boxes at a time, a
lane each, one such group ahead of its use.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention.pages import page_of
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.swizzled_rows import PAIR, RowsTile

LANES = 32


class BoxSource(NamedTuple):
    """The pages of all sequences."""

    table: cute.Tensor | None
    """None: a page is a sequence."""
    page: cute.FastDivmodDivisorV2
    """Keys of a page."""
    count: Int32
    """Pages of the cache."""


class UnsettledSource(BoxSource):
    """The same before the kernel that may write them has ended."""


class BoxRange(NamedTuple):
    """Boxes of a sequence from key `begin` on; those before key `first` and from `end` on are not read."""

    sequence: Int32
    begin: Int32
    first: Int32
    end: Int32


class BoxPages(NamedTuple):
    """This lane's page of a group of boxes, and of the group after it."""

    now: Int32
    following: Int32


@cute.jit
def pages_of_group(source: BoxSource, boxes: BoxRange, box: cutlass.Constexpr[int], group: Int32) -> Int32:
    """This lane's page of group number `group` of boxes of `box` keys."""
    key = boxes.begin + (group * LANES + cute.arch.lane_idx()) * box
    page = source.count
    if (key < boxes.end) & (key + box > boxes.first):
        if cutlass.const_expr(source.table is None):
            page = boxes.sequence
        else:
            number, _ = divmod(key, source.page)
            if cutlass.const_expr(isinstance(source, UnsettledSource)):
                entry = source.table.iterator + cute.crd2idx((boxes.sequence, number), source.table.layout)
                page = cute.arch.load(entry, Int32, sem="relaxed", scope="gpu")
                page = cutlass.max(cutlass.min(page, source.count - 1), 0)
            else:
                page = page_of(source.table, boxes.sequence, number, source.count)
    return page


def first_pages(source: BoxSource, boxes: BoxRange, box: int) -> BoxPages:
    """The pages before the first box."""
    return BoxPages(*(pages_of_group(source, boxes, box, Int32(group)) for group in range(2)))


@cute.jit
def pages_at(
    source: BoxSource, boxes: BoxRange, box: cutlass.Constexpr[int], number: Int32, pages: BoxPages
) -> BoxPages:
    """The pages for box `number`, of those for the box before it."""
    now, following = pages
    if (number % LANES == 0) & (number > 0):
        now = following
        following = pages_of_group(source, boxes, box, number // LANES + 1)
    return BoxPages(now, following)


LoadBox = Callable[[Int32, Int32, Int32, cute.Pointer], None]
"""`load(page, number of a box in it, place in shared memory, barrier)`."""


def boxes_layout(tile: RowsTile, places: int) -> cute.ComposedLayout:
    """Layout (rows, width, column blocks, places) of tiles in shared memory, each as a `RowsTile`."""
    shape = (tile.rows, tile.width, tile.blocks, places)
    stride = (tile.width, 1, tile.rows * tile.width, tile.rows * tile.columns)
    return cute.make_composed_layout(
        cute.make_swizzle(3 if tile.width == 64 else 2, 4, 3), 0, cute.make_layout(shape, stride=stride)
    )


def box_atom(cache: cute.Tensor, tile: RowsTile, layout: cute.ComposedLayout) -> tma.TmaCopy:
    """Loads of boxes, one instruction each, from a cache (pages, keys, heads, D), D as of the tile; of 8-bit
    elements in pairs.

    The tensor map has a mode of its own for the column blocks: a swizzled box is no wider than one.
    """
    pages, keys, heads, _ = cache.shape
    step, first = cache.stride, cache.iterator
    if cache.element_type.width == 8:
        step, first = [x // 2 for x in step], cute.recast_ptr(first, dtype=PAIR)
    by_block = cute.make_layout(
        (keys, tile.width, tile.blocks, heads, pages), stride=(step[1], 1, tile.width, step[2], step[0])
    )
    view = cute.make_tensor(first, by_block)
    return tma.make_load_atom(view, layout, (tile.rows, tile.width, tile.blocks))


def box_loader(
    load: tma.TmaCopy, tile: RowsTile, places: cute.Tensor, head: Int32, evict_first: bool
) -> LoadBox:
    """Loads of one head's boxes to `places` (rows, width, column blocks, places). `evict_first`: nobody reads
    the keys again soon."""
    policy = tma.cache_policy(evict_first)
    part = partition_of_head(load, tile, places, head)

    def load_box(page: Int32, number: Int32, place: Int32, barrier: cute.Pointer) -> None:
        source, target = part.tiles[None, number, page], part.shared[None, place]
        cute.copy(load.atom, source, target, tma_bar_ptr=barrier, **policy)

    return load_box


def box_hinter(
    load: tma.TmaCopy, tile: RowsTile, places: cute.Tensor, head: Int32
) -> Callable[[Int32, Int32], None]:
    """`hint(page, number of a box in it)` of one head's boxes: asks L2 for it. One lane does."""
    part = partition_of_head(load, tile, places, head)

    def hint_box(page: Int32, number: Int32) -> None:
        cute.prefetch(load.atom, part.tiles[None, number, page])

    return hint_box


def partition_of_head(load: tma.TmaCopy, tile: RowsTile, places: cute.Tensor, head: Int32) -> tma.Partition:
    """One head's boxes (TMA, boxes of a page, pages), and places for them (TMA, places)."""
    shape, of_head = (tile.rows, tile.width, tile.blocks), load.coordinates[None, None, None, head, None]
    tiles = cute.local_tile(of_head, shape, (None, 0, 0, None))  # (*shape, boxes of a page, pages)
    return tma.load_partition(load.atom, tiles, places, cute.make_layout(1), Int32(0), modes=3)
