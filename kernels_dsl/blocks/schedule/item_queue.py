"""Work items that clusters take as they become free, passed on to every warp of a cluster.

One counter in global memory hands out the numbers of all items, in order. The producer warp of a cluster's
first CTA, the leader, takes the next number while it loads the item before, and stores what the number stands
for, four words, into a ring in the shared memory of every CTA of the cluster. The first item of a cluster has
the cluster's own number, so that a launch takes exactly as many numbers as there are items: the last one sets
the counter back to 0 for the next launch. A counter must not be shared by launches that can
run at the same time.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import inline_ptx

STAGES = 4
"""Items in flight to the warps of a cluster."""
BYTES = 16
"""Of one item."""
NEVER = -(1 << 31)
"""No item has it as its first word."""
QUEUE_WORDS = 2 * STAGES + STAGES * BYTES // 8
"""8-byte words of shared memory, mbarriers and items."""


class ItemQueue(NamedTuple):
    """One CTA's part: mbarriers of the slots, and the slots. Only the leader's `empty` is used."""

    full: cute.Pointer
    empty: cute.Pointer
    slots: cute.Tensor  # (words of an item, STAGES), int32


def make_item_queue(words: cute.Pointer, consumer_warps: int, cluster_size: int) -> ItemQueue:
    """Initialises a queue in QUEUE_WORDS words of shared memory, aligned to 16 bytes. The caller syncs.

    `consumer_warps` of each CTA, and the producer warps of all but the leader, receive the items.
    """
    full, empty = words, words + STAGES
    base = (words + 2 * STAGES).toint()
    iterator = cute.make_ptr(Int32, base, cute.AddressSpace.smem, assumed_align=BYTES)
    slots = cute.make_tensor(iterator, cute.make_layout((BYTES // 4, STAGES)))
    _init(full, empty, cluster_size * (consumer_warps + 1) - 1)
    return ItemQueue(full, empty, slots)


@cute.jit
def _init(full: cute.Pointer, empty: cute.Pointer, receivers: cutlass.Constexpr):
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, receivers)


@dsl_user_op
def _count_up(counter: cute.Pointer, last: Int32, *, loc=None, ip=None) -> Int32:
    """The number at `counter`, which becomes one more, or 0 after `last`.

    ptxas makes one addition of those of all lanes, waits for it at once, and takes many registers.
    """
    text = "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;"
    return inline_ptx(Int32, (counter.toint(), last), text, "=r,l,r", effects=True, loc=loc, ip=ip)


@cute.jit
def ask_number(counter: cute.Tensor, size: Int32) -> Int32:
    """Starts taking the next of `size` numbers, for `number_taken` of this lane. Leader's producer warp."""
    before = Int32(0)
    if cute.arch.lane_idx() == 0:
        before = _count_up(counter.iterator, size - 1)
    return before


def number_taken(before: Int32, clusters: Int32) -> Int32:
    """The number that `ask_number` took, the same in all lanes; `size` or more: there is none."""
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(before, 0)) + clusters


@cute.jit
def send(
    queue: ItemQueue,
    state: pipeline.PipelineState,
    words: tuple[Int32, Int32, Int32, Int32],
    cluster_size: cutlass.Constexpr,
):
    """Leader's producer warp: four words to every CTA; blocks while a receiver is STAGES items behind.

    A CTA without peers stores plainly: remote stores in a cluster of one work, but memcheck reports them.
    """
    cute.arch.mbarrier_wait(queue.empty + state.index, state.phase)
    full, slot = queue.full + state.index, queue.slots[None, state.index]
    peer = cute.arch.lane_idx()
    if cutlass.const_expr(cluster_size == 1):
        if peer == 0:
            for i in cutlass.range_constexpr(BYTES // 4):
                slot[i] = words[i]
            cute.arch.mbarrier_arrive(full)
    else:
        if peer < cluster_size:
            cute.arch.mbarrier_arrive_and_expect_tx(full, BYTES, peer)
            cute.arch.store_async_dsmem(slot.iterator.align(BYTES), words, full, peer)
    cute.arch.sync_warp()


@cute.jit
def receive(
    queue: ItemQueue, state: pipeline.PipelineState, cluster_size: cutlass.Constexpr
) -> tuple[Int32, Int32, Int32, Int32]:
    """The next item's words, the same in all lanes. Every receiving warp calls it for every item.

    An arrive at another CTA's barrier has the scope of this CTA unless it says more, so it may overtake the
    load before it where shared memory is busy, and the leader would overwrite the slot too early. Scope
    `cluster` costs two MEMBARs; here the arrive depends on what was loaded.
    """
    cute.arch.mbarrier_wait(queue.full + state.index, state.phase)
    slot = cute.make_rmem_tensor(BYTES // 4, Int32)
    cute.autovec_copy(queue.slots[None, state.index], slot)
    words = tuple(cute.arch.make_warp_uniform(slot[i]) for i in range(BYTES // 4))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if cutlass.const_expr(cluster_size == 1):
            cute.arch.mbarrier_arrive(queue.empty + state.index)
        elif slot[0] != NEVER:
            cute.arch.mbarrier_arrive(queue.empty + state.index, Int32(0))
    return words


@cute.jit
def wait_until_received(queue: ItemQueue, state: pipeline.PipelineState):
    """Leader's producer warp, after the last item: its peers signal its shared memory no more."""
    for _ in cutlass.range_constexpr(STAGES):
        cute.arch.mbarrier_wait(queue.empty + state.index, state.phase)
        state.advance()
