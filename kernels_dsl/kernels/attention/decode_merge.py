"""The results of a sequence's splits become one, in the order of the splits.

A CTA has one query row. Its threads find the splits' weights together, in shared memory; then groups of
threads, each a vector of the row a thread, add every n-th split, and the first group adds the groups' sums.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.softmax import LN_2, LOG2_E, finite_or_zero
from kernels_dsl.blocks.attention.splits import Lengths, splits_of
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.vectors import load_vector, vector_at
from kernels_dsl.config.decode import MAX_SPLITS

from .decode_spec import Spec

VECTOR = 4
THREADS = 128


class MergeWork(NamedTuple):
    """Tensors that the merge reads and writes; see `decode.attention_decode`."""

    parts: cute.Tensor
    part_lse: cute.Tensor
    """With base 2."""
    out: cute.Tensor
    lse: cute.Tensor | None
    sinks: cute.Tensor | None
    lengths: Lengths
    window: Window
    heads: cute.FastDivmodDivisorV2
    queries: cute.FastDivmodDivisorV2


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
    s_lse = allocator.allocate_tensor(Float32, cute.make_layout(MAX_SPLITS))
    s_sums = allocator.allocate_tensor(
        Float32, cute.make_layout((groups, vectors * VECTOR), stride=(vectors * VECTOR, 1))
    )
    s_total = allocator.allocate_tensor(Float32, cute.make_layout(groups))
    thread = cute.arch.thread_idx()[0]
    row_of_batch, head = divmod(cute.arch.block_idx()[0], work.heads)
    batch, query = divmod(row_of_batch, work.queries)
    shared = head // spec.config.pack
    row = query * spec.config.pack + head % spec.config.pack
    splits = splits_of(spec.variant, work.lengths, batch, work.window.left).count
    if const_expr(early):
        cute.arch.griddepcontrol_wait()
    if thread < splits:
        s_lse[thread] = work.part_lse[batch, shared, thread, row]
    cute.arch.sync_threads()
    highest = Float32(-math.inf)
    for n in cutlass.range(splits, unroll=4):
        highest = cute.arch.fmax(highest, s_lse[n])
    sink = Float32(-math.inf)
    if const_expr(work.sinks is not None):
        sink = Float32(work.sinks[head]) * Float32(LOG2_E)
        highest = cute.arch.fmax(highest, sink)
    base = finite_or_zero(highest)
    group, vector = thread // vectors, thread % vectors
    total = Float32(0.0)
    sums = cute.make_rmem_tensor(VECTOR, Float32)
    sums.fill(0.0)
    if group < groups:
        rows = work.parts[batch, shared, None, row, None]
        for n in cutlass.range(group, splits, groups, unroll=8):
            weight = cute.math.exp2(s_lse[n] - base, fastmath=True)
            values = load_vector(rows, (n, vector * VECTOR), VECTOR)
            total = total + weight
            for i in range_constexpr(VECTOR):
                sums[i] = sums[i] + weight * values[i]
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
        if const_expr(work.sinks is not None):
            total = total + cute.math.exp2(sink - base, fastmath=True)
        if total != Float32(0.0):
            for i in range_constexpr(VECTOR):
                sums[i] = sums[i] / total
        target = work.out[batch, query, head, None]
        if vector * VECTOR < target.shape[0]:
            found = cute.make_rmem_tensor(VECTOR, target.element_type)
            found.store(sums.load().to(target.element_type))
            cute.autovec_copy(found, vector_at(target, (vector * VECTOR,), VECTOR))
        if const_expr(work.lse is not None):
            if vector == 0:
                work.lse[batch, head, query] = (base + cute.math.log2(total, fastmath=True)) * Float32(LN_2)
