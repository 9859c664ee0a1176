"""The ring of shared-memory stages between a TMA producer warp and WGMMA consumer warpgroups.

Each stage has two mbarriers. *Full* completes a phase once the producer has announced a number of
bytes and TMA has written as many; *empty* completes once every consumer of the stage, in every CTA
that the producer's multicast reaches, has arrived. Both sides keep an index and a phase bit.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline


def make_tma_ring(
    barriers: cute.Pointer,
    stages: int,
    stage_bytes: int,
    consumer_warps: int,
    cluster: tuple[int, int],
    copying_arrivals: int = 0,
    alone: bool = False,
    parts_of_k: int = 1,
) -> pipeline.PipelineTmaAsync:
    """Initialises the mbarriers of a ring and returns its pipeline. The caller syncs the cluster.

    `barriers` points to 2 * stages 8-byte words of shared memory, `stage_bytes` is what TMA writes
    into one CTA's stage, `consumer_warps` release each stage in each CTA of the (M, N) `cluster`.
    At each full barrier there are `copying_arrivals` beside TMA's. `alone`: no other CTA writes into the
    stages, whatever the cluster. `parts_of_k`: as many such clusters, each with stages of its own, are
    launched as one.
    """
    cluster = (1, 1) if alone else cluster
    arrivals = multicast_release_count(consumer_warps, cluster)
    ring = pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1 + copying_arrivals),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals),
        tx_count=stage_bytes,
        cta_layout_vmnk=cute.make_layout((1, *cluster, 1 if alone else parts_of_k)),
        defer_sync=True,
    )
    # The DSL goes by the CTA's rank in the cluster that is launched, of which this ring knows nothing.
    return replace(ring, is_signaling_thread=cute.arch.lane_idx() == 0) if alone else ring


def expecting(ring: pipeline.PipelineTmaAsync, stage_bytes: int) -> pipeline.PipelineTmaAsync:
    """The ring for a producer whose TMA writes `stage_bytes` into a stage."""
    full = copy(ring.sync_object_full)
    full.tx_count = stage_bytes
    return replace(ring, sync_object_full=full)


def producer_state(stages: int) -> pipeline.PipelineState:
    """Producer's position in an empty ring: the first pass over the stages does not block."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int) -> pipeline.PipelineState:
    """Consumer's position at the start of a ring."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


def put(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    load: Callable[[Int32, cute.Pointer], None],
) -> pipeline.PipelineState:
    """Producer: waits until the stage is empty, calls load(stage, full barrier). Returns the next state."""
    ring.producer_acquire(state)
    load(state.index, ring.producer_get_barrier(state))
    ring.producer_commit(state)
    state.advance()
    return state


def take(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    use: Callable[[Int32], None],
    ready: Boolean | None = None,
) -> pipeline.PipelineState:
    """Consumer: waits until the stage is full and calls use(stage). Returns the next state.

    `ready`: the answer of `is_full` for this stage, if it was asked.
    """
    ring.consumer_wait(state, ready)
    use(state.index)
    state.advance()
    return state


def release(ring: pipeline.PipelineTmaAsync, state: pipeline.PipelineState) -> pipeline.PipelineState:
    """Consumer: the stage may be overwritten. Returns the next state."""
    ring.consumer_release(state)
    state.advance()
    return state


def is_full(ring: pipeline.PipelineTmaAsync, state: pipeline.PipelineState) -> Boolean:
    """True where the stage at `state` is full by now: an answer that comes at once.

    `ring.consumer_try_wait` may take some microseconds for its no. After the last stage of all, which nobody
    fills, it would take them in every launch.
    """
    return ring.sync_object_full.test_wait(state.index, state.phase)


@cute.jit
def skip(state: pipeline.PipelineState, count: Int32) -> pipeline.PipelineState:
    """`state` moved on by `count` >= 0 stages that somebody else consumes."""
    position = state.index + count
    turns = position // state.stages
    return pipeline.PipelineState(
        state.stages, state.count + count, position - turns * state.stages, state.phase ^ (turns & 1)
    )


@cute.jit
def sync_after_init(cluster: cutlass.Constexpr):
    """Makes initialised mbarriers visible to every CTA of the cluster and to the async proxy."""
    cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(cluster[0] * cluster[1] > 1):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.barrier()


def multicast_release_count(consumer_warps: int, cluster: tuple[int, int]) -> int:
    """Arrivals that empty one stage of one CTA.

    A stage is written by the CTAs of the same cluster row (they share A) and of the same cluster
    column (they share B). So each of those CTAs' consumer warps must say that it has read its own
    copy before anybody overwrites it: one elected arrival a warp and a CTA of the row or column.
    """
    if consumer_warps < 1:
        raise ValueError(f"consumer_warps must be at least 1; it is {consumer_warps}")
    rows, columns = cluster
    return consumer_warps * (rows + columns - 1)
