"""Consumer roles of the SM90 attention backward with wide heads: a warpgroup for each product.

Accumulators of 64 keys x 256 columns take 128 registers a thread, so no warpgroup can have both dK and dV of
its keys. All of them have the same 64 keys, and a part of the step each:

    probabilities | S^T = K Q^T    P = exp2(S - lse)            dV += P^T dO
    slopes        | dP^T = V dO^T                dS = P (dP - row sum)   dK += dS^T Q
    dQ            |                                                  dQ = dS K    to memory

P goes to the second role by way of shared memory, from each thread to the same one of the other warpgroup,
and dS to the third, or to that of the other CTA where two share the keys (`backward_sm90_pair`), through a
ring each. So no role waits for a later one before the rings are full, and the tensor cores have work while
exponentials are computed and sums added. Without dQ the third role is not there.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from kernels_dsl.blocks.attention.score_tile import to_operand
from kernels_dsl.blocks.epilogue import tile_store as epi
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, fence_for_async_readers, sync_consumers
from kernels_dsl.blocks.hw.pipeline import consumer_state
from kernels_dsl.blocks.hw.wgmma import WGMMA_M, issue_product, settle

from .backward_sm90_clear import clear_keys, clear_queries
from .backward_sm90_consumer import (
    Mmas,
    operand_registers,
    query_values,
    slopes_of_scores,
    store_d_scores,
    store_keys,
    turned,
    weigh_scores,
)
from .backward_sm90_handoff import await_empty, give, give_back, make_handoff
from .backward_sm90_outputs import Output
from .backward_sm90_pair import await_incoming, give_back_to_both, make_incoming
from .backward_sm90_producer import Rings, SharedTiles
from .backward_sm90_spec import BackwardSpec
from .backward_sm90_sums import add_vectors, await_all, await_turn, buffer_of, give_sums, pass_turn
from .backward_sm90_visits import Site, Visit, for_each_block
from .backward_work import vector_pointer

HANDED = 8
"""Elements of P that a thread hands over at a time: 16 bytes."""


class Handoffs(NamedTuple):
    """Rings between the roles, with as many stages as those of Q and dO, whose states serve them too."""

    probs: pipeline.PipelineAsync
    ds: pipeline.PipelineAsync
    incoming: cute.Pointer | None
    """mbarrier of the other CTA's dS; None where there is no other."""


class Role(NamedTuple):
    """Operands that all roles share."""

    rings: Rings
    handoffs: Handoffs
    mmas: Mmas
    tiles: SharedTiles
    site: Site


class Product(NamedTuple):
    """Operands of a role's two products: descriptors, and the accumulators of the second."""

    a: cute.Tensor
    """This CTA's K or V."""
    b: cute.Tensor
    """Q or dO, by stages."""
    rows: cute.Tensor
    """dO or Q, summed over its rows, by stages."""
    acc: cute.Tensor
    """float32 (64 keys, Dv or D)."""


def make_handoffs(spec: BackwardSpec, barriers: cute.Pointer) -> Handoffs:
    """Initialises the mbarriers of both rings."""
    words = 2 * spec.stages
    return Handoffs(
        probs=make_handoff(barriers, spec.stages, 4),
        ds=make_handoff(barriers + words, spec.stages, 4),
        incoming=make_incoming(barriers + 2 * words) if spec.ctas > 1 else None,
    )


def fragments(
    score_mma: cute.TiledMma,
    sum_mma: cute.TiledMma,
    keys: cute.Tensor,
    queries: cute.Tensor,
    rows: cute.Tensor,
    thread: Int32,
) -> Product:
    """Products of `keys` with `queries`, and of what comes out of them with `rows`."""
    s, d = score_mma.get_slice(thread), sum_mma.get_slice(thread)
    acc = sum_mma.partition_shape_C((WGMMA_M, cute.size(rows, mode=[1])))
    return Product(
        a=score_mma.make_fragment_A(s.partition_A(keys[None, None, 0])),
        b=score_mma.make_fragment_B(s.partition_B(queries)),
        rows=sum_mma.make_fragment_B(d.partition_B(turned(rows))),
        acc=cute.make_rmem_tensor(acc, Float32),
    )


def handed_vectors(tiles: SharedTiles, spec: BackwardSpec, stage: Int32, thread: Int32) -> cute.Tensor:
    """A thread's part of P in shared memory: (HANDED, vectors)."""
    vectors = spec.tile_q * spec.cta_keys // (HANDED * WARPGROUP_THREADS)
    start = tiles.probs.iterator + (stage * vectors * WARPGROUP_THREADS + thread) * HANDED
    layout = cute.make_layout((HANDED, vectors), stride=(1, HANDED * WARPGROUP_THREADS))
    return cute.make_tensor(start.align(16), layout)


