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
from kernels_dsl.blocks.hw.dsl import choose
from kernels_dsl.blocks.hw.swizzled_rows import shared_pointer
from kernels_dsl.config.decode import ARRIVALS, ARRIVED_OFFSET

from .decode_merge import THREADS, VECTOR, MergeWork, sink_of, store_merged
from .decode_spec import DecodeSpec, Spec
from .decode_tile import DecodeWork, Item, Site, sync_computing

FEW = 8
"""Partial results of which a thread loads vectors at a time, or one for each group if these are more."""


class AtOnce(NamedTuple):
    """Loads of a thread at a time where a row has more than FEW partial results: of vectors, where there are
    so many, and of log-sum-exps."""

    vectors: int
    lse: int


WIDE = AtOnce(16, 32)
NARROW = AtOnce(FEW, FEW)
"""For more threads: fewer registers."""


class RowParts(NamedTuple):
    """A vector of a row's partial results: `count` of them."""

    at: tuple[Int32, Int32, Int32]
    """Sequence, query, head."""
    first: Int32
    """Number of the first split's row."""
    step: Int32
    """Rows from split to split."""
    count: Int32
    vector: Int32

    def number(self, split: Int32) -> Int32:
        """Number of a split's row, of the last split's past it; of the first where there is none."""
        return self.first + cutlass.max(cutlass.min(split, self.count - 1), 0) * self.step


