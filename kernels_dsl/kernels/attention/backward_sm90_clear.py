"""Rows after the end of a packed sequence in the tiles of the SM90 attention backward, which are set to 0."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.hw.barriers import (
    WARPGROUP_THREADS,
    NamedBarrier,
    fence_for_async_readers,
    sync_consumers,
)

from .backward_sm90_producer import SharedTiles
from .backward_sm90_spec import CONSUMERS
from .backward_sm90_visits import Site


@cute.jit
def clear_keys(spec: cutlass.Constexpr, tiles: SharedTiles, stage: Int32 | int, site: Site):
    """Sets rows of K and V after a sequence's last key to 0: they belong to another, and may hold NaN."""
    first = site.job.seq.k_len - site.start
    other = first
    if cutlass.const_expr(spec.ctas > 1):
        other = site.job.seq.k_len - (site.start ^ spec.cta_keys)
    if cutlass.min(first, other) < spec.cta_keys:
        for tile in (tiles.k[None, None, stage], tiles.v[None, None, 0]):
            clear_rows(tile, cutlass.max(first, 0), site, spec.consumers)
        if cutlass.const_expr(spec.ctas > 1):
            clear_rows(tiles.k[None, None, 1], cutlass.max(other, 0), site, spec.consumers)
        fence_for_async_readers()
        sync_consumers(spec.consumers)


@cute.jit
def clear_queries(spec: cutlass.Constexpr, tiles: SharedTiles, stage: Int32, site: Site, block: Int32):
    """The same for rows of Q and dO after a sequence's last query."""
    first = site.job.seq.q_len - block * spec.tile_q
    if first < spec.tile_q:
        for tile in (tiles.q, tiles.do):
            clear_rows(tile[None, None, stage], first, site, CONSUMERS)
        fence_for_async_readers()
        # Not the barrier of all consumers: the role of dQ may be at its end, and wait there.
        cute.arch.barrier(
            barrier_id=int(NamedBarrier.CLEARED), number_of_threads=CONSUMERS * WARPGROUP_THREADS
        )


@cute.jit
def clear_rows(tile: cute.Tensor, first: Int32, site: Site, groups: cutlass.Constexpr):
    """Sets rows of a tile (rows, columns) from `first` on to 0, a row for each of `groups` warpgroups."""
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    for row in cutlass.range(first + site.group, rows, groups, unroll=1):
        for column in cutlass.range(site.thread, columns, WARPGROUP_THREADS, unroll=1):
            tile[row, column] = tile.element_type(0.0)
