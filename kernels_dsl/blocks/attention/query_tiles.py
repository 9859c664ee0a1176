"""Order of query tiles: groups of heads one after another, the longest tiles of a group first.

Heads are cut into groups whose K and V fit in L2 together. Within a group those tiles of all heads go first
that have the most key blocks under a causal mask. Groups differ by one head at most.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.config.attention import L2_BYTES as L2_BYTES


class QueryTile(NamedTuple):
    """Coordinates of a CTA's work."""

    m: Int32
    head: Int32
    batch: Int32


class QueryTiles(NamedTuple):
    """Extent of the work."""

    m: Int32
    """Tiles of the longest sequence."""
    heads: Int32
    """Query heads."""
    batch: Int32
    """Sequences."""
    groups: Int32
    """Groups of heads."""
    lead: Int32 | None = None
    """Heads of the first group that are a group of their own before its other heads; None: none are."""

    @property
    def size(self) -> Int32:
        """Number of tiles in all."""
        return self.m * self.heads * self.batch


@cute.jit
def groups_for_l2(heads: Int32, heads_per_kv: Int32, kv_bytes: Int32) -> Int32:
    """Groups that `heads` query heads of all sequences are cut into, for `kv_bytes` of K and V a KV head."""
    fitting = cutlass.max(L2_BYTES // cutlass.max(kv_bytes, Int32(1)), Int32(1)) * heads_per_kv
    return cute.ceil_div(heads, fitting)


@cute.jit
def decode_query_tile(index: Int32, tiles: QueryTiles) -> QueryTile:
    """Tile number `index`. The first groups have one head more than the others where they differ."""
    all_heads = tiles.heads * tiles.batch
    narrow = all_heads // tiles.groups
    wider = all_heads - narrow * tiles.groups  # groups that have narrow + 1 heads
    local = index - wider * (narrow + 1) * tiles.m
    width, first_head = narrow + 1, Int32(0)
    if local >= 0:
        width, first_head = narrow, wider * (narrow + 1)
    else:
        local = index
    group = local // (width * tiles.m)
    within = local - group * width * tiles.m
    first_head = first_head + group * width
    if cutlass.const_expr(tiles.lead is not None):
        if first_head == 0 and tiles.lead < width:
            if within < tiles.lead * tiles.m:
                width = tiles.lead
            else:
                within, first_head, width = within - tiles.lead * tiles.m, tiles.lead, width - tiles.lead
    rank = within // width
    head = first_head + within - rank * width
    batch = head // tiles.heads
    return QueryTile(tiles.m - 1 - rank, head - batch * tiles.heads, batch)


@cute.jit
def ordered_query_tile(index: Int32, tiles: QueryTiles, order: cute.Tensor) -> QueryTile:
    """Tile number `index` of an `order` that counts those of a head side by side, then heads, sequences; of
    `decode_query_tile` where it is empty."""
    tile = decode_query_tile(index, tiles)
    if cute.size(order) > 0:
        number = order[index]
        image = number // tiles.m
        batch = image // tiles.heads
        tile = QueryTile(number - image * tiles.m, image - batch * tiles.heads, batch)
    return tile
