"""Sums of lists that come in pieces: each piece leaves its sum in global memory, the last one adds them up.

A piece's word has ten bits each of the list's first slot, the number of its pieces, and the number of the
piece among them. Who stores the last sum of a tile reads them all in the order of the pieces, so that a
result does not depend on who that is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.blocks.hw.barriers import NamedBarrier, sync_warpgroup
from kernels_dsl.blocks.reduce.partial_sums import VECTOR, vectors_of
from kernels_dsl.config.bsr import ARRIVALS, TOGETHER


@cute.jit
def leave(
    word: Int32,
    acc: cute.Tensor,
    memory: tuple,  # (counts of arrivals behind ARRIVALS, 0 before and after; workspace, float32)
    place: tuple,  # (number of this share of a list's sum, how many there are)
    flags: cute.Pointer,  # 8 bytes of shared memory for each warpgroup
    who: tuple,  # (thread in the warpgroup, warpgroup)
) -> Boolean:
    """Stores a piece's sums; whether those of all the list's pieces are there now."""
    arrivals, workspace = memory
    number, shares = place
    thread, group = who
    size = cutlass.const_expr(cute.size(acc))
    first, count, index = word & 1023, (word >> 10) & 1023, word >> 20
    registers = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, size // VECTOR)))
    mine = vectors_of(workspace, (first + index) * shares + number, size, thread)
    for i in cutlass.range_constexpr(size // VECTOR):
        cute.autovec_copy(registers[None, i], mine[None, i])
    flag = cute.make_tensor(cute.recast_ptr(flags + group, dtype=Int32), cute.make_layout(1))
    sync_warpgroup(NamedBarrier.EPILOGUE, group)
    if thread == 0:
        cute.arch.fence_acq_rel_gpu()
        arrived = arrivals.iterator + ARRIVALS + first * shares + number
        before = cute.arch.atomic_add(arrived, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.fence_acq_rel_gpu()
        flag[0] = before
        if before == count - 1:
            cute.make_tensor(arrived, cute.make_layout(1))[0] = Int32(0)
    sync_warpgroup(NamedBarrier.EPILOGUE, group)
    return flag[0] == count - 1


@cute.jit
def add_up(
    word: Int32,
    workspace: cute.Tensor,
    place: tuple,  # as of `leave`
    size: cutlass.Constexpr,  # a thread's elements of a share
    thread: Int32,
    part: Int32,
    total: cute.Tensor,
):
    """Sums, over all pieces, of as many of a thread's elements as `total` has: part number `part` of them."""
    first, count = word & 1023, (word >> 10) & 1023
    number, shares = place
    vectors = cutlass.const_expr(cute.size(total) // VECTOR)
    total.fill(0.0)
    for piece in cutlass.range(0, count, TOGETHER, unroll=1):
        parts = cute.make_rmem_tensor((VECTOR, vectors, TOGETHER), Float32)
        for b in cutlass.range_constexpr(TOGETHER):
            slot = first + cutlass.min(piece + b, count - 1)
            theirs = vectors_of(workspace, slot * shares + number, size, thread)
            for v in cutlass.range_constexpr(vectors):
                cute.autovec_copy(theirs[None, part * vectors + v], parts[None, v, b])
        for b in cutlass.range_constexpr(TOGETHER):
            there = piece + b < count
            for i in cutlass.range_constexpr(VECTOR * vectors):
                total[i] = total[i] + (parts[i % VECTOR, i // VECTOR, b] if there else Float32(0.0))
