"""Two CTAs that share a tile of 128 keys in the SM90 attention backward with wide heads, 64 keys each.

Both walk the same query blocks, whose Q and dO each loads half of for both. dQ of a block is computed by one
of them, over the keys of both, which takes half as many additions to the sums in global memory: they are what
limits wide heads. The other CTA's dS of the block comes from its shared memory by a bulk copy.

A CTA takes the blocks whose stage has its rank. Its dS in that stage is for its own product, that in the
other stage is on its way to the other CTA, which says when it has been read.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from kernels_dsl.blocks.hw.pipeline import consumer_state

from .backward_sm90_handoff import give_back
from .backward_sm90_spec import BackwardSpec
from .backward_sm90_visits import Site, Visit, for_each_block


@cute.jit
def make_incoming(barrier: cute.Pointer) -> cute.Pointer:
    """Initialises the mbarrier of what the other CTA sends; the caller syncs."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barrier, 1)
    return barrier


@cute.jit
def send_d_scores(
    spec: cutlass.Constexpr, ring: pipeline.PipelineAsync, incoming: cute.Pointer, ds: cute.Tensor, site: Site
):
    """Role of the warp that sends dS of the other CTA's blocks to it."""
    send = partial(send_block, spec, ring, incoming, ds, site)
    for_each_block(spec, site, consumer_state(spec.stages), send)


@cute.jit
def send_block(
    spec: cutlass.Constexpr,
    ring: pipeline.PipelineAsync,
    incoming: cute.Pointer,
    ds: cute.Tensor,
    site: Site,
    state: pipeline.PipelineState,
    visit: Visit,
) -> pipeline.PipelineState:
    """Sends dS of one query block, if the other CTA takes it."""
    if state.index != site.rank:
        ring.consumer_wait(state)
        bits = 8 * spec.bytes_of(spec.tile_q, spec.cta_keys)
        atom = cute.make_copy_atom(cpasync.CopyBulkS2SOp(), spec.dtype, num_bits_per_copy=bits)
        with cute.arch.elect_one():
            source, target = plain(spec, ds, state.index), plain(spec, ds, spec.stages)
            cute.copy(atom, source, target, mbar_ptr=incoming, cta_rank=1 - site.rank)
    state.advance()
    return state


def plain(spec: BackwardSpec, tiles: cute.Tensor, stage: Int32 | int) -> cute.Tensor:
    """Elements of a stage of dS in the order of their addresses."""
    size = spec.tile_q * spec.cta_keys
    return cute.make_tensor(tiles.iterator + stage * size, cute.make_layout(size))


@cute.jit
def await_incoming(
    spec: cutlass.Constexpr, incoming: cute.Pointer, site: Site, state: pipeline.PipelineState
):
    """Blocks until the other CTA's dS of the block of `state` is here."""
    if site.thread == 0:
        size = spec.bytes_of(spec.tile_q, spec.cta_keys)
        cute.arch.mbarrier_arrive_and_expect_tx(incoming, size)
    cute.arch.mbarrier_wait(incoming, state.phase)


@cute.jit
def give_back_to_both(ring: pipeline.PipelineAsync, site: Site, state: pipeline.PipelineState):
    """This warp has read dS of both CTAs, and its stage may be written in both."""
    give_back(ring, state)
    if cute.arch.lane_idx() == 0:
        empty = ring.sync_object_empty.get_barrier(state.index)
        cute.arch.mbarrier_arrive(empty, 1 - site.rank)
