"""Sums of tiles that CTAs share along K: partial sums meet in global memory, and the last CTA adds them.

Each warpgroup's part of a tile has pieces, numbered in a row, with a share of the workspace each. They are
added in the order of the pieces, so that a result does not depend on who adds them. There are two ways to
meet. With `keep_or_leave` the last warpgroup to come keeps its sums in registers and waits until the others
have left theirs: a cluster comes to the end of what it began whatever others do, so nobody waits for one that
has not started. With `leave` each warpgroup leaves its sums, and the last one reads them all with `add_up`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, Consumer, NamedBarrier, sync_warpgroup
from kernels_dsl.blocks.hw.grid_barrier import await_count
from kernels_dsl.config.bsr import ARRIVALS, TOGETHER
from kernels_dsl.config.stream_k import COUNTERS

VECTOR = 4
"""Elements of an access: 16 bytes."""
CHUNK = 32
"""Elements of a thread that `keep_or_leave` adds at a time, of many pieces."""
OF_TWO = 64
"""The same of two pieces: their order does not matter, so that no sum of those before is kept."""


class Piece(NamedTuple):
    """A piece of a tile's sum: number of the tile's first piece, how many it has, which of them this is."""

    first: Int32
    count: Int32
    index: Int32

    @staticmethod
    def of_word(word: Int32) -> "Piece":
        """The piece whose numbers have ten bits each of `word`."""
        return Piece(word & 1023, (word >> 10) & 1023, word >> 20)


class Part(NamedTuple):
    """The part of a tile that a warpgroup works on: its number, and how many parts a tile has."""

    number: Int32
    count: Int32


class SumMemory(NamedTuple):
    """Global memory of partial sums: int32 counters, 0 before and after; a float32 workspace."""

    counters: cute.Tensor
    workspace: cute.Tensor


@dataclass(frozen=True)
class PartialSums:
    """A warpgroup's piece of its part of a tile. `flags`: 8 bytes of shared memory for each warpgroup."""

    memory: SumMemory
    flags: cute.Pointer
    piece: Piece
    part: Part
    consumer: Consumer

    def vectors(self, number: Int32, size: int) -> cute.Tensor:
        """(VECTOR, size / VECTOR): elements of piece `number`; neighbouring threads have neighbours."""
        share = number * self.part.count + self.part.number
        base = self.memory.workspace.iterator + share * (size * WARPGROUP_THREADS)
        layout = cute.make_layout((VECTOR, size // VECTOR), stride=(1, VECTOR * WARPGROUP_THREADS))
        return cute.make_tensor((base + self.consumer.thread * VECTOR).align(VECTOR * 4), layout)

    def flag(self) -> cute.Tensor:
        """The warpgroup's flag, one int32."""
        pointer = cute.recast_ptr(self.flags + self.consumer.warpgroup, dtype=Int32)
        return cute.make_tensor(pointer, cute.make_layout(1))

    @cute.jit
    def keep_or_leave(self, acc: cute.Tensor) -> Boolean:
        """True where `acc` has the sums of all pieces now; else it was left for another warpgroup to add."""
        (first, count, index), (number, parts), (warpgroup, thread) = self.piece, self.part, self.consumer
        size, flag = cutlass.const_expr(cute.size(acc)), self.flag()
        of_tile = self.memory.counters.iterator + (first * parts + number) * COUNTERS
        if thread == 0:
            flag[0] = cute.arch.atomic_add(of_tile, Int32(1), sem="relaxed", scope="gpu")
        sync_warpgroup(NamedBarrier.EPILOGUE, warpgroup)
        last = flag[0] == count - 1
        if last:
            await_others(of_tile, count, thread)
            sync_warpgroup(NamedBarrier.EPILOGUE, warpgroup)
            self.add_others(acc)
        else:
            mine = self.vectors(first + index, size)
            # Values of their own: vectors are four registers in a row, and sums that had to be in such would
            # meet partial sums of the same register bank in each addition of the main loop.
            zero = (first >> 31).to(Float32)
            for i in cutlass.range_constexpr(size // VECTOR):
                values = cute.make_rmem_tensor((VECTOR,), Float32)
                for j in cutlass.range_constexpr(VECTOR):
                    values[j] = acc[i * VECTOR + j] + zero
                cute.autovec_copy(values, mine[None, i])
            sync_warpgroup(NamedBarrier.EPILOGUE, warpgroup)
            if thread == 0:
                cute.arch.atomic_add(of_tile + 1, Int32(1), sem="release", scope="gpu")
        return last

    @cute.jit
    def add_others(self, acc: cute.Tensor):
        """acc = the sum of all pieces in their order, of which acc is one."""
        size = cutlass.const_expr(cute.size(acc))
        first, count, index = self.piece
        if count == 2:
            theirs = self.vectors(first + 1 - index, size)
            for begin in cutlass.range_constexpr(0, size, OF_TWO):
                add_vectors(elements(acc, begin, min(OF_TWO, size - begin)), theirs, begin // VECTOR)
        else:
            self.add_many(acc)

    @cute.jit
    def add_many(self, acc: cute.Tensor):
        """The same, whatever their number."""
        first, count, index = self.piece
        size = cutlass.const_expr(cute.size(acc))
        for begin in cutlass.range_constexpr(0, size, CHUNK):
            chunk = cutlass.const_expr(min(CHUNK, size - begin))
            before = cute.make_rmem_tensor((VECTOR, chunk // VECTOR), Float32)
            before.fill(0.0)
            for i in cutlass.range(index, unroll=1):
                add_vectors(before, self.vectors(first + i, size), begin // VECTOR)
            own = elements(acc, begin, chunk)
            for i in cutlass.range_constexpr(chunk):
                own[i] = before[i] + own[i]
            for i in cutlass.range(index + 1, count, unroll=1):
                add_vectors(own, self.vectors(first + i, size), begin // VECTOR)

    @cute.jit
    def leave(self, acc: cute.Tensor) -> Boolean:
        """Stores the piece's sums; true where those of all pieces are there now."""
        (first, count, index), (number, parts), (warpgroup, thread) = self.piece, self.part, self.consumer
        size, flag = cutlass.const_expr(cute.size(acc)), self.flag()
        mine = self.vectors(first + index, size)
        for i in cutlass.range_constexpr(size // VECTOR):
            cute.autovec_copy(elements(acc, 0, size)[None, i], mine[None, i])
        sync_warpgroup(NamedBarrier.EPILOGUE, warpgroup)
        if thread == 0:
            cute.arch.fence_acq_rel_gpu()
            arrived = self.memory.counters.iterator + ARRIVALS + first * parts + number
            before = cute.arch.atomic_add(arrived, Int32(1), sem="acq_rel", scope="gpu")
            cute.arch.fence_acq_rel_gpu()
            flag[0] = before
            if before == count - 1:
                cute.make_tensor(arrived, cute.make_layout(1))[0] = Int32(0)
        sync_warpgroup(NamedBarrier.EPILOGUE, warpgroup)
        return flag[0] == count - 1

    @cute.jit
    def add_up(self, size: cutlass.Constexpr, chunk: Int32, total: cute.Tensor):
        """total = the sum of all pieces, of chunk number `chunk` of the thread's `size` elements."""
        first, count, _ = self.piece
        vectors = cutlass.const_expr(cute.size(total) // VECTOR)
        total.fill(0.0)
        for piece in cutlass.range(0, count, TOGETHER, unroll=1):
            loaded = cute.make_rmem_tensor((VECTOR, vectors, TOGETHER), Float32)
            for b in cutlass.range_constexpr(TOGETHER):
                theirs = self.vectors(first + cutlass.min(piece + b, count - 1), size)
                for v in cutlass.range_constexpr(vectors):
                    cute.autovec_copy(theirs[None, chunk * vectors + v], loaded[None, v, b])
            for b in cutlass.range_constexpr(TOGETHER):
                there = piece + b < count
                for i in cutlass.range_constexpr(VECTOR * vectors):
                    total[i] = total[i] + (loaded[i % VECTOR, i // VECTOR, b] if there else Float32(0.0))


@cute.jit
def await_others(of_tile: cute.Pointer, count: Int32, thread: Int32):
    """Waits until all pieces but this one have been left; sets the counters back to 0."""
    if thread == 0:
        await_count(of_tile + 1, count - 1)
        both = cute.make_tensor(of_tile, cute.make_layout(2))
        both[0], both[1] = Int32(0), Int32(0)


def elements(acc: cute.Tensor, begin: int, size: int) -> cute.Tensor:
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
