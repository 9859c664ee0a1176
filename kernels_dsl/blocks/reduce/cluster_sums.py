"""Sums of a tile whose K the CTAs of a cluster share: they meet in one CTA's shared memory.

Those of warpgroup number w meet in CTA number w, from the first again where there are fewer. They are added
in the order of the CTAs: a result does not depend on who came first. The stores are asynchronous and
counted by the receiver's mbarrier *full*; a sender waits at its own *empty* before those of its next tile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, Consumer

VECTOR = 4
"""Elements of a store: 16 bytes."""
WARPS = WARPGROUP_THREADS // 32
"""Of a receiving warpgroup, each of which says that it has read."""


class SumBuffers(NamedTuple):
    """Shared memory of a CTA: float32 (VECTOR, threads, vectors, senders, warpgroups that meet here), and two
    mbarriers of each warpgroup."""

    values: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    @staticmethod
    @cute.jit
    def set_up(pointer: cute.Pointer, shape: cutlass.Constexpr) -> "SumBuffers":
        """The buffers at a pointer that is aligned to 16 bytes, of a `config.cluster_sums.SumShape`."""
        full, empty = pointer, pointer + shape.warpgroups
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(shape.warpgroups):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, WARPS)
        extents = (
            VECTOR,
            WARPGROUP_THREADS,
            shape.elements // shape.parts // VECTOR,
            shape.ctas - 1,
            shape.meeting,
        )
        floats = cute.recast_ptr(pointer + 2 * shape.warpgroups, dtype=Float32).align(VECTOR * 4)
        return SumBuffers(cute.make_tensor(floats, cute.make_layout(extents)), full, empty)

    def parts(self, elements: int) -> int:
        """Parts that sums of `elements` a thread are sent in."""
        return elements // (VECTOR * cute.size(self.values, mode=[2]))


@dataclass(frozen=True)
class ClusterSums:
    """Sums of a warpgroup's part of a tile, in CTA `rank` of `count`. `number`: of the cluster's tiles."""

    buffers: SumBuffers
    rank: Int32
    count: int
    number: Int32
    consumer: Consumer

    def own(self, sender: Int32) -> cute.Tensor:
        """(VECTOR, vectors): values of the thread that come from a sender."""
        place = self.consumer.warpgroup // self.count
        return self.buffers.values[None, self.consumer.thread, None, sender, place]

    @cute.jit
    def gather(self, acc: cute.Tensor, more: Boolean) -> Boolean:
        """True in the CTA whose `acc` has the sums of all; the others have sent theirs.

        `more`: the cluster has another tile.
        """
        meeting = self.consumer.warpgroup % self.count
        here = self.rank == meeting
        if here:
            self.receive(acc, more)
        else:
            self.send(acc, meeting)
        return here

    @cute.jit
    def send(self, acc: cute.Tensor, meeting: Int32):
        """Sends the sums to CTA number `meeting`, when it has read those of the tile before."""
        warpgroup, buffers = self.consumer.warpgroup, self.buffers
        parts = cutlass.const_expr(buffers.parts(cute.size(acc)))
        vectors = cutlass.const_expr(cute.size(acc) // (VECTOR * parts))
        own = self.own(self.rank - Int32(self.rank > meeting))
        for part in cutlass.range_constexpr(parts):
            phase = (self.number * parts + part) & 1
            cute.arch.mbarrier_wait(buffers.empty + warpgroup, phase ^ 1)
            for v in cutlass.range_constexpr(vectors):
                first = (part * vectors + v) * VECTOR
                words = tuple(acc[first + i].bitcast(Int32) for i in range(VECTOR))
                pointer = own[None, v].iterator.align(VECTOR * 4)
                cute.arch.store_async_dsmem(pointer, words, buffers.full + warpgroup, meeting)

    @cute.jit
    def receive(self, acc: cute.Tensor, more: Boolean):
        """acc += the sums of the other CTAs, in their order."""
        (warpgroup, thread), buffers = self.consumer, self.buffers
        parts = cutlass.const_expr(buffers.parts(cute.size(acc)))
        vectors = cutlass.const_expr(cute.size(acc) // (VECTOR * parts))
        senders = cutlass.const_expr(self.count - 1)
        full = buffers.full + warpgroup
        for part in cutlass.range_constexpr(parts):
            if thread == 0:
                bytes_sent = senders * vectors * VECTOR * WARPGROUP_THREADS * 4
                cute.arch.mbarrier_arrive_and_expect_tx(full, bytes_sent)
            cute.arch.mbarrier_wait(full, (self.number * parts + part) & 1)
            for sender in cutlass.range_constexpr(senders):
                own = self.own(Int32(sender))
                for v in cutlass.range_constexpr(vectors):
                    first = (part * vectors + v) * VECTOR
                    found = cute.make_rmem_tensor((VECTOR,), Float32)
                    cute.autovec_copy(own[None, v], found)
                    for i in cutlass.range_constexpr(VECTOR):
                        acc[first + i] = acc[first + i] + found[i]
            if cutlass.const_expr(part + 1 < parts):
                self.release(senders)
            elif more:
                self.release(senders)

    @cute.jit
    def release(self, senders: cutlass.Constexpr):
        """Lets the other CTAs send again. Those of a warp that has read them: all of its lanes call it."""
        # An arrive at another CTA's barrier may else overtake the loads before it.
        cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for sender in cutlass.range_constexpr(senders):
                peer = Int32(sender) + Int32(Int32(sender) >= self.rank)
                cute.arch.mbarrier_arrive(self.buffers.empty + self.consumer.warpgroup, peer)
