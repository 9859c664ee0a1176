"""Key blocks that a query tile visits, and which of them need a mask.

A visit has three segments: blocks that the right edge of the mask cuts (or the end of the keys), blocks
in which every query sees every key, and blocks that the left edge cuts. A range is walked from right to
left; a list in its own order, partial blocks first. A visit has at least one block: where a tile sees no
key it is a block in which everything is masked, so that no role needs a path of its own for it.

A step takes one block, or several listed ones side by side (`TileShape.joined`). Positions and counts are
those of steps. No step has both partial and whole blocks, so that the last one of either may lack some: their
place is taken by a block past all keys, which TMA fills with zeros without a read, and which is masked.
"""

from enum import Enum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernels_dsl.blocks.attention.query_tiles import QueryTile
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.config.attention import AttentionVariant


class RightEdge(Enum):
    """Places in a walk of a range of the blocks that the mask's right edge cuts."""

    FALLING = 0
    """First, from right to left as all others."""
    RISING = 1
    """First, from left to right."""
    LAST = 2
    """The leftmost is first of all, the others come last, from left to right."""


class Window(NamedTuple):
    """Widths of the mask's edges; `AttentionVariant` says which of them count."""

    left: Int32
    right: Int32


class TileShape(NamedTuple):
    """Size of a step: queries of a tile, keys of a block."""

    queries: int
    keys: int
    joined: int = 1
    """Listed blocks that a step takes side by side."""

    @property
    def past_all(self) -> int:
        """Number of a block past the keys of any tensor, of which no coordinate leaves 32 bits."""
        return (1 << 30) // self.keys


class KeyLists(NamedTuple):
    """Key blocks that each block of queries visits, int32. Either pair may be None, not both.

    A listed block is `variant.lists` = (query tiles, key tiles) large.
    """

    counts: cute.Tensor | None
    """(B, H, query blocks): blocks that need a mask."""
    indices: cute.Tensor | None
    """(B, H, query blocks, entries): which those are."""
    full_counts: cute.Tensor | None
    """(B, H, query blocks): blocks that need none."""
    full_indices: cute.Tensor | None
    """(B, H, query blocks, entries): which those are."""
    order: cute.Tensor | None = None
    """(work tiles,) int32: each once, in the order in which they begin. None or empty: the order of
    `query_tiles`."""


class Visit(NamedTuple):
    """Key blocks of one query tile, counted by segment."""

    right: Int32
    """Masked blocks at the right edge; of a list all masked ones."""
    whole: Int32
    """Blocks that need no mask."""
    left: Int32
    """Masked blocks at the left edge."""
    last: Int32
    """The rightmost block of a range. Of a list: blocks that the last masked step lacks, and `joined` times
    those that the last whole step lacks."""
    k_len: Int32
    """Keys that count: 0 where the tile sees none at all."""

    @property
    def count(self) -> Int32:
        """Blocks in all, at least 1."""
        return self.right + self.whole + self.left


def diagonal_shift(variant: AttentionVariant, seq: SeqInfo) -> Int32:
    """Distance from a query's number to the key on its diagonal."""
    return Int32(0) if variant.top_left else seq.k_len - seq.q_len


