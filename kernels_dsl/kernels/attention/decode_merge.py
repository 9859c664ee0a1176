"""The results of a sequence's splits become one, in the order of the splits.

A CTA has one query row. Groups of threads, each a vector of the row a thread, add every n-th split, and the
first group adds the groups' sums. The first partial results of each group are asked for together with the
log-sum-exps, which become the splits' weights in shared memory, each by one thread.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.seqlen import row_within
from kernels_dsl.blocks.attention.softmax import LN_2, LOG2_E, finite_or_zero
from kernels_dsl.blocks.attention.splits import (
    Lengths,
    PartRoom,
    first_part,
    sequence_of,
    splits_of,
)
from kernels_dsl.blocks.hw.dsl import choose, entry_name
from kernels_dsl.blocks.hw.vectors import vector_at
from kernels_dsl.config.decode import FIXED_SPLIT

from .decode_spec import DecodeSpec, Spec

VECTOR = 4
THREADS = 128


class MergeWork(NamedTuple):
    """Tensors that the merge reads and writes; see `decode.attention_decode`."""

    parts: cute.Pointer
    part_lse: cute.Tensor
    """With base 2."""
    room: PartRoom
    out: cute.Tensor
    lse: cute.Tensor | None
    sinks: cute.Tensor | None
    lengths: Lengths
    window: Window
    kv_heads: Int32
    heads: cute.FastDivmodDivisorV2
    queries: cute.FastDivmodDivisorV2


class MergeRow(NamedTuple):
    """A row of the result, and where its partial results lie."""

    sequence: Int32
    query: Int32
    head: Int32
    """The row in `out`."""
    part: Int32
    """Number of the first split's row."""
    step: Int32
    """Rows from split to split."""
    first: Int32
    """Number of the first split among those from a sequence's first key on, where splits are fixed."""
    splits: Int32
    """0 where a row has none: its sequence has no keys, or it belongs to no sequence."""
    spoilt: Float32
    """NaN for queries past the most that a sequence was said to have, else 0."""


def merge_threads(dim: int) -> int:
    """Threads of a CTA, at least one vector of a row each: THREADS."""
    assert dim // VECTOR <= THREADS
    return THREADS


@entry_name("attention_decode_merge")
@cute.kernel
def merge_kernel(spec: Spec, work: MergeWork, early: cutlass.Constexpr):
    """Device side: the row of this CTA."""
    vectors = spec.config.dim // VECTOR
    groups = THREADS // vectors
    allocator = cutlass.memory.SmemAllocator()
    s_lse = allocator.allocate_tensor(Float32, cute.make_layout(spec.config.most_splits))
    s_sums = allocator.allocate_tensor(
        Float32, cute.make_layout((groups, vectors * VECTOR), stride=(vectors * VECTOR, 1))
    )
    s_total = allocator.allocate_tensor(Float32, cute.make_layout(groups))
    thread = cute.arch.thread_idx()[0]
    row = find_row(spec, work, cute.arch.block_idx()[0])
    head, splits = row.head, row.splits
    group, vector = thread // vectors, thread % vectors
    if const_expr(early):
        wait_with(row)
    rows, begin = part_rows(spec, work, row), group
    if const_expr(spec.config.fixed):  # a split's group must not depend on the first one in view
        begin = (group + groups - row.first % groups) % groups
    at_once = spec.config.at_once
    loaded = cute.make_rmem_tensor((VECTOR, at_once), Float32)
    if group < groups:
        load_every(rows, vector, begin, splits, groups, loaded)
    if const_expr(spec.config.fixed):
        for n in cutlass.range(thread, splits, THREADS, unroll=1):
            s_lse[n] = work.part_lse[row.part + n * row.step]
    elif thread < splits:
        s_lse[thread] = work.part_lse[row.part + thread * row.step]
    cute.arch.sync_threads()
    base = finite_or_zero(highest_of(work, head, s_lse, splits))
    cute.arch.sync_threads()
    # In their place: with more shared memory the CTA would not fit beside two that take items.
    s_weights = s_lse
    for n in cutlass.range(thread, splits, THREADS, unroll=1):
        s_weights[n] = cute.math.exp2(s_lse[n] - base, fastmath=True)
    cute.arch.sync_threads()
    total = row.spoilt
    sums = cute.make_rmem_tensor(VECTOR, Float32)
    sums.fill(0.0)
    if group < groups:
        for first in cutlass.range(begin, splits, groups * at_once, unroll=1):
            for i in range_constexpr(at_once):
                n = first + i * groups
                if n < splits:
                    total = total + s_weights[n]
                    for j in range_constexpr(VECTOR):
                        sums[j] = sums[j] + s_weights[n] * loaded[j, i]
            load_every(rows, vector, first + groups * at_once, splits, groups, loaded)
        if vector == 0:
            s_total[group] = total
        for i in range_constexpr(VECTOR):
            s_sums[group, vector * VECTOR + i] = sums[i]
    cute.arch.sync_threads()
    if group == 0:
        for g in range_constexpr(1, groups):
            total = total + s_total[g]
            for i in range_constexpr(VECTOR):
                sums[i] = sums[i] + s_sums[g, vector * VECTOR + i]
        store_merged(work, (row.sequence, row.query, head), vector, sums, total, base)


