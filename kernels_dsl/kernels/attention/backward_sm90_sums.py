"""Sums of dQ in the SM90 attention backward: a warp for each warpgroup that computes a share of dQ.

The warpgroup writes its share to shared memory and goes on; the warp adds it to the sums in global memory, in
bulk. In the deterministic variant it waits first until all key tiles before this one have added, and lets the
next one do so once its own sums are in memory. So no warpgroup waits for memory, nor for its turn, unless it
is a whole step ahead.

Where shared memory has no place for a share, the warpgroup adds from registers, in its turn: the warp only
waits for it and passes it on.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, NamedBarrier, fence_for_async_readers
from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.blocks.hw.grid_barrier import await_count

from .backward_sm90_producer import SharedTiles
from .backward_sm90_spec import CONSUMERS
from .backward_sm90_visits import Site, Visit, for_each_block
from .backward_work import SHARE_THREADS, VECTOR, turn_of

THREADS = WARPGROUP_THREADS + 32
"""A warpgroup and the warp that adds for it."""


@cute.jit
def add_sums(spec: cutlass.Constexpr, sums: cute.Tensor, site: Site):
    """Role of the warp that adds for consumer warpgroup `site.group`."""
    if cutlass.const_expr(spec.stages_sums):
        let_give(site.group)
    for_each_block(spec, site, Int32(0), partial(add_share, spec, sums, site))


@cute.jit
def add_share(spec: cutlass.Constexpr, sums: cute.Tensor, site: Site, count: Int32, visit: Visit) -> Int32:
    """The share of one query block."""
    share = visit.number * CONSUMERS
    if cutlass.const_expr(spec.stages_sums):
        share += site.group
    first = cute.arch.lane_idx() == 0
    if cutlass.const_expr(spec.deterministic):
        turn = site.work.sums.turns.iterator + share
        if first:
            await_count(turn, turn_of(spec, site.work, site.job, visit.query))
        cute.arch.sync_warp()
    if cutlass.const_expr(not spec.stages_sums):
        let_give(site.group)
    await_given(site.group)
    if cutlass.const_expr(spec.stages_sums):
        if first:
            size = spec.sums.size
            target = site.work.sums.dq.iterator + cutlass.Int64(share) * size
            add_in_bulk(target, sums[None, site.group].iterator, 4 * size)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        let_give(site.group)
    if cutlass.const_expr(spec.deterministic):
        if first:
            if cutlass.const_expr(spec.stages_sums):
                cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.atomic_add(turn, Int32(1), sem="release", scope="gpu")
        cute.arch.sync_warp()
    return count + 1


@cute.jit
def give_sums(tiles: SharedTiles, dq: cute.Tensor, site: Site):
    """Hands a warpgroup's share of dQ, in its accumulators, to the warp that adds it."""
    await_turn(site.group)
    vectors = cute.size(dq) // VECTOR
    start = tiles.sums[None, site.group].iterator + site.thread * VECTOR
    target = cute.make_layout((VECTOR, vectors), stride=(1, VECTOR * SHARE_THREADS))
    source = cute.make_tensor(dq.iterator, cute.make_layout((VECTOR, vectors)))
    cute.autovec_copy(source, cute.make_tensor(start.align(16), target))
    fence_for_async_readers()
    pass_turn(site.group)


@cute.jit
def let_give(group: Int32):
    """Tells warpgroup `group` that it may give its next share."""
    cute.arch.barrier_arrive(barrier_id=int(NamedBarrier.GIVE) + group, number_of_threads=THREADS)


@cute.jit
def await_given(group: Int32):
    """Blocks until warpgroup `group` has given its share."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.GIVEN) + group, number_of_threads=THREADS)


@cute.jit
def await_turn(group: Int32):
    """Blocks warpgroup `group` until it may give its share."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.GIVE) + group, number_of_threads=THREADS)


@cute.jit
def pass_turn(group: Int32):
    """Tells the warp that warpgroup `group` has given its share. Does not block."""
    cute.arch.barrier_arrive(barrier_id=int(NamedBarrier.GIVEN) + group, number_of_threads=THREADS)


@dsl_user_op
def add_in_bulk(target: cute.Pointer, source: cute.Pointer, size: int, *, loc=None, ip=None) -> None:
    """`cp.reduce.async.bulk`: adds `size` bytes of float32 numbers in shared memory to those at `target`."""
    inline_ptx(
        None,
        (target.toint(loc=loc, ip=ip), source.toint(loc=loc, ip=ip)),
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size};",
        "l,r",
        effects=True,
        loc=loc,
        ip=ip,
    )