@cute.jit
def visit_range(
    variant: cutlass.Constexpr[AttentionVariant],
    tile: cutlass.Constexpr[TileShape],
    m: Int32,
    seq: SeqInfo,
    window: Window,
) -> Visit:
    """Visit of query tile `m` for masks that are a range of keys a row."""
    first_row = m * tile.queries
    last_row = cutlass.min(first_row + tile.queries, seq.q_len) - 1
    shift = diagonal_shift(variant, seq)
    end, whole_end = seq.k_len, seq.k_len
    if cutlass.const_expr(variant.right):
        end = cutlass.min(end, last_row + shift + window.right + 1)
        whole_end = cutlass.min(whole_end, first_row + shift + window.right + 1)
    begin, whole_begin = Int32(0), Int32(0)
    if cutlass.const_expr(variant.left):
        begin = cutlass.max(first_row + shift - window.left, 0)
        whole_begin = cutlass.max(last_row + shift - window.left, 0)
    block_end = cutlass.max(cute.ceil_div(cutlass.max(end, 0), tile.keys), 1)
    block_begin = cutlass.min(begin // tile.keys, block_end - 1)
    if cutlass.const_expr(variant.masks_everywhere):
        return Visit(block_end - block_begin, Int32(0), Int32(0), block_end - 1, seq.k_len)
    whole_last = cutlass.max(cutlass.max(whole_end, 0) // tile.keys, block_begin)  # past the whole blocks
    whole_first = cutlass.min(cute.ceil_div(whole_begin, tile.keys), block_end)
    whole = cutlass.max(whole_last - whole_first, 0)
    right = block_end - cutlass.max(whole_last, whole_first)
    if whole == 0:
        right = block_end - block_begin
    left = block_end - block_begin - right - whole
    return Visit(right, whole, left, block_end - 1, seq.k_len)


@cute.jit
def visit_list(
    variant: cutlass.Constexpr[AttentionVariant],
    joined: cutlass.Constexpr[int],
    at: QueryTile,
    seq: SeqInfo,
    lists: KeyLists,
) -> Visit:
    """Visit of a query tile whose key blocks are listed."""
    tiles, split = variant.lists
    row = at.m // tiles
    right, whole = Int32(0), Int32(0)
    if cutlass.const_expr(lists.counts is not None):
        right = entries_of(lists.counts[at.batch, at.head, row], lists.indices) * split
    if cutlass.const_expr(lists.full_counts is not None):
        whole = entries_of(lists.full_counts[at.batch, at.head, row], lists.full_indices) * split
    k_len, lacking = seq.k_len, Int32(0)
    if cutlass.const_expr(joined > 1):
        masked_steps, whole_steps = cute.ceil_div(right, joined), cute.ceil_div(whole, joined)
        lacking = masked_steps * joined - right + (whole_steps * joined - whole) * joined
        right, whole = masked_steps, whole_steps
    if right + whole == 0:
        right, k_len = Int32(1), Int32(0)
    return Visit(right, whole, Int32(0), lacking, k_len)


def entries_of(count: Int32, indices: cute.Tensor) -> Int32:
    """The count of a list, within what it has room for: nobody has looked at it before."""
    return cutlass.min(cutlass.max(count, 0), indices.shape[3])


@cute.jit
def visit_tile(
    variant: cutlass.Constexpr[AttentionVariant],
    tile: cutlass.Constexpr[TileShape],
    at: QueryTile,
    seq: SeqInfo,
    window: Window,
    lists: KeyLists | None,
) -> Visit:
    """The key blocks of a query tile, by range or by list."""
    if cutlass.const_expr(variant.lists is not None):
        return visit_list(variant, tile.joined, at, seq, lists)
    return visit_range(variant, tile, at.m, seq, window)


@cute.jit
def block_at(
    variant: cutlass.Constexpr[AttentionVariant],
    visit: Visit,
    at: QueryTile,
    lists: KeyLists | None,
    position: Int32,
    edge: cutlass.Constexpr[RightEdge] = RightEdge.FALLING,
) -> Int32:
    """The key tile at a position, from 0 to visit.count - 1, of a walk. A range is walked from its right, but
    for the blocks that the right edge cuts, which are where `edge` says."""
    if cutlass.const_expr(variant.lists is None):
        in_order = visit.last - position
        if cutlass.const_expr(edge is RightEdge.LAST):
            others = cutlass.max(visit.right, 1) - 1
            in_order = in_order - others
            if position >= visit.count - others:
                in_order = visit.last + 1 - visit.count + position
        elif cutlass.const_expr(edge is RightEdge.RISING):
            if position < visit.right:
                in_order = visit.last + 1 - visit.right + position
        return in_order
    tile = Int32(0)
    if visit.k_len > 0:
        tiles, split = variant.lists
        row = at.m // tiles
        entry = position // split
        within = position - entry * split
        block = Int32(0)
        if cutlass.const_expr(lists.full_counts is None):
            block = lists.indices[at.batch, at.head, row, entry]
        elif cutlass.const_expr(lists.counts is None):
            block = lists.full_indices[at.batch, at.head, row, entry]
        elif position < visit.right:
            block = lists.indices[at.batch, at.head, row, entry]
        else:
            block = lists.full_indices[at.batch, at.head, row, entry - visit.right // split]
        # Blocks after the last key read as zeros, or not at all; those before the first would be read.
        tile = cutlass.max(block, 0) * split + within
    return tile


def blocks_at(
    variant: AttentionVariant,
    tile: TileShape,
    visit: Visit,
    at: QueryTile,
    lists: KeyLists | None,
    position: Int32,
    edge: RightEdge = RightEdge.FALLING,
) -> tuple[Int32, ...]:
    """The key tiles of the step at a position, `tile.joined` of them; otherwise as `block_at`."""
    if tile.joined == 1:
        return (block_at(variant, visit, at, lists, position, edge),)
    return tuple(
        joined_block_at(variant, tile, visit, at, lists, position, part) for part in range(tile.joined)
    )


@cute.jit
def joined_block_at(
    variant: cutlass.Constexpr[AttentionVariant],
    tile: cutlass.Constexpr[TileShape],
    visit: Visit,
    at: QueryTile,
    lists: KeyLists,
    position: Int32,
    part: cutlass.Constexpr[int],
) -> Int32:
    """The key tile that is number `part` of the step at a position; `past_all` where the step lacks it."""
    block = Int32(tile.past_all)
    if visit.k_len > 0:
        if position < visit.right:
            if cutlass.const_expr(lists.counts is not None):
                place = position * tile.joined + part
                if place < visit.right * tile.joined - visit.last % tile.joined:
                    block = listed_tile(variant, lists.indices, at, place)
        else:
            if cutlass.const_expr(lists.full_counts is not None):
                place = (position - visit.right) * tile.joined + part
                if place < visit.whole * tile.joined - visit.last // tile.joined:
                    block = listed_tile(variant, lists.full_indices, at, place)
    return block


def listed_tile(variant: AttentionVariant, indices: cute.Tensor, at: QueryTile, place: Int32) -> Int32:
    """The key tile at a place of a list, counted in tiles."""
    assert variant.lists is not None
    tiles, split = variant.lists
    entry = place // split
    block = indices[at.batch, at.head, at.m // tiles, entry]
    return cutlass.max(block, 0) * split + place - entry * split


def lacks_blocks(tile: TileShape, visit: Visit, position: Int32) -> Boolean | bool:
    """True where the step at a position, one of whole blocks, lacks some."""
    if tile.joined == 1:
        return False
    return (position == visit.count - 1) & (visit.last >= tile.joined)
