"""Order of the sums of dQ in the SM90 attention backward: a warp for each warpgroup that adds to them.

Key tiles add to a query block one after another. The warp waits until all before this one have added, lets
its warpgroup add, and then lets the next tile do so, once the sums are in memory. So a warpgroup that has
issued its additions goes on: it waits neither for memory nor, unless it is ahead of others, for its turn.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, NamedBarrier
from kernels_dsl.blocks.hw.grid_barrier import await_count

from .backward_sm90_spec import CONSUMERS
from .backward_sm90_visits import Site, Visit, for_each_block
from .backward_work import turn_of

THREADS = WARPGROUP_THREADS + 32
"""A warpgroup and the warp that keeps its turns."""


@cute.jit
def keep_turns(spec: cutlass.Constexpr, site: Site):
    """Role of the warp that keeps the turns of consumer warpgroup `site.group`."""
    for_each_block(spec, site, Int32(0), partial(keep_turn, spec, site))


@cute.jit
def keep_turn(spec: cutlass.Constexpr, site: Site, count: Int32, visit: Visit) -> Int32:
    """The turn of one query block."""
    share = visit.number * CONSUMERS
    if cutlass.const_expr(not spec.roles):
        share += site.group
    turn = site.work.sums.turns.iterator + share
    if cute.arch.lane_idx() == 0:
        await_count(turn, turn_of(spec, site.work, site.job, visit.query))
    cute.arch.sync_warp()
    cute.arch.barrier_arrive(barrier_id=int(NamedBarrier.TURN) + site.group, number_of_threads=THREADS)
    cute.arch.barrier(barrier_id=int(NamedBarrier.ADDED) + site.group, number_of_threads=THREADS)
    if cute.arch.lane_idx() == 0:
        cute.arch.fence_acq_rel_gpu()
        cute.arch.atomic_add(turn, Int32(1), sem="release", scope="gpu")
    return count + 1


@cute.jit
def await_turn(group: Int32):
    """Blocks consumer warpgroup `group` until it may add to a query block."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.TURN) + group, number_of_threads=THREADS)


@cute.jit
def pass_turn(group: Int32):
    """Tells the keeper that warpgroup `group` has issued its additions. Does not block."""
    cute.arch.barrier_arrive(barrier_id=int(NamedBarrier.ADDED) + group, number_of_threads=THREADS)