@cute.jit
def compute_probabilities(spec: cutlass.Constexpr, role: Role, output: Output):
    """The role of P and dV."""
    tiles, site = role.tiles, role.site
    part = fragments(role.mmas.s, role.mmas.dv, tiles.k, tiles.q, tiles.do, site.thread)
    part.acc.fill(0.0)
    role.rings.k.consumer_wait(consumer_state(1))
    if cutlass.const_expr(spec.varlen):
        role.rings.v.consumer_wait(consumer_state(1))
        clear_keys(spec, tiles, 0, site)
    for_each_block(spec, site, consumer_state(spec.stages), partial(probabilities_of, spec, role, part))
    sync_consumers(spec.consumers)  # K and V are where the outputs are staged
    if cutlass.const_expr(spec.gives_kv):
        store_keys(spec, spec.dv_epilogue, role.mmas.stored, part.acc, output, tiles.staging, site)
        epi.drain(spec.dv_epilogue, site.thread)


@cute.jit
def probabilities_of(
    spec: cutlass.Constexpr, role: Role, part: Product, state: pipeline.PipelineState, visit: Visit
) -> pipeline.PipelineState:
    """P of one query block, and its share of dV."""
    rings, mmas, tiles, site = role.rings, role.mmas, role.tiles, role.site
    stage = state.index
    scores = cute.make_rmem_tensor(mmas.s.partition_shape_C((WGMMA_M, spec.tile_q)), Float32)
    probs = operand_registers(spec, spec.tile_q)
    rings.q.consumer_wait(state)
    if cutlass.const_expr(spec.varlen):
        rings.do.consumer_wait(state)
        clear_queries(spec, tiles, stage, site, visit.query.block)
    issue_product(mmas.s, scores, part.a, part.b[None, None, None, stage], False)
    lse = query_values(spec, tiles.lse, stage, site)
    warpgroup.wait_group(0)
    weigh_scores(spec, lse, site, visit, scores, probs)
    settle(probs)
    rings.q.consumer_release(state)
    hand_over(spec, role, scores, probs, state)
    if cutlass.const_expr(not spec.varlen):
        rings.do.consumer_wait(state)
    if cutlass.const_expr(spec.gives_kv):
        issue_product(mmas.dv, part.acc, probs, part.rows[None, None, None, stage], True)
        warpgroup.wait_group(0)
    rings.do.consumer_release(state)
    state.advance()
    return state


@cute.jit
def hand_over(
    spec: cutlass.Constexpr,
    role: Role,
    scores: cute.Tensor,
    probs: cute.Tensor,
    state: pipeline.PipelineState,
):
    """Gives the factor of dS to the second role: P, times the slopes of the scores where they are bent."""
    factor = probs
    if cutlass.const_expr(spec.variant.bends_scores):
        factor = operand_registers(spec, spec.tile_q)
        to_operand(scores, factor)
    target = handed_vectors(role.tiles, spec, state.index, role.site.thread)
    await_empty(role.handoffs.probs, state)
    cute.autovec_copy(cute.make_tensor(factor.iterator, vectors_of(target)), target)
    give(role.handoffs.probs, state)


def vectors_of(vectors: cute.Tensor) -> cute.Layout:
    """Layout of a thread's vectors in registers, one after another."""
    return cute.make_layout(vectors.shape)


@cute.jit
def compute_slopes(spec: cutlass.Constexpr, role: Role, output: Output):
    """The role of dS and dK."""
    tiles, site = role.tiles, role.site
    part = fragments(role.mmas.s, role.mmas.dk, tiles.v, tiles.do, tiles.q, site.thread)
    part.acc.fill(0.0)
    role.rings.v.consumer_wait(consumer_state(1))
    if cutlass.const_expr(spec.varlen):
        role.rings.k.consumer_wait(consumer_state(1))
        clear_keys(spec, tiles, 0, site)
    for_each_block(spec, site, consumer_state(spec.stages), partial(slopes_of, spec, role, part))
    sync_consumers(spec.consumers)
    if cutlass.const_expr(spec.gives_kv):
        for i in cutlass.range_constexpr(cute.size(part.acc)):
            part.acc[i] = part.acc[i] * site.work.scores.scale
        store_keys(spec, spec.dk_epilogue, role.mmas.stored, part.acc, output, tiles.staging, site)
        epi.drain(spec.dk_epilogue, site.thread)


