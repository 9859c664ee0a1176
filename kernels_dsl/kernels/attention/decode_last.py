"""The last split of a tile of query rows to be there merges them all, in the order of the splits.

A counter of each tile, 0 before a launch and after it, says how many splits are there. Nobody waits: who
finds that the others' results are all there has the tile. A thread has a vector of a row at a time, and adds
the splits as the groups of threads of `decode_merge` do, so the bits are the same.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, range_constexpr

from kernels_dsl.blocks.attention.softmax import finite_or_zero
from kernels_dsl.blocks.attention.splits import tiles_of
from kernels_dsl.blocks.hw.swizzled_rows import shared_pointer
from kernels_dsl.config.decode import ARRIVALS, ARRIVED_OFFSET

from .decode_merge import THREADS, VECTOR, sink_of, store_merged
from .decode_spec import Spec
from .decode_tile import DecodeWork, Item, Site, sync_computing

FEW = 8
"""Partial results of which a thread loads vectors at a time, or one for each group if these are more."""
MANY = 16
"""The same where there are so many."""
LOOKED_AT = 32
"""Log-sum-exps that a thread loads at a time of more than FEW."""


class RowParts(NamedTuple):
    """A vector of a row's partial results: `count` of them."""

    first: Int32
    """Number of the first split's row."""
    step: Int32
    """Rows from split to split."""
    count: Int32
    vector: Int32

    def number(self, split: Int32) -> Int32:
        """Number of a split's row, of the last split's past it."""
        return self.first + cutlass.min(split, self.count - 1) * self.step


@cute.jit
def merge_if_last(spec: Spec, work: DecodeWork, item: Item, site: Site):
    """Merges the splits of the item's tile if this one was the last. The item's results are stored, and all
    threads that compute have met since."""
    if arrive(spec, work, item, site):
        vectors = cutlass.const_expr(spec.config.dim // VECTOR)
        threads = cutlass.const_expr(spec.config.computing_threads)
        for number in cutlass.range(site.thread, item.rows * vectors, threads, unroll=1):
            row = number // vectors
            merge_vector(spec, work, item, row, number - row * vectors)


@cute.jit
def arrive(spec: Spec, work: DecodeWork, item: Item, site: Site) -> Boolean:
    """True if the results of all splits are there."""
    place = shared_pointer(Int32, site.base + spec.config.stats_offset + ARRIVED_OFFSET, 4)
    others = cute.make_tensor(place, cute.make_layout(1))
    if site.thread == 0:
        tiles = tiles_of(spec.config, work.lengths, item.splits.queries)
        tile = (item.batch * work.kv_heads + item.head) * tiles + item.row // spec.config.rows
        address = work.counters + Int64(tile + ARRIVALS) * 4
        counter = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        cute.arch.fence_acq_rel_gpu()
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.fence_acq_rel_gpu()
        others[0] = before
        if before == item.splits.count - 1:
            cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
    sync_computing(spec)
    return others[0] == item.splits.count - 1


@cute.jit
def merge_vector(spec: Spec, work: DecodeWork, item: Item, row: Int32, vector: Int32):
    """Merges a vector of a row of the tile and stores it."""
    pack, merge, count = spec.config.pack, work.merge, item.splits.count
    groups = cutlass.const_expr(THREADS // (spec.config.dim // VECTOR))
    of_head = item.row + row
    at = (item.batch, of_head // pack, item.head * pack + of_head % pack)
    parts = RowParts(item.first_part + row, item.splits.queries.rows, count, vector)
    highest = Float32(-math.inf)
    if cutlass.const_expr(merge.sinks is not None):
        highest = sink_of(merge, at[2])
    base = finite_or_zero(highest_of(work, parts, highest))
    totals = cute.make_rmem_tensor(groups, Float32)
    sums = cute.make_rmem_tensor((VECTOR, groups), Float32)
    totals.fill(0.0)
    sums.fill(0.0)
    many, few = (cutlass.const_expr(max(1, size // groups) * groups) for size in (MANY, FEW))
    whole = count // many * many
    for begin in cutlass.range(0, whole, many, unroll=1):
        add_parts(spec, work, parts, begin, many, sums, totals, base)
    for begin in cutlass.range(whole, count, few, unroll=1):
        add_parts(spec, work, parts, begin, few, sums, totals, base)
    for g in range_constexpr(1, groups):
        totals[0] = totals[0] + totals[g]
        for i in range_constexpr(VECTOR):
            sums[i, 0] = sums[i, 0] + sums[i, g]
    store_merged(merge, at, vector, sums[None, 0], totals[0], base)


@cute.jit
def highest_of(work: DecodeWork, parts: RowParts, highest: Float32) -> Float32:
    """The highest log-sum-exp of a row's partial results, at least `highest`."""
    if parts.count <= FEW:
        for n in range_constexpr(FEW):
            highest = cute.arch.fmax(highest, work.part_lse[parts.number(Int32(n))])
    else:
        for begin in cutlass.range(0, parts.count, LOOKED_AT, unroll=1):
            for n in range_constexpr(LOOKED_AT):
                highest = cute.arch.fmax(highest, work.part_lse[parts.number(begin + n)])
    return highest


@cute.jit
def add_parts(
    spec: Spec,
    work: DecodeWork,
    parts: RowParts,
    begin: Int32,
    size: cutlass.Constexpr[int],
    sums: cute.Tensor,
    totals: cute.Tensor,
    base: Float32,
):
    """Adds `size` partial results of a row from number `begin` on, a multiple of the groups."""
    groups = cutlass.const_expr(cute.size(totals))
    values = cute.make_rmem_tensor((VECTOR, size), Float32)
    lse = cute.make_rmem_tensor(size, Float32)
    for n in range_constexpr(size):
        part = parts.number(begin + n)
        lse[n] = work.part_lse[part]
        place = work.parts.toint() + (Int64(part) * spec.config.dim + parts.vector * VECTOR) * 4
        source = cute.make_ptr(Float32, place, cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), values[None, n])
    for n in range_constexpr(size):
        if begin + n < parts.count:
            group = cutlass.const_expr(n % groups)
            weight = cute.math.exp2(lse[n] - base, fastmath=True)
            totals[group] = totals[group] + weight
            for i in range_constexpr(VECTOR):
                sums[i, group] = sums[i, group] + weight * values[i, n]
