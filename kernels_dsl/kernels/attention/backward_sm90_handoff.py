"""Rings of stages in shared memory that warps fill for other warps, in the SM90 attention backward."""

import cutlass.cute as cute
from cutlass import pipeline


def make_handoff(barriers: cute.Pointer, stages: int, warps: int) -> pipeline.PipelineAsync:
    """Initialises a ring's mbarriers, 2 * stages words. As many warps read a stage as fill it: `warps`."""
    group = pipeline.CooperativeGroup(pipeline.Agent.Thread, warps)
    return pipeline.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=group,
        consumer_group=group,
        defer_sync=True,
    )


@cute.jit
def give(ring: pipeline.PipelineAsync, state: pipeline.PipelineState):
    """This warp has written its part of a stage."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        ring.producer_commit(state)


@cute.jit
def give_back(ring: pipeline.PipelineAsync, state: pipeline.PipelineState):
    """This warp has read its part of a stage."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        ring.consumer_release(state)


def await_empty(ring: pipeline.PipelineAsync, state: pipeline.PipelineState) -> None:
    """Blocks until the stage at the state of a consumer may be written."""
    ring.sync_object_empty.wait(state.index, state.phase ^ 1)


def in_exchange(state: pipeline.PipelineState, ahead: bool) -> pipeline.PipelineState:
    """The position of a block's dS in its ring of two stages, from that of its Q.

    `ahead`: that ring is one ahead, as before the first block it has one that is none.
    """
    phase = state.phase ^ state.index if ahead else state.phase
    return pipeline.PipelineState(state.stages, state.count, state.index, phase)


def before(state: pipeline.PipelineState, ahead: bool) -> pipeline.PipelineState:
    """The same of the block before."""
    index = state.index ^ 1
    phase = state.phase if ahead else state.phase ^ index
    return pipeline.PipelineState(state.stages, state.count - 1, index, phase)


def other(state: pipeline.PipelineState) -> pipeline.PipelineState:
    """The other stage of a ring of two, to be released."""
    return pipeline.PipelineState(state.stages, state.count, state.index ^ 1, state.phase)
