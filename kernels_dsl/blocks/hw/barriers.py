"""Names of the hardware's named barriers (`bar.sync id`), so that no two roles share an id by accident.

Id 0 is `__syncthreads`. A warpgroup's barrier is its base id plus the warpgroup's index.
"""

import enum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARPGROUP_THREADS = 128


class Consumer(NamedTuple):
    """A thread of a consumer: number of the warpgroup in its CTA, and of the thread in the warpgroup."""

    warpgroup: Int32
    thread: Int32


class NamedBarrier(enum.IntEnum):
    """First id of each named barrier; up to three consumer warpgroups use base + index."""

    EPILOGUE = 1
    """Warps of one consumer warpgroup, around its staging buffers in shared memory."""
    MMA_ORDER = 4
    """Ping-pong: the warpgroup whose turn it is to issue WGMMA."""
    CONSUMERS = 7
    """All consumer warpgroups of a CTA; one id."""
    CLEARED = 6
    """Two consumer warpgroups that clear rows of a stage together, of which a third need not know: the turn
    that would be its own; one id."""
    GIVE = 8
    """A consumer warpgroup and a warp that tells it that it may give; up to four buffers."""
    GIVEN = 12
    """The same, when the warpgroup has given; or a warp and the one that it gives P, up to four pairs."""


def fence_for_async_readers() -> None:
    """Lets TMA and WGMMA, of whoever is then given it, see what this thread wrote to shared memory."""
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def sync_warpgroup(barrier: NamedBarrier, warpgroup: Int32):
    """Barrier among the 128 threads of one consumer warpgroup."""
    cute.arch.barrier(barrier_id=int(barrier) + warpgroup, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def sync_consumers(consumers: cutlass.Constexpr):
    """Barrier among the threads of all `consumers` consumer warpgroups."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=consumers * WARPGROUP_THREADS)


@cute.jit
def wait_turn(barrier: NamedBarrier, warpgroup: Int32):
    """Blocks a warpgroup until the other one has called `give_turn` for it."""
    cute.arch.barrier(barrier_id=int(barrier) + warpgroup, number_of_threads=2 * WARPGROUP_THREADS)


@cute.jit
def give_turn(barrier: NamedBarrier, warpgroup: Int32):
    """Lets `warpgroup` (the other one) pass its next `wait_turn`; does not block."""
    cute.arch.barrier_arrive(barrier_id=int(barrier) + warpgroup, number_of_threads=2 * WARPGROUP_THREADS)
