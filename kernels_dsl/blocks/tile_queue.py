"""Work tiles handed out as CTAs become free: one counter in global memory for all of them.

The producer warp of a CTA asks for the next number before it loads a tile, looks at the answer after its
loads, and passes it on to the consumers through a small ring in shared memory. The first number of a CTA is
its own index, so a launch takes exactly as many numbers as there are tiles; who takes the last one sets the
counter back to 0 for the next launch. A counter must not be shared by launches that can run at the same time.
"""

import cutlass.cute as cute
from cutlass import Int32, pipeline

STAGES = 2
"""Numbers in flight to the consumers of one CTA."""


def make_number_ring(barriers: cute.Pointer, threads: int) -> pipeline.PipelineAsync:
    """Ring from the producer warp's 32 threads to `threads` others. The caller syncs.

    `barriers` points to 2 * STAGES 8-byte words of shared memory.
    """
    return pipeline.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, threads),
        defer_sync=True,
    )


@cute.jit
def ask_number(counter: cute.Tensor) -> Int32:
    """Takes a number; what comes back is for `number_of`, later: using it waits for global memory."""
    before = Int32(0)
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
    return before


@cute.jit
def number_of(asked: Int32, counter: cute.Tensor, size: Int32) -> Int32:
    """Next tile of this CTA, the same in all lanes of the warp; `size` or more: there is none."""
    if cute.arch.lane_idx() == 0 and asked == size - 1:
        counter[0] = Int32(0)
    number = cute.arch.shuffle_sync(asked, 0) + cute.arch.grid_dim()[0]
    return cute.arch.make_warp_uniform(number)


@cute.jit
def send_number(
    ring: pipeline.PipelineAsync, numbers: cute.Tensor, state: pipeline.PipelineState, number: Int32
):
    """Producer warp: passes `number` on to the consumers; blocks while they are STAGES tiles behind."""
    ring.producer_acquire(state)
    if cute.arch.lane_idx() == 0:
        numbers[state.index] = number
    ring.producer_commit(state)


@cute.jit
def receive_number(
    ring: pipeline.PipelineAsync, numbers: cute.Tensor, state: pipeline.PipelineState
) -> Int32:
    """Consumers: the number of their next tile."""
    ring.consumer_wait(state)
    number = numbers[state.index]
    ring.consumer_release(state)
    return cute.arch.make_warp_uniform(number)
