"""Sums of a tile whose K the CTAs of a cluster share, in the memory of a ring whose stages are used up.

As `cluster_sums`, for sums that would take several stages from the ring. A CTA's warps say at the other CTAs'
mbarrier *free* that they have multiplied the tile's last stage, and those send when all have. The producer
does not load the next tile's stages before its own CTA's warps have read what came: mbarrier *taken*.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.blocks.hw.barriers import Consumer, fence_for_async_readers
from kernels_dsl.blocks.reduce.cluster_sums import (
    VECTOR,
    WARPS,
    Place,
    Sums,
    arrive_at_others,
    receive,
    send,
    values_layout,
)


class RingBarriers(NamedTuple):
    """mbarriers of a CTA: *full* of each warpgroup, *free* of each CTA of the cluster, *taken*."""

    full: cute.Pointer
    free: cute.Pointer
    taken: cute.Pointer

    @staticmethod
    @cute.jit
    def set_up(pointer: cute.Pointer, shape: cutlass.Constexpr, loading: cutlass.Constexpr) -> "RingBarriers":
        """The mbarriers at a pointer, of a `config.cluster_sums.SumShape`; `loading`: CTAs that load for each
        other."""
        full, free = pointer, pointer + shape.warpgroups
        taken = free + shape.ctas
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(shape.warpgroups):
                    cute.arch.mbarrier_init(full + i, 1)
                for i in cutlass.range_constexpr(shape.ctas):
                    cute.arch.mbarrier_init(free + i, WARPS * shape.warpgroups)
                cute.arch.mbarrier_init(taken, WARPS * shape.warpgroups * loading)
        return RingBarriers(full, free, taken)

    def await_ring(self, number: Int32) -> None:
        """Producer: returns when the ring may have stages of the cluster's tile of that number."""
        cute.arch.mbarrier_wait(self.taken, (number & 1) ^ 1)


@dataclass(frozen=True)
class RingSums:
    """Sums of a warpgroup's part of a tile, in CTA `rank`. `number`: of the cluster's tiles; `tiles`: the
    ring's first stage, behind which are the others; `shape`: a `config.cluster_sums.SumShape`."""

    barriers: RingBarriers
    tiles: cute.Tensor
    shape: cutlass.Constexpr
    rank: Int32
    number: Int32
    consumer: Consumer
    place: Place

    def values(self) -> cute.Tensor:
        """Sums from other CTAs."""
        pointer = self.tiles.iterator
        floats = cute.make_ptr(Float32, pointer.toint(), pointer.memspace, assumed_align=VECTOR * 4)
        return cute.make_tensor(floats, values_layout(self.shape))

    @cute.jit
    def gather(self, acc: cute.Tensor, more: Boolean) -> Boolean:
        """True in the CTA whose `acc` has the sums of all; the others have sent theirs.

        `more`: the cluster has another tile.
        """
        barriers, warpgroup, phase = self.barriers, self.consumer.warpgroup, self.number & 1
        sums = Sums(self.values(), self.rank, self.shape.ctas, self.consumer, self.place)
        if self.rank < self.shape.warpgroups:
            arrive_at_others(sums, barriers.free + self.rank)
        here = self.rank == sums.meeting
        if here:
            receive(sums, acc, barriers.full + warpgroup, phase)
        else:
            cute.arch.mbarrier_wait(barriers.free + sums.meeting, phase)
            send(sums, acc, barriers.full + warpgroup)
        if more:
            self.give_back()
        return here

    @cute.jit
    def give_back(self):
        """A warp says to the CTAs that load for this one that it has read the sums."""
        place = self.place
        fence_for_async_readers()
        if cutlass.const_expr(place.ctas > 1):
            cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if cutlass.const_expr(place.ctas == 1):
                cute.arch.mbarrier_arrive(self.barriers.taken)
            else:
                for i in cutlass.range_constexpr(place.ctas):
                    cute.arch.mbarrier_arrive(self.barriers.taken, self.rank * place.ctas + i)