@cute.jit
def wait_with(row: MergeRow):
    """Lets the next kernel start, and waits for the one before, when the row is found."""
    cute.arch.griddepcontrol_launch_dependents()
    # Always so; else the compiler would look for the row after the wait.
    if (row.splits | row.step) >= 0:
        cute.arch.griddepcontrol_wait()


@cute.jit
def load_every(
    rows: cute.Tensor, vector: Int32, begin: Int32, splits: Int32, step: cutlass.Constexpr, into: cute.Tensor
):
    """Loads a vector of every n-th partial result of a row from number `begin` on, as far as there are."""
    for i in range_constexpr(cute.size(into, mode=[1])):
        n = begin + i * step
        if n < splits:
            cute.autovec_copy(vector_at(rows, (n, vector * VECTOR), VECTOR), into[None, i])


@cute.jit
def highest_of(work: MergeWork, head: Int32, s_lse: cute.Tensor, splits: Int32) -> Float32:
    """The highest log-sum-exp, the sink's among them; all lanes of a warp find it together."""
    highest = Float32(-math.inf)
    for n in cutlass.range(cute.arch.lane_idx(), splits, 32, unroll=1):
        highest = cute.arch.fmax(highest, s_lse[n])
    for i in range_constexpr(5):
        highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=1 << i))
    if const_expr(work.sinks is not None):
        highest = cute.arch.fmax(highest, sink_of(work, head))
    return highest


@cute.jit
def store_merged(
    work: MergeWork,
    at: tuple[Int32, Int32, Int32],
    vector: Int32,
    sums: cute.Tensor,
    total: Float32,
    base: Float32,
):
    """Stores a vector of the row of a (sequence, query, head): `sums` over `total`, weights of 2^(x - base).
    The sink comes last."""
    sequence, query, head = at
    if const_expr(work.sinks is not None):
        # Read again: kept in a register through the sums, it costs a spill.
        total = total + cute.math.exp2(sink_of(work, head) - base, fastmath=True)
    if total != Float32(0.0):
        for i in range_constexpr(VECTOR):
            sums[i] = sums[i] / total
    target = work.out[sequence, query, head, None]
    if vector * VECTOR < target.shape[0]:
        found = cute.make_rmem_tensor(VECTOR, target.element_type)
        found.store(sums.load().to(target.element_type))
        cute.autovec_copy(found, vector_at(target, (vector * VECTOR,), VECTOR))
    if const_expr(work.lse is not None):
        if vector == 0:
            lse = (base + cute.math.log2(total, fastmath=True)) * Float32(LN_2)
            work.lse[sequence, head, query] = lse


def sink_of(work: MergeWork, head: Int32) -> Float32:
    """The sink of a query head, with base 2."""
    return Float32(work.sinks[head]) * Float32(LOG2_E)


@cute.jit
def find_row(spec: Spec, work: MergeWork, number: Int32) -> MergeRow:
    """Row `number` of the result. Of packed queries all lanes of a warp look for the same."""
    pack, lengths = spec.config.pack, work.lengths
    token, head = divmod(number, work.heads)
    shared = head // pack
    sequence, query = divmod(token, work.queries)
    batch, of_sequence = sequence, query
    if const_expr(lengths.starts is not None):
        batch = sequence_of(lengths, token)
        start = lengths.starts[cutlass.min(batch, lengths.batch - 1)]
        of_sequence = token - row_within(start, lengths.tokens)  # which cannot overflow
    inside = batch < lengths.batch
    batch = cutlass.min(batch, lengths.batch - 1)
    found = splits_of(spec.config, spec.variant, lengths, batch, work.window.left)
    of_head = of_sequence * pack + head % pack
    part = first_part(work.room, found.queries, batch, work.kv_heads, pack)
    part = part + shared * found.count * found.queries.rows + of_head
    splits, spoilt = found.count, Float32(0.0)
    if const_expr(lengths.starts is not None):
        inside = inside & (of_sequence >= 0) & (of_sequence < found.queries.length)
        wanted = of_head < found.queries.rows
        splits = splits if inside & wanted else Int32(0)
        spoilt = choose(inside & ~wanted, Float32(math.nan), Float32(0.0))
    return MergeRow(
        sequence, query, head, part, found.queries.rows, found.begin // FIXED_SPLIT, splits, spoilt
    )  # fmt: skip


def part_rows(spec: DecodeSpec, work: MergeWork, row: MergeRow) -> cute.Tensor:
    """The row's partial results (splits, padded D)."""
    dim = spec.config.dim
    place = work.parts.toint() + Int64(row.part) * (dim * 4)
    first = cute.make_ptr(Float32, place, cute.AddressSpace.gmem, assumed_align=16)
    layout = cute.make_layout((spec.config.most_splits, dim), stride=(row.step * dim, 1))
    return cute.make_tensor(first, layout)