@cute.jit
def merge_if_last(spec: Spec, work: DecodeWork, item: Item, site: Site):
    """Merges the splits of the item's tile if this one was the last. The item's results are stored, and all
    threads that compute have met since."""
    if arrive(spec, work, item, site):
        vectors, threads = cutlass.const_expr((spec.config.dim // VECTOR, spec.config.computing_threads))
        for number in cutlass.range(site.thread, item.rows * vectors, threads, unroll=1):
            merge_vector(spec, work.merge, row_parts(spec, item, number), WIDE)


def whole_groups(spec: DecodeSpec, size: int) -> int:
    """About `size` partial results: a multiple of the groups that are summed apart."""
    groups = groups_of(spec)
    return max(1, size // groups) * groups


def groups_of(spec: DecodeSpec) -> int:
    """Groups of threads that would share a row."""
    return THREADS // (spec.config.dim // VECTOR)


def row_parts(spec: DecodeSpec, item: Item, number: Int32) -> RowParts:
    """Vector number `number` of the tile."""
    vectors, pack = spec.config.dim // VECTOR, spec.config.pack
    row = number // vectors
    of_head = item.row + row
    at = (item.batch, of_head // pack, item.head * pack + of_head % pack)
    return RowParts(
        at, item.first_part + row, item.splits.queries.rows, item.splits.count, number - row * vectors
    )


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
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        others[0] = before
        if before == item.splits.count - 1:
            cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
    sync_computing(spec)
    return others[0] == item.splits.count - 1


class Sums(NamedTuple):
    """Weighted sums of partial results, and of their weights, by groups."""

    rows: cute.Tensor
    weights: cute.Tensor


class Loaded(NamedTuple):
    """A vector of some partial results, and their log-sum-exps."""

    values: cute.Tensor
    lse: cute.Tensor


def no_sums(spec: DecodeSpec) -> Sums:
    """Zeros."""
    groups = groups_of(spec)
    sums = Sums(cute.make_rmem_tensor((VECTOR, groups), Float32), cute.make_rmem_tensor(groups, Float32))
    for x in sums:
        x.fill(0.0)
    return sums


def no_parts(size: int) -> Loaded:
    """Room for `size` of them."""
    return Loaded(cute.make_rmem_tensor((VECTOR, size), Float32), cute.make_rmem_tensor(size, Float32))


@cute.jit
def merge_vector(spec: Spec, work: MergeWork, parts: RowParts, at_once: cutlass.Constexpr[AtOnce]):
    """Merges a vector of a row and stores it."""
    if parts.count <= cutlass.const_expr(whole_groups(spec, FEW)):
        merge_few(spec, work, parts)
    else:
        merge_many(spec, work, parts, at_once)


@cute.jit
def merge_few(spec: Spec, work: MergeWork, parts: RowParts):
    """Merges a vector of a row of few partial results: all loads, then the sums."""
    loaded, least, sums = no_parts(whole_groups(spec, FEW)), least_of(work, parts), no_sums(spec)
    load_parts(spec, work, parts, Int32(0), loaded)
    highest = least
    for n in range_constexpr(cute.size(loaded.lse)):
        highest = cute.arch.fmax(highest, loaded.lse[n])
    base = finite_or_zero(choose(parts.count > 0, highest, least))
    add_parts(parts, Int32(0), loaded, sums, base)
    store_sums(work, parts, sums, base)


@cute.jit
def merge_many(spec: Spec, work: MergeWork, parts: RowParts, at_once: cutlass.Constexpr[AtOnce]):
    """Merges a vector of a row of any number of partial results."""
    highest, count, sums = least_of(work, parts), parts.count, no_sums(spec)
    for begin in cutlass.range(0, count, at_once.lse, unroll=1):
        for n in range_constexpr(at_once.lse):
            highest = cute.arch.fmax(highest, work.part_lse[parts.number(begin + n)])
    base = finite_or_zero(highest)
    many, few = cutlass.const_expr((whole_groups(spec, at_once.vectors), whole_groups(spec, FEW)))
    whole = Int32(0)
    if cutlass.const_expr(many > few):
        whole = count // many * many
        for begin in cutlass.range(0, whole, many, unroll=1):
            loaded = no_parts(many)
            load_parts(spec, work, parts, begin, loaded)
            add_parts(parts, begin, loaded, sums, base)
    for begin in cutlass.range(whole, count, few, unroll=1):
        loaded = no_parts(few)
        load_parts(spec, work, parts, begin, loaded)
        add_parts(parts, begin, loaded, sums, base)
    store_sums(work, parts, sums, base)


def least_of(work: MergeWork, parts: RowParts) -> Float32:
    """A lower bound of the highest log-sum-exp: the sink."""
    if work.sinks is None:
        return Float32(-math.inf)
    return sink_of(work, parts.at[2])


@cute.jit
def load_parts(spec: Spec, work: MergeWork, parts: RowParts, begin: Int32, into: Loaded):
    """Loads the partial results of a row from number `begin` on; past the last one that one again."""
    for n in range_constexpr(cute.size(into.lse)):
        part = parts.number(begin + n)
        into.lse[n] = work.part_lse[part]
        place = work.parts.toint() + (Int64(part) * spec.config.dim + parts.vector * VECTOR) * 4
        source = cute.make_ptr(Float32, place, cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), into.values[None, n])


@cute.jit
def add_parts(parts: RowParts, begin: Int32, loaded: Loaded, sums: Sums, base: Float32):
    """Adds partial results of a row from number `begin` on, a multiple of the groups."""
    groups = cutlass.const_expr(cute.size(sums.weights))
    weights = cute.make_rmem_tensor(cute.size(loaded.lse), Float32)
    for n in range_constexpr(cute.size(weights)):  # not one after the other behind branches
        weights[n] = cute.math.exp2(loaded.lse[n] - base, fastmath=True)
    for n in range_constexpr(cute.size(weights)):
        if begin + n < parts.count:
            group = cutlass.const_expr(n % groups)
            sums.weights[group] = sums.weights[group] + weights[n]
            for i in range_constexpr(VECTOR):
                sums.rows[i, group] = sums.rows[i, group] + weights[n] * loaded.values[i, n]


@cute.jit
def store_sums(work: MergeWork, parts: RowParts, sums: Sums, base: Float32):
    """Adds the groups' sums and stores the result."""
    total, row = sums.weights[0], sums.rows[None, 0]
    for g in range_constexpr(1, cute.size(sums.weights)):
        total = total + sums.weights[g]
        for i in range_constexpr(VECTOR):
            row[i] = row[i] + sums.rows[i, g]
    store_merged(work, parts.at, parts.vector, row, total, base)
