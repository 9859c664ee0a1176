"""Sums of dQ in the SM90 attention backward: a warp for each warpgroup that computes a share of dQ.

The warpgroup writes its share to shared memory, in one or several parts, and goes on; the warp adds it to the
sums in global memory, in bulk. In the deterministic variant it waits first until all key tiles before this
one have added, and lets the next one do so once its own sums are in memory. So no warpgroup waits for memory,
nor for its turn, unless all buffers are full.

Where shared memory has no place for a part, the warpgroup adds from registers, in its turn: the warp only
waits for it and passes it on. In any order it may do so in place of the warp, too: that takes 64 KB less of
shared memory's bandwidth a step.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, NamedBarrier, fence_for_async_readers
from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.blocks.hw.grid_barrier import await_count
from kernels_dsl.blocks.schedule.item_queue import ItemQueue

from .backward_sm90_producer import SharedTiles
from .backward_sm90_spec import CONSUMERS, BackwardSpec
from .backward_sm90_tiles import for_each_tile
from .backward_sm90_visits import Site, Visit, for_each_block, site_of
from .backward_work import (
    SHARE_THREADS,
    TURN_WORDS,
    VECTOR,
    BackwardWork,
    KeyJob,
    add_vector,
    turn_of,
    vector_pointer,
)

THREADS = WARPGROUP_THREADS + 32
"""A warpgroup and the warp that adds for it."""


@cute.jit
def let_give_first(spec: cutlass.Constexpr, group: Int32):
    """Before the first `add_sums`: all buffers of warpgroup number `group` are empty."""
    for i in cutlass.range_constexpr(spec.sums_buffers):
        let_give(buffer_of(spec, group, i))


@cute.jit
def add_sums(spec: cutlass.Constexpr, sums: cute.Tensor, site: Site, count: Int32) -> Int32:
    """Role of the warp that adds for warpgroup number `site.group` of those that compute dQ, for one tile of
    keys. `count`: shares of the tiles before; returns those of this one too."""
    return for_each_block(spec, site, count, partial(add_share, spec, sums, site))


GIVEN_AGAIN = -1
"""In place of a number of shares: the next one is one that was added before."""


@cute.jit
def add_sums_of_tiles(
    spec: cutlass.Constexpr, sums: cute.Tensor, work: BackwardWork, queue: ItemQueue, group: Int32
):
    """Role of the warp that adds for warpgroup `group`, in a CTA that takes tile after tile.

    The warpgroup gives a block's share in its next step, and in the first step of all one of nothing. With
    a tile that no query sees, and at the end, it gives the last one, if there was any; its next step does so
    again.
    """
    let_give_first(spec, group)
    count = for_each_tile(spec, work, queue, Int32(0), partial(add_sums_of_tile, spec, sums, work, group))
    if count == GIVEN_AGAIN:
        drop_share(group)


@cute.jit
def add_sums_of_tile(
    spec: cutlass.Constexpr, sums: cute.Tensor, work: BackwardWork, group: Int32, count: Int32, job: KeyJob
) -> Int32:
    """Adds the shares of one tile. `count`: of those before it, or `GIVEN_AGAIN`; returns the next one."""
    if job.walk.count > 0:
        if count <= 0:
            drop_share(group)
            count = Int32(0)
        count = add_sums(spec, sums, site_of(spec, work, job, group, 0), count)
    elif count == GIVEN_AGAIN:
        drop_share(group)
    elif count > 0:
        count = Int32(GIVEN_AGAIN)
    return count


@cute.jit
def drop_share(group: Int32):
    """Takes a share that is not to be added."""
    await_given(group)
    let_give(group)


@cute.jit
def add_share(spec: cutlass.Constexpr, sums: cute.Tensor, site: Site, count: Int32, visit: Visit) -> Int32:
    """The share of one query block, if it is this CTA's."""
    if cutlass.const_expr(spec.ctas > 1):
        if count % spec.ctas == site.rank:
            add_parts(spec, sums, site, count // spec.ctas, visit)
    else:
        add_parts(spec, sums, site, count, visit)
    return count + 1


@cute.jit
def add_parts(spec: cutlass.Constexpr, sums: cute.Tensor, site: Site, count: Int32, visit: Visit):
    """Adds all parts of share number `count` of those of this warp, or stores them if they are the first."""
    counts, earlier = None, Int32(1)
    if cutlass.const_expr(spec.counts_shares):
        place = (visit.number * CONSUMERS + site.group) * TURN_WORDS
        counts = site.work.sums.turns.iterator + place
        earlier = enter(spec, site, visit, counts)
    if cutlass.const_expr(not spec.sums_buffers):
        let_give(site.group)
        await_given(site.group)
    add_given(spec, sums, site, count, visit, earlier)
    if cutlass.const_expr(spec.counts_shares):
        leave(spec, counts, earlier)


@cute.jit
def add_given(
    spec: cutlass.Constexpr, sums: cute.Tensor, site: Site, count: Int32, visit: Visit, earlier: Int32
):
    """Adds the parts of share number `count`, or stores them, as they come. `earlier`: see `enter`."""
    share = visit.number * spec.shares + site.group
    first = cute.arch.lane_idx() == 0
    for i in cutlass.range_constexpr(spec.sums_parts if spec.sums_buffers else 0):
        buffer = buffer_of(spec, site.group, count * spec.sums_parts + i)
        await_given(buffer)
        if first:
            target = site.work.sums.dq.iterator + (cutlass.Int64(share) * spec.sums.size + i * spec.sums_part)
            source = sums[None, buffer].iterator
            if cutlass.const_expr(spec.stores_first):
                if earlier > 0:
                    add_in_bulk(target, source, 4 * spec.sums_part)
                else:
                    store_in_bulk(target, source, 4 * spec.sums_part)
            else:
                add_in_bulk(target, source, 4 * spec.sums_part)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        let_give(buffer)


@cute.jit
def enter(spec: cutlass.Constexpr, site: Site, visit: Visit, counts: cute.Pointer) -> Int32:
    """Blocks until a share may be added. Returns the number of those before it, the same in all lanes, or in
    the first one where they come in any order: 0 for the one that is stored."""
    earlier = Int32(0)
    if cutlass.const_expr(spec.deterministic):
        earlier = turn_of(spec, site.work, site.job, visit.query)
    if cute.arch.lane_idx() == 0:
        if cutlass.const_expr(spec.deterministic):
            await_count(counts, earlier)
        else:
            earlier = cute.arch.atomic_add(counts, Int32(1), sem="relaxed", scope="gpu")
            if earlier > 0:
                await_count(counts + 1, Int32(1))
    cute.arch.sync_warp()
    return earlier


@cute.jit
def leave(spec: cutlass.Constexpr, counts: cute.Pointer, earlier: Int32):
    """Lets those add that wait for this share, once it is in memory."""
    if cute.arch.lane_idx() == 0:
        if cutlass.const_expr(spec.deterministic):
            if cutlass.const_expr(spec.sums_buffers):
                cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.atomic_add(counts, Int32(1), sem="release", scope="gpu")
        elif earlier == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.atomic_add(counts + 1, Int32(1), sem="release", scope="gpu")
    cute.arch.sync_warp()


def buffer_of(spec: BackwardSpec, group: Int32, number: Int32 | int) -> Int32:
    """The buffer of part number `number` that warpgroup `group` hands over."""
    if spec.sums_buffers == 1:
        return group
    return group * spec.sums_buffers + number % spec.sums_buffers


class Share(NamedTuple):
    """A warpgroup's share of dQ: how many of them came before, its query tile and its warpgroup."""

    count: Int32
    number: Int32
    group: Int32


@cute.jit
def give_share(
    spec: cutlass.Constexpr, tiles: SharedTiles, dq: cute.Tensor, work: BackwardWork, share: Share
):
    """Hands over a warpgroup's dQ, or adds it to the sums where there is no buffer for it."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    if cutlass.const_expr(spec.sums_buffers):
        give_sums(tiles, dq, buffer_of(spec, share.group, share.count), thread)
    else:
        place = share.number * spec.shares + share.group
        add_vectors(vector_pointer(spec.sums, work.sums.dq, place, thread), dq)


@cute.jit
def give_sums(tiles: SharedTiles, dq: cute.Tensor, buffer: Int32, thread: Int32):
    """Hands a part of a warpgroup's dQ, in its accumulators, to the warp that adds it."""
    await_turn(buffer)
    vectors = cute.size(dq) // VECTOR
    start = tiles.sums[None, buffer].iterator + thread * VECTOR
    target = cute.make_layout((VECTOR, vectors), stride=(1, VECTOR * SHARE_THREADS))
    source = cute.make_tensor(dq.iterator, cute.make_layout((VECTOR, vectors)))
    cute.autovec_copy(source, cute.make_tensor(start.align(16), target))
    fence_for_async_readers()
    pass_turn(buffer)


def add_vectors(start: cute.Pointer, dq: cute.Tensor) -> None:
    """Adds a thread's accumulators to its vectors in global memory, of which the first is at `start`."""
    for i in range(cute.size(dq) // VECTOR):
        values = [dq[VECTOR * i + j] for j in range(VECTOR)]
        add_vector(start + i * (VECTOR * SHARE_THREADS), values)


@cute.jit
def let_give(buffer: Int32):
    """Tells a warpgroup that it may give the next part in `buffer`."""
    cute.arch.barrier_arrive(barrier_id=int(NamedBarrier.GIVE) + buffer, number_of_threads=THREADS)


@cute.jit
def await_given(buffer: Int32):
    """Blocks until a part is in `buffer`."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.GIVEN) + buffer, number_of_threads=THREADS)


@cute.jit
def await_turn(buffer: Int32):
    """Blocks a warpgroup until it may give a part in `buffer`."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.GIVE) + buffer, number_of_threads=THREADS)


def await_all(spec: BackwardSpec, group: Int32) -> None:
    """Blocks a warpgroup until all that it gave is read."""
    for i in range(spec.sums_buffers):
        await_turn(buffer_of(spec, group, i))


@cute.jit
def pass_turn(buffer: Int32):
    """Tells the warp that a part is in `buffer`. Does not block."""
    cute.arch.barrier_arrive(barrier_id=int(NamedBarrier.GIVEN) + buffer, number_of_threads=THREADS)


def add_in_bulk(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """`cp.reduce.async.bulk`: adds `size` bytes of float32 numbers in shared memory to those at `target`."""
    copy_in_bulk("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", target, source, size)


def store_in_bulk(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """`cp.async.bulk`: stores `size` bytes of shared memory."""
    copy_in_bulk("cp.async.bulk.global.shared::cta.bulk_group", target, source, size)


@dsl_user_op
def copy_in_bulk(
    instruction: str, target: cute.Pointer, source: cute.Pointer, size: int, *, loc=None, ip=None
) -> None:
    """An instruction that takes `size` bytes of shared memory to `target`."""
    addresses = target.toint(loc=loc, ip=ip), source.toint(loc=loc, ip=ip)
    inline_ptx(None, addresses, f"{instruction} [$0], [$1], {size};", "l,r", effects=True, loc=loc, ip=ip)
