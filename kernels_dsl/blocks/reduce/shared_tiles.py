"""Sums of tiles that clusters share along K: all but one leave theirs in global memory, that one adds them.

Who comes to the end of its piece last keeps its sums in registers, waits until the others have left theirs,
and adds all of them in the order of the pieces, so that a result does not depend on who that is. A cluster
comes to the end of what it began whatever others do, so nobody waits for one that has not started.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.blocks.hw.barriers import NamedBarrier, sync_warpgroup
from kernels_dsl.blocks.hw.grid_barrier import await_count
from kernels_dsl.blocks.reduce.partial_sums import VECTOR, vectors_of
from kernels_dsl.config.stream_k import COUNTERS

CHUNK = 32
"""Elements of a thread that are added at a time, of many pieces."""
OF_TWO = 64
"""The same of two pieces: their order does not matter, so that no sum of those before is kept."""


def with_flags(extra: tuple | None, warpgroups: int) -> tuple:
    """`extra` of `operand_ring.start`, and 8 bytes a warpgroup, with a pointer to them last in its tuple."""
    words, set_up = extra or (0, lambda _: ())
    return words + warpgroups, lambda pointer: (*set_up(pointer), pointer + words)


@cute.jit
def settle(
    piece: tuple,  # of `scheduler.piece_of`
    acc: cute.Tensor,
    memory: tuple,  # ((counters, 0 before and after; workspace, float32), pointer of `with_flags`)
    place: tuple,  # (number of this warpgroup in the cluster, how many there are)
    who: tuple,  # (thread in the warpgroup, warpgroup)
) -> Boolean:
    """Whether `acc` has the sums of all pieces now; else it was left for who will have them."""
    (counters, workspace), flags = memory
    number, shares = place
    thread, group = who
    size = cutlass.const_expr(cute.size(acc))
    first, count, index = piece
    flag = cute.make_tensor(cute.recast_ptr(flags + group, dtype=Int32), cute.make_layout(1))
    of_tile = counters.iterator + (first * shares + number) * COUNTERS
    if thread == 0:
        flag[0] = cute.arch.atomic_add(of_tile, Int32(1), sem="relaxed", scope="gpu")
    sync_warpgroup(NamedBarrier.EPILOGUE, group)
    last = flag[0] == count - 1
    if last:
        await_others(of_tile, count, thread)
        sync_warpgroup(NamedBarrier.EPILOGUE, group)
        add_others(piece, acc, workspace, place, thread)
    else:
        mine = vectors_of(workspace, (first + index) * shares + number, size, thread)
        # Values of their own: vectors are four registers in a row, and sums that had to be in such would meet
        # partial sums of the same register bank in each addition of the main loop.
        zero = (first >> 31).to(Float32)
        for i in cutlass.range_constexpr(size // VECTOR):
            values = cute.make_rmem_tensor((VECTOR,), Float32)
            for j in cutlass.range_constexpr(VECTOR):
                values[j] = acc[i * VECTOR + j] + zero
            cute.autovec_copy(values, mine[None, i])
        sync_warpgroup(NamedBarrier.EPILOGUE, group)
        if thread == 0:
            cute.arch.atomic_add(of_tile + 1, Int32(1), sem="release", scope="gpu")
    return last


@cute.jit
def await_others(of_tile: cute.Pointer, count: Int32, thread: Int32):
    """Until all pieces but this one have been left; sets the counters back to 0."""
    if thread == 0:
        await_count(of_tile + 1, count - 1)
        both = cute.make_tensor(of_tile, cute.make_layout(2))
        both[0], both[1] = Int32(0), Int32(0)


@cute.jit
def add_others(piece: tuple, acc: cute.Tensor, workspace: cute.Tensor, place: tuple, thread: Int32):
    """acc = the sum of all pieces in their order, of which acc is one."""
    number, shares = place
    first, count, index = piece
    size = cutlass.const_expr(cute.size(acc))
    if count == 2:
        theirs = vectors_of(workspace, (first + 1 - index) * shares + number, size, thread)
        for begin in cutlass.range_constexpr(0, size, OF_TWO):
            add_vectors(part_of(acc, begin, min(OF_TWO, size - begin)), theirs, begin // VECTOR)
    else:
        add_many(piece, acc, workspace, place, thread)


@cute.jit
def add_many(piece: tuple, acc: cute.Tensor, workspace: cute.Tensor, place: tuple, thread: Int32):
    """The same, whatever their number."""
    number, shares = place
    first, count, index = piece
    size = cutlass.const_expr(cute.size(acc))
    chunk = cutlass.const_expr(min(CHUNK, size))
    for begin in cutlass.range_constexpr(0, size, chunk):
        before = cute.make_rmem_tensor((VECTOR, chunk // VECTOR), Float32)
        before.fill(0.0)
        for i in cutlass.range(index, unroll=1):
            theirs = vectors_of(workspace, (first + i) * shares + number, size, thread)
            add_vectors(before, theirs, begin // VECTOR)
        own = part_of(acc, begin, chunk)
        for i in cutlass.range_constexpr(chunk):
            own[i] = before[i] + own[i]
        for i in cutlass.range(index + 1, count, unroll=1):
            theirs = vectors_of(workspace, (first + i) * shares + number, size, thread)
            add_vectors(own, theirs, begin // VECTOR)


def part_of(acc: cute.Tensor, begin: int, size: int) -> cute.Tensor:
    """`size` elements of acc from number `begin` on, as (VECTOR, size / VECTOR)."""
    return cute.make_tensor(acc.iterator + begin, cute.make_layout((VECTOR, size // VECTOR)))


@cute.jit
def add_vectors(total: cute.Tensor, theirs: cute.Tensor, begin: cutlass.Constexpr):
    """total += as many of the vectors `theirs` from number `begin` on."""
    found = cute.make_rmem_tensor(total.shape, Float32)
    for v in cutlass.range_constexpr(cute.size(total, mode=[1])):
        cute.autovec_copy(theirs[None, begin + v], found[None, v])
    for i in cutlass.range_constexpr(cute.size(total)):
        total[i] = total[i] + found[i]
