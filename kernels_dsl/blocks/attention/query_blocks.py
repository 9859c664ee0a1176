"""Walks of query blocks for a tile of keys: what a backward pass visits, and where it needs a mask.

The counterpart of `kv_blocks`. Under a causal mask or a window a key is seen by a range of queries, so a key
tile visits a range of query blocks; those that an edge of the mask cuts, and all of them where the tile
reaches past the last key, are masked element by element. Where key blocks are listed by query block, the
lists are turned round before: a key tile visits the entries of its key block in their order, head by head.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernels_dsl.blocks.attention.kv_blocks import Window, diagonal_shift
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.config.attention import AttentionVariant

TILES_AT_ONCE = 128
"""Tiles, about, that run at a time on a GPU with one of them an SM."""


class KeyTile(NamedTuple):
    """Coordinates of a backward CTA's work."""

    n: Int32
    kv_head: Int32
    batch: Int32


class KeyTiles(NamedTuple):
    """Extent of the work: key tiles of the longest sequence, KV heads, sequences."""

    n: Int32
    kv_heads: Int32
    batch: Int32

    @property
    def size(self) -> Int32:
        """Number of tiles in all."""
        return self.n * self.kv_heads * self.batch


class QueryWalk(NamedTuple):
    """Query blocks `first` … `end` - 1; those from `whole_first` to `whole_end` - 1 need no mask."""

    first: Int32
    end: Int32
    whole_first: Int32
    whole_end: Int32

    @property
    def count(self) -> Int32:
        """Blocks in all; 0 where no query sees a key of the tile."""
        return self.end - self.first

    def masked(self, block: Int32) -> Boolean:
        """Says whether `block` needs a mask."""
        return (block < self.whole_first) | (block >= self.whole_end)


class QueryLists(NamedTuple):
    """Query blocks that each block of keys visits, int32. A listed block is `variant.lists[1]` key tiles."""

    first: cute.Tensor
    """(B, Hk, key blocks + 1): number of each one's first entry; the next one's is its end."""
    entries: cute.Tensor
    """(B, Hk, entries, 4): see `Entry`."""


class Entry(NamedTuple):
    """A query block that a block of keys visits."""

    head: Int32
    """Query head among those that share the keys."""
    block: Int32
    masked: Boolean
    turn: Int32
    """Key blocks before this one that visit the same query block."""


class ListWalk(NamedTuple):
    """Entries `first` … `first + count` - 1 of the lists, of all query heads that share the keys."""

    first: Int32
    count: Int32


def walk_list(variant: AttentionVariant, at: KeyTile, lists: QueryLists) -> ListWalk:
    """Entries that a key tile visits."""
    block = at.n // variant.lists[1]
    first = lists.first[at.batch, at.kv_head, block]
    return ListWalk(first, lists.first[at.batch, at.kv_head, block + 1] - first)


def entry_of(lists: QueryLists, at: KeyTile, place: Int32) -> Entry:
    """Entry number `place` of a key tile's sequence and head. What nobody reads of it is not loaded."""
    words = lists.entries[at.batch, at.kv_head, place, None]
    return Entry(words[0], words[1], words[2] != 0, words[3])


@cute.jit
def decode_key_tile(
    index: Int32,
    tiles: KeyTiles,
    from_last: cutlass.Constexpr,
    heads_at_once: cutlass.Constexpr = 1,
    tiles_at_once: cutlass.Constexpr = TILES_AT_ONCE,
) -> KeyTile:
    """Tile number `index`: those of up to `heads_at_once` heads follow one another, key tile by key tile, so
    that their Q and dO are read from L2: of as many as have about `tiles_at_once` tiles together.

    Under a causal mask the first tiles of a head visit the most queries. `from_last`: the last comes first.
    """
    image = index // tiles.n
    n = index - image * tiles.n
    if cutlass.const_expr(heads_at_once > 1):
        most = cutlass.max(cutlass.min(tiles_at_once // tiles.n, heads_at_once), 1)
        first_head = image // most * most
        heads = cutlass.min(most, tiles.kv_heads * tiles.batch - first_head)
        place = index - first_head * tiles.n
        n = place // heads
        image = first_head + place - n * heads
    batch = image // tiles.kv_heads
    if cutlass.const_expr(from_last):
        n = tiles.n - 1 - n
    return KeyTile(n, image - batch * tiles.kv_heads, batch)


@cute.jit
def walk_queries(
    variant: cutlass.Constexpr, tile: cutlass.Constexpr, n: Int32, seq: SeqInfo, window: Window
) -> QueryWalk:
    """Query blocks that key tile `n` visits; `tile` is (queries, keys)."""
    rows, keys = tile
    shift = diagonal_shift(variant, seq)
    first_key = n * keys
    last_key = cutlass.min(first_key + keys, seq.k_len) - 1
    begin, whole_begin = Int32(0), Int32(0)
    if cutlass.const_expr(variant.right):
        begin = cutlass.max(first_key - shift - window.right, 0)
        whole_begin = cutlass.max(last_key - shift - window.right, 0)
    end, whole_end = seq.q_len, seq.q_len
    if cutlass.const_expr(variant.left):
        end = cutlass.min(end, last_key - shift + window.left + 1)
        whole_end = cutlass.min(whole_end, first_key - shift + window.left + 1)
    first = begin // rows
    last = cutlass.max(cute.ceil_div(cutlass.max(end, 0), rows), first)
    if last_key < first_key:  # the tile lies after the keys that count
        last = first
    # Past the last query the log-sum-exp is +inf: a block needs no mask for it.
    whole_last = cute.ceil_div(cutlass.max(whole_end, 0), rows)
    if cutlass.const_expr(variant.left):
        whole_last = cutlass.max(whole_end, 0) // rows
    whole_first = cute.ceil_div(whole_begin, rows)
    if first_key + keys > seq.k_len:
        whole_first = last
    if cutlass.const_expr(variant.masks_everywhere):
        whole_first = last
    return QueryWalk(first, last, whole_first, whole_last)
