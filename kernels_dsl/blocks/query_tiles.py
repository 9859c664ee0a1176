"""Which query tile a CTA works on next: a static persistent schedule for attention.

Heads are cut into groups whose K and V fit in L2 together; within a group the tiles of all heads that
have the most key blocks go first. CTAs take tiles in rounds, and every other round in reverse, so that
who got the longer tile of one round gets the shorter of the next.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

L2_BYTES = 24 << 20
"""What K and V of a group of heads may take: half of an H200's L2; the rest is for Q, O, the next group."""


class QueryTile(NamedTuple):
    """Coordinates of a CTA's work."""

    m: Int32
    head: Int32
    batch: Int32


class QueryTiles(NamedTuple):
    """Extent of the work: tiles of the longest sequence, query heads, sequences, heads in a group."""

    m: Int32
    heads: Int32
    batch: Int32
    group: Int32

    @property
    def size(self) -> Int32:
        """Number of tiles in all."""
        return self.m * self.heads * self.batch


@cute.jit
def heads_in_l2(kv_bytes: Int32, heads_per_kv: Int32) -> Int32:
    """Query heads of a group, for `kv_bytes` bytes of K and V a KV head."""
    return cutlass.max(L2_BYTES // cutlass.max(kv_bytes, Int32(1)), Int32(1)) * heads_per_kv


@cute.jit
def tile_of_round(turn: Int32, cta: Int32, ctas: Int32, snake: cutlass.Constexpr) -> Int32:
    """Number of the tile that a CTA takes in a round."""
    place = cta
    if cutlass.const_expr(snake):
        if turn % 2 == 1:
            place = ctas - 1 - cta
    return turn * ctas + place


@cute.jit
def decode_query_tile(index: Int32, tiles: QueryTiles) -> QueryTile:
    """Tile number `index`: groups of heads in order; in a group the last rows of all heads come first."""
    per_group = tiles.m * tiles.group
    number = index // per_group
    within = index - number * per_group
    width = cutlass.min(tiles.group, tiles.heads * tiles.batch - number * tiles.group)
    rank = within // width
    all_heads = number * tiles.group + within - rank * width
    batch = all_heads // tiles.heads
    return QueryTile(tiles.m - 1 - rank, all_heads - batch * tiles.heads, batch)