@cute.jit
def slopes_of(
    spec: cutlass.Constexpr, role: Role, part: Product, state: pipeline.PipelineState, visit: Visit
) -> pipeline.PipelineState:
    """dS of one query block, and its share of dK."""
    rings, mmas, tiles, site = role.rings, role.mmas, role.tiles, role.site
    stage = state.index
    d_probs = cute.make_rmem_tensor(mmas.s.partition_shape_C((WGMMA_M, spec.tile_q)), Float32)
    probs, d_scores = (operand_registers(spec, spec.tile_q) for _ in range(2))
    rings.do.consumer_wait(state)
    if cutlass.const_expr(spec.varlen):
        rings.q.consumer_wait(state)
        clear_queries(spec, tiles, stage, site, visit.query.block)
    issue_product(mmas.s, d_probs, part.a, part.b[None, None, None, stage], False)
    role.handoffs.probs.consumer_wait(state)
    source = handed_vectors(tiles, spec, stage, site.thread)
    cute.autovec_copy(source, cute.make_tensor(probs.iterator, vectors_of(source)))
    give_back(role.handoffs.probs, state)
    row_sums = query_values(spec, tiles.row_sums, stage, site, True)(0, spec.tile_q // 4)
    warpgroup.wait_group(0)
    factors = cute.make_tensor(probs.iterator, d_probs.layout)
    slopes_of_scores(spec, site, visit, row_sums, factors, d_probs, probs)
    rings.do.consumer_release(state)
    to_operand(d_probs, d_scores)
    settle(d_scores)
    if cutlass.const_expr(spec.gives_q):
        await_empty(role.handoffs.ds, state)
        store_d_scores(spec, mmas.s, d_scores, tiles.ds, stage, site)
        fence_for_async_readers()
        give(role.handoffs.ds, state)
    if cutlass.const_expr(not spec.varlen):
        rings.q.consumer_wait(state)
    if cutlass.const_expr(spec.gives_kv):
        issue_product(mmas.dk, part.acc, d_scores, part.rows[None, None, None, stage], True)
        warpgroup.wait_group(0)
    rings.q.consumer_release(state)
    state.advance()
    return state


@cute.jit
def compute_dq(spec: cutlass.Constexpr, role: Role):
    """The role of dQ."""
    role.rings.k.consumer_wait(consumer_state(1))
    if cutlass.const_expr(spec.varlen):
        role.rings.v.consumer_wait(consumer_state(1))
        clear_keys(spec, role.tiles, 0, role.site)
    for_each_block(spec, role.site, consumer_state(spec.stages), partial(dq_of, spec, role))
    await_all(spec, Int32(0))  # the last parts are read: the other warp says so after each
    sync_consumers(spec.consumers)


@cute.jit
def dq_of(
    spec: cutlass.Constexpr, role: Role, state: pipeline.PipelineState, visit: Visit
) -> pipeline.PipelineState:
    """The key tile's share of dQ of one query block, if it is this CTA's."""
    if cutlass.const_expr(spec.ctas > 1):
        if state.index == role.site.rank:
            give_dq(spec, role, state, visit)
    else:
        give_dq(spec, role, state, visit)
    state.advance()
    return state


@cute.jit
def give_dq(spec: cutlass.Constexpr, role: Role, state: pipeline.PipelineState, visit: Visit):
    """Computes the key tile's share of dQ of one query block, part by part, and hands it over or adds it."""
    mma, tiles, site = role.mmas.dq, role.tiles, role.site
    thread_mma = mma.get_slice(site.thread)
    ds = mma.make_fragment_A(thread_mma.partition_A(tiles.ds))
    keys = cute.local_tile(turned(tiles.k), (spec.dq_share[1], spec.cta_keys), (None, 0, None))
    b = mma.make_fragment_B(thread_mma.partition_B(keys))
    dq = cute.make_rmem_tensor(mma.partition_shape_C(spec.dq_share), Float32)
    start = vector_pointer(spec.sums, site.work.sums.dq, visit.number, site.thread)
    first = state.count // spec.ctas * spec.sums_parts
    role.handoffs.ds.consumer_wait(state)
    if cutlass.const_expr(spec.ctas > 1):
        await_incoming(spec, role.handoffs.incoming, site, state)
    # ptxas would compute all of unrolled passes before the first sums are given, and spill them.
    for i in cutlass.range(spec.sums_parts, unroll=1):
        issue_product(mma, dq, ds[None, None, None, state.index], b[None, None, None, i, 0], False)
        if cutlass.const_expr(spec.ctas > 1):
            issue_product(mma, dq, ds[None, None, None, spec.stages], b[None, None, None, i, 1], True)
        warpgroup.wait_group(0)
        if i == spec.sums_parts - 1:
            if cutlass.const_expr(spec.ctas > 1):
                give_back_to_both(role.handoffs.ds, site, state)
            else:
                give_back(role.handoffs.ds, state)
        if cutlass.const_expr(spec.sums_buffers):
            give_sums(tiles, dq, buffer_of(spec, Int32(0), first + i), site.thread)
        else:
            if cutlass.const_expr(spec.deterministic):
                if i == 0:
                    await_turn(Int32(0))
            add_vectors(start + i * spec.sums_part, dq)
    if cutlass.const_expr(spec.deterministic and not spec.sums_buffers):
        pass_turn(Int32(0))
