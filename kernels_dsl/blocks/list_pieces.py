"""Sums of lists that come in pieces: each piece leaves its sum in global memory, the last one adds them up.

A piece's word has ten bits each of the list's first slot, the number of its pieces, and the number of the
piece among them. Who stores the last sum of a tile reads them all in the order of the pieces, so that a
result does not depend on who that is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.config.bsr import ARRIVALS, PIECE

from .barriers import WARPGROUP_THREADS, NamedBarrier, sync_warpgroup
from .block_lists import BlockLists, ListItem

VECTOR = 4
"""Elements of an access: 16 bytes."""
BATCH = 4
"""Pieces that are read together: what is in flight pays for the way from L2."""
REGISTERS = 184
"""Of a thread, for sums and what is in flight."""


def _chunks(vectors: int) -> list[tuple[int, int]]:
    """(first, number) of the vectors that are added up together: the more, the fewer sums there are yet."""
    chunks, done = [], 0
    while done < vectors:
        fit = (REGISTERS // VECTOR - done) // (BATCH + 1)
        chunks.append((done, min(max(1, fit), vectors - done)))
        done += chunks[-1][1]
    return chunks


def _vectors(workspace: cute.Tensor, share: Int32, size: int, thread: Int32) -> cute.Tensor:
    """(VECTOR, size / VECTOR): a thread's elements of a share; neighbouring threads have neighbours."""
    base = workspace.iterator + share * (size * WARPGROUP_THREADS) + thread * VECTOR
    layout = cute.make_layout((VECTOR, size // VECTOR), stride=(1, VECTOR * WARPGROUP_THREADS))
    return cute.make_tensor(base.align(VECTOR * 4), layout)


@cute.jit
def complete(
    lists: BlockLists,
    item: ListItem,
    acc: cute.Tensor,
    memory: tuple,  # (counts of arrivals behind ARRIVALS, 0 before and after; workspace, float32)
    place: tuple,  # (number of this share of a list's sum, how many there are)
    flags: cute.Pointer,  # 8 bytes of shared memory for each warpgroup
    who: tuple,  # (thread in the warpgroup, warpgroup)
) -> Boolean:
    """Whether `acc` is a list's whole sum: of one that comes whole, or after the last of its pieces."""
    arrivals, workspace = memory
    number, shares = place
    thread, group = who
    size = cutlass.const_expr(cute.size(acc))
    whole = Boolean(True)
    if item.panel >= PIECE:
        word = lists.pieces[item.begin]
        first, count, index = word & 1023, (word >> 10) & 1023, word >> 20
        registers = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, size // VECTOR)))
        mine = _vectors(workspace, (first + index) * shares + number, size, thread)
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
        whole = flag[0] == count - 1
        if whole:
            chunks = cutlass.const_expr(_chunks(size // VECTOR))
            for i in cutlass.range_constexpr(len(chunks)):
                at, width = chunks[i]
                total = cute.make_tensor(acc.iterator + at * VECTOR, cute.make_layout(width * VECTOR))
                total.fill(0.0)
                for piece in cutlass.range(0, count, BATCH, unroll=1):
                    parts = cute.make_rmem_tensor((width * VECTOR, BATCH), Float32)
                    for b in cutlass.range_constexpr(BATCH):
                        slot = first + cutlass.min(piece + b, count - 1)
                        theirs = _vectors(workspace, slot * shares + number, size, thread)
                        for c in cutlass.range_constexpr(width):
                            part = cute.make_tensor(parts[None, b].iterator + c * VECTOR, VECTOR)
                            cute.autovec_copy(theirs[None, at + c], part)
                    for b in cutlass.range_constexpr(BATCH):
                        there = piece + b < count
                        for v in cutlass.range_constexpr(width * VECTOR):
                            total[v] = total[v] + (parts[v, b] if there else Float32(0.0))
    return whole
