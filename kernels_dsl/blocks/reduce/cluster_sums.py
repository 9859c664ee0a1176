"""Sums of a tile whose K the CTAs of a cluster share: they meet in one CTA's shared memory.

Those of warpgroup number w meet in CTA number w, from the first again where there are fewer. They are added
in the order of the CTAs: a result does not depend on who came first. The stores are asynchronous and
counted by the receiver's mbarrier *full*; a sender waits at its own *empty* before those of its next tile.
Large sums have no memory of their own, see `ring_sums`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, Consumer
from kernels_dsl.config.cluster_sums import SumShape

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
        floats = cute.recast_ptr(pointer + 2 * shape.warpgroups, dtype=Float32).align(VECTOR * 4)
        return SumBuffers(cute.make_tensor(floats, values_layout(shape)), full, empty)


def values_layout(shape: SumShape) -> cute.Layout:
    """Of the sums that meet in a CTA: (VECTOR, threads, vectors, senders, warpgroups)."""
    vectors = shape.elements // VECTOR
    return cute.make_layout((VECTOR, WARPGROUP_THREADS, vectors, shape.ctas - 1, shape.meeting))


class Place(NamedTuple):
    """The CTA's place among the `ctas` CTAs of the cluster that have the same K tiles."""

    number: Int32
    ctas: int

    def peer(self, rank: Int32) -> Int32:
        """Of the cluster, the CTA with the same tile and another part of K."""
        return self.number + rank * self.ctas


class Sums(NamedTuple):
    """Sums of a warpgroup in CTA `rank` of `ctas`, on their way to another or from the others."""

    values: cute.Tensor
    rank: Int32
    ctas: int
    consumer: Consumer
    place: Place

    @property
    def meeting(self) -> Int32:
        """The CTA that they meet in."""
        return self.consumer.warpgroup % self.ctas

    def own(self, sender: Int32) -> cute.Tensor:
        """(VECTOR, vectors): values of the thread that come from a sender."""
        place = self.consumer.warpgroup // self.ctas
        return self.values[None, self.consumer.thread, None, sender, place]


@cute.jit
def send(sums: cutlass.Constexpr, acc: cute.Tensor, full: cute.Pointer):
    """Sends acc to the CTA that `sums` meet in, whose mbarrier `full` counts the bytes."""
    own = sums.own(sums.rank - Int32(sums.rank > sums.meeting))
    for v in cutlass.range_constexpr(cute.size(acc) // VECTOR):
        words = tuple(acc[v * VECTOR + i].bitcast(Int32) for i in range(VECTOR))
        pointer = own[None, v].iterator.align(VECTOR * 4)
        cute.arch.store_async_dsmem(pointer, words, full, sums.place.peer(sums.meeting))


@cute.jit
def receive(sums: cutlass.Constexpr, acc: cute.Tensor, full: cute.Pointer, phase: Int32):
    """acc += the sums of the other CTAs, in their order."""
    senders = cutlass.const_expr(sums.ctas - 1)
    if sums.consumer.thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, senders * cute.size(acc) * WARPGROUP_THREADS * 4)
    cute.arch.mbarrier_wait(full, phase)
    # Not unrolled: of several senders' values at once some would be spilled.
    for sender in cutlass.range(senders, unroll=1):
        own = sums.own(sender)
        for v in cutlass.range_constexpr(cute.size(acc) // VECTOR):
            found = cute.make_rmem_tensor((VECTOR,), Float32)
            cute.autovec_copy(own[None, v], found)
            for i in cutlass.range_constexpr(VECTOR):
                acc[v * VECTOR + i] = acc[v * VECTOR + i] + found[i]


@cute.jit
def arrive_at_others(sums: cutlass.Constexpr, barrier: cute.Pointer):
    """A warp says to the other CTAs that it has read shared memory: all of its lanes call it."""
    # An arrive at another CTA's barrier may else overtake the loads before it.
    cute.arch.fence_acq_rel_cluster()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for other in cutlass.range_constexpr(sums.ctas - 1):
            peer = Int32(other) + Int32(Int32(other) >= sums.rank)
            cute.arch.mbarrier_arrive(barrier, sums.place.peer(peer))


@dataclass(frozen=True)
class ClusterSums:
    """Sums of a warpgroup's part of a tile. `number`: of the cluster's tiles."""

    buffers: SumBuffers
    rank: Int32
    count: int
    number: Int32
    consumer: Consumer
    place: Place

    @cute.jit
    def gather(self, acc: cute.Tensor, more: Boolean) -> Boolean:
        """True in the CTA whose `acc` has the sums of all; the others have sent theirs.

        `more`: the cluster has another tile.
        """
        buffers, warpgroup, phase = self.buffers, self.consumer.warpgroup, self.number & 1
        sums = Sums(buffers.values, self.rank, self.count, self.consumer, self.place)
        here = self.rank == sums.meeting
        if here:
            receive(sums, acc, buffers.full + warpgroup, phase)
            if more:
                arrive_at_others(sums, buffers.empty + warpgroup)
        else:
            cute.arch.mbarrier_wait(buffers.empty + warpgroup, phase ^ 1)
            send(sums, acc, buffers.full + warpgroup)
        return here
