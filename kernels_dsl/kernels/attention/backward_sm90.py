"""Attention backward for Hopper: TMA, WGMMA, warp-specialised. dQ, dK and dV from dO and the log-sum-exp.

A CTA has a tile of 128 keys, or takes one after another as it becomes free. It keeps one and walks the query
blocks that see it, of all query heads that share the keys. (Dao, 'FlashAttention-2', 2023, algorithm 2; Shah
et al., 'FlashAttention-3', 2024.) Walks of some tiles may be cut, see `backward_sm90_cut`.

Roles. A producer warp issues the TMA loads: K and V of a tile once, then Q with its log-sum-exp and dO with
its row sums, through a ring each. Two consumer warpgroups have 64 keys each and hold dK and dV of them in
registers.

A step of a consumer, for one query block i; products are WGMMA:

    tensor cores | S^T = K Q^T, dP^T = V dO^T |      | dV += P^T dO | dQ(i-1) = dS(i-1) K, dK += dS^T Q |
    registers              | P = exp2(S - lse) | dS = P (dP - row sum), to memory |    | dQ to memory

dS^T goes to shared memory: each warpgroup computes half of dQ over the keys of both, a step later. So neither
waits for the other's dS, and they stay half a step apart, as they start each tile: one has the tensor cores
while the other computes exponentials. Where tiles follow one another, dQ of a tile's last block comes in the
first step of the next, for which K has two stages. The halves are added to float32 sums in global memory, or
stored where they are the first; `backward_finish` scales, converts and stores them. In the deterministic
variant a query tile's shares are added in the order of their key tiles.
"""

from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.work import LAYOUTS, rows_first
from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.layouts import staged_smem_layout
from kernels_dsl.blocks.hw.pipeline import make_tma_ring, producer_state, sync_after_init
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma
from kernels_dsl.blocks.schedule.item_queue import QUEUE_WORDS, ItemQueue, make_item_queue

from .backward_sm90_consumer import Mmas, Shared, consume, consume_tile
from .backward_sm90_cut import CutArguments, count_ctas, job_of_cta, with_cut
from .backward_sm90_handoff import make_handoff
from .backward_sm90_outputs import Output, Outputs
from .backward_sm90_pair import send_d_scores
from .backward_sm90_producer import Loads, Rings, SharedTiles, States, produce
from .backward_sm90_roles import Role, compute_dq, compute_probabilities, compute_slopes, make_handoffs
from .backward_sm90_spec import CONSUMERS, BackwardSpec, make_spec
from .backward_sm90_sums import add_sums, add_sums_of_tiles, let_give_first
from .backward_sm90_tiles import exists, hand_out_tiles, job_of, tile_of
from .backward_sm90_visits import site_of
from .backward_work import BackwardWork, KeyJob, Sums, describe_backward


class SmemLayouts(NamedTuple):
    """Layouts of the tiles in shared memory; `staging` is that of one warpgroup's outputs."""

    k: cute.ComposedLayout
    v: cute.ComposedLayout
    q: cute.ComposedLayout
    do: cute.ComposedLayout
    ds: cute.ComposedLayout
    staging: cute.ComposedLayout


@cute.jit
def attention_backward_sm90(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    do: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    lse: cute.Tensor,  # float32, see `Sums`
    row_sums: cute.Tensor,
    dq_sums: cute.Tensor | None,
    turns: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple[cute.Tensor, cute.Tensor, cute.Tensor | None] | None,  # `SeqLens`
    max_k: Int32,  # keys of the longest sequence where packed
    mask: cute.Tensor | None,
    aux: tuple[cute.Tensor, ...] | None,
    lists: tuple[cute.Tensor, cute.Tensor] | None,  # `QueryLists`
    d_mask: cute.Tensor | None,
    counter: cute.Tensor | None,  # int32 (1,), 0; None where each CTA has one tile
    max_ctas: Int32,
    cut: CutArguments | None,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    config: cutlass.Constexpr,
    variant: cutlass.Constexpr,
):
    """Launches the kernel. q, k, v, do, dk, dv: `layout` is a key of `LAYOUTS`."""
    mQ, mK, mV, mdO, mdK, mdV = (rows_first(t, LAYOUTS[layout]) for t in (q, k, v, do, dk, dv))
    spec = make_spec(config, variant, mQ.element_type, seqlens is not None)
    mmas, layouts = make_mmas(spec), make_layouts(spec)
    loads = Loads(
        tma.make_load_atom(mQ, layouts.q, (spec.tile_q, spec.dim), spec.ctas),
        tma.make_load_atom(mK, layouts.k, (spec.cta_keys, spec.dim)),
        tma.make_load_atom(mV, layouts.v, (spec.cta_keys, spec.dim_v)),
        tma.make_load_atom(mdO, layouts.do, (spec.tile_q, spec.dim_v), spec.ctas),
    )
    outputs = Outputs(
        dk=make_output(spec.dk_epilogue, mdK, layouts.staging),
        dv=make_output(spec.dv_epilogue, mdV, layouts.staging),
    )
    work = describe_backward(
        spec, mQ, mK, seqlens, max_k, Window(left, right), ScoreOperands(scale, softcap, mask, aux),
        Sums(lse, row_sums, dq_sums, turns), lists=lists, d_mask=d_mask,
    )  # fmt: skip
    work = with_cut(work._replace(counter=counter), cut)
    ctas = count_ctas(work) * spec.ctas if counter is None else cutlass.min(max_ctas, work.tiles.size)
    kernel = backward_kernel(spec, mmas, layouts, loads, outputs, work)
    kernel.launch(
        grid=(ctas, 1, 1),
        block=(spec.threads, 1, 1),
        cluster=(*spec.cluster, 1) if spec.ctas > 1 else None,
        min_blocks_per_mp=1,
        stream=stream,
    )


def make_output(plan: EpiloguePlan, tensor: cute.Tensor, staging: cute.ComposedLayout) -> Output:
    """Store of dK or dV, (rows, D, head, batch)."""
    grouped = cute.group_modes(tensor, 2, 4)
    if plan.use_tma:
        return Output(*tma.make_store_atom(grouped, staging, plan.subtile), grouped)
    return Output(None, grouped, grouped)


def make_mmas(spec: BackwardSpec) -> Mmas:
    """The products of one warpgroup."""
    major, source = OperandMajorMode, warpgroup.OperandSource
    return Mmas(
        s=make_warpgroup_mma(spec.dtype, major.K, major.K, spec.tile_q),
        dp=make_warpgroup_mma(spec.dtype, major.K, major.K, spec.tile_q, source.RMEM),
        dv=make_warpgroup_mma(spec.dtype, major.K, major.MN, spec.columns_at_once(spec.dim_v), source.RMEM),
        dk=make_warpgroup_mma(spec.dtype, major.K, major.MN, spec.columns_at_once(spec.dim), source.RMEM),
        dq=make_warpgroup_mma(spec.dtype, major.MN, major.MN, spec.dq_share[1]),
        stored=make_warpgroup_mma(spec.dtype, major.K, major.K, spec.dk_epilogue.epi_n),
    )


def make_layouts(spec: BackwardSpec) -> SmemLayouts:
    """Layouts of the tiles in shared memory, as TMA writes and WGMMA reads them."""
    major = OperandMajorMode
    return SmemLayouts(
        k=staged_smem_layout(spec.dtype, (spec.cta_keys, spec.dim), spec.ctas * spec.k_stages, major.K),
        v=staged_smem_layout(spec.dtype, (spec.cta_keys, spec.dim_v), 1, major.K),
        q=staged_smem_layout(spec.dtype, (spec.tile_q, spec.dim), spec.stages, major.K),
        do=staged_smem_layout(spec.dtype, (spec.tile_q, spec.dim_v), spec.stages, major.K),
        ds=staged_smem_layout(spec.dtype, (spec.tile_q, spec.cta_keys), spec.ds_tiles, major.MN),
        staging=staged_smem_layout(spec.dtype, spec.dk_epilogue.subtile, spec.dk_epilogue.stages, major.K),
    )


@entry_name("attention_backward_sm90")
@cute.kernel
def backward_kernel(
    spec: cutlass.Constexpr,
    mmas: Mmas,
    layouts: SmemLayouts,
    loads: Loads,
    outputs: Outputs,
    work: BackwardWork,
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for load in loads:
            cpasync.prefetch_descriptor(load.atom)
    barriers, tiles = allocate(spec, layouts)
    warps = CONSUMERS * 4
    k_bytes, v_bytes = spec.bytes_of(spec.tile_k, spec.dim), spec.bytes_of(spec.cta_keys, spec.dim_v)
    q_bytes = spec.bytes_of(spec.tile_q, spec.dim) + spec.stats_bytes
    do_bytes = spec.bytes_of(spec.tile_q, spec.dim_v) + spec.stats_bytes
    rings = Rings(
        v=make_tma_ring(barriers, 1, v_bytes, warps, (1, 1), alone=spec.ctas > 1),
        q=make_tma_ring(barriers + 2, spec.stages, q_bytes, warps, spec.cluster),
        do=make_tma_ring(barriers + 2 + 2 * spec.stages, spec.stages, do_bytes, warps, spec.cluster),
        k=make_tma_ring(
            barriers + 2 + 4 * spec.stages, spec.k_stages, k_bytes, warps, (1, 1), alone=spec.ctas > 1
        ),
    )
    handoff_barriers = barriers + 2 + 4 * spec.stages + 2 * spec.k_stages
    if cutlass.const_expr(spec.roles):
        handoffs = make_handoffs(spec, handoff_barriers)
        sync_after_init(spec.cluster)
        job = job_of(spec, work, tile_of(spec, work, Int32(cute.arch.block_idx()[0]) // spec.ctas))
        site = site_of(spec, work, job, cute.arch.make_warp_uniform(warp // 4), 0)
        run_roles(spec, Role(rings, handoffs, mmas, tiles, site), loads, outputs)
    else:
        shared = Shared(rings, make_handoff(handoff_barriers, spec.stages, warps), mmas, tiles)
        if cutlass.const_expr(spec.many_tiles):
            queue = make_item_queue(handoff_barriers + spec.handoff_words, warps + spec.adders, 1)
            sync_after_init(spec.cluster)
            run_tiles(spec, shared, loads, outputs, work, queue)
        else:
            sync_after_init(spec.cluster)
            number = Int32(cute.arch.block_idx()[0])
            if cutlass.const_expr(work.cut is None):
                job = job_of(spec, work, tile_of(spec, work, number))
            else:
                job = job_of_cta(spec, work, number)
            run_tile(spec, shared, loads, outputs, work, job)


@cute.jit
def run_tiles(
    spec: cutlass.Constexpr,
    shared: Shared,
    loads: Loads,
    outputs: Outputs,
    work: BackwardWork,
    queue: ItemQueue,
):
    """A CTA whose two consumer warpgroups have 64 keys each: tile after tile."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = cute.arch.make_warp_uniform(warp // 4)
    rings, tiles = shared.rings, shared.tiles
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers.producer)
        if warp == spec.consumers * 4:
            states = States(producer_state(spec.stages), producer_state(spec.k_stages), producer_state(1))
            hand_out_tiles(spec, work, queue, states, partial(produce, spec, rings, loads, tiles, work))
        if cutlass.const_expr(spec.adders):
            adder = warp - (spec.consumers * 4 + 1)
            if adder >= 0 and adder < spec.adders:
                add_sums_of_tiles(spec, tiles.sums, work, queue, adder)
    else:
        cute.arch.setmaxregister_increase(spec.registers.consumer)
        consume(spec, shared, outputs, work, queue, group)


@cute.jit
def run_tile(
    spec: cutlass.Constexpr, shared: Shared, loads: Loads, outputs: Outputs, work: BackwardWork, job: KeyJob
):
    """The same: one tile."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers.producer)
        load_and_add(spec, shared.rings, loads, shared.tiles, work, job)
    else:
        cute.arch.setmaxregister_increase(spec.registers.consumer)
        if exists(spec, job):
            consume_tile(spec, shared, outputs, work, group, job)


@cute.jit
def load_and_add(
    spec: cutlass.Constexpr,
    rings: Rings,
    loads: Loads,
    tiles: SharedTiles,
    work: BackwardWork,
    job: KeyJob,
):
    """Roles of the producer warp and of those that add to the sums of dQ, for the one tile of a CTA."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == spec.consumers * 4 and exists(spec, job):
        states = States(producer_state(spec.stages), producer_state(1), producer_state(1))
        produce(spec, rings, loads, tiles, work, states, job)
    if cutlass.const_expr(spec.adders):
        adder = warp - (spec.consumers * 4 + 1)
        if adder >= 0 and adder < spec.adders and exists(spec, job):
            let_give_first(spec, adder)
            add_sums(spec, tiles.sums, site_of(spec, work, job, adder, 0), Int32(0))


@cute.jit
def run_roles(spec: cutlass.Constexpr, role: Role, loads: Loads, outputs: Outputs):
    """A CTA whose consumer warpgroups have the same 64 keys, and a role each: one tile."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    handoffs, tiles, site = role.handoffs, role.tiles, role.site
    job, group = site.job, site.group
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers.producer)
        load_and_add(spec, role.rings, loads, tiles, site.work, job)
        if cutlass.const_expr(spec.ctas > 1):
            if warp == spec.consumers * 4 + 3 and exists(spec, job):
                send_d_scores(spec, handoffs.ds, handoffs.incoming, tiles.ds, site)
    elif group == 0:
        cute.arch.setmaxregister_increase(spec.registers.consumer)
        if exists(spec, job):
            compute_probabilities(spec, role, outputs.dv)
    elif group == 1:
        cute.arch.setmaxregister_increase(spec.registers.consumer)
        if exists(spec, job):
            compute_slopes(spec, role, outputs.dk)
    elif cutlass.const_expr(spec.gives_q):
        cute.arch.setmaxregister_decrease(spec.registers.dq)
        if exists(spec, job):
            compute_dq(spec, role)
    if cutlass.const_expr(spec.ctas > 1):  # until then the other CTA may write and signal here
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def allocate(spec: cutlass.Constexpr, layouts: SmemLayouts) -> tuple[cute.Pointer, SharedTiles]:
    """mbarriers and tiles."""
    words = 2 * (1 + spec.k_stages + 2 * spec.stages) + spec.handoff_words + spec.many_tiles * QUEUE_WORDS
    stats = spec.tile_q * spec.stages

    @cute.struct
    class SharedStorage:
        barriers: cute.struct.Align[cute.struct.MemRange[cutlass.Int64, words], 16]
        lse: cute.struct.Align[cute.struct.MemRange[Float32, stats], 128]
        row_sums: cute.struct.Align[cute.struct.MemRange[Float32, stats], 128]
        k: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.v)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.q)], 1024]
        do: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.do)], 1024]
        ds: cute.struct.Align[
            cute.struct.MemRange[spec.dtype, cute.cosize(layouts.ds) + spec.handed_elements], 1024
        ]
        sums: cute.struct.Align[cute.struct.MemRange[Float32, spec.staged_sums], 128]

    storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
    rows, out = cute.make_layout((spec.tile_q, spec.stages)), layouts.staging
    staging = cute.append(out.outer, cute.make_layout(CONSUMERS, stride=cute.cosize(out)))
    tiles = SharedTiles(
        k=storage.k.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
        v=storage.v.get_tensor(layouts.v.outer, swizzle=layouts.v.inner),
        q=storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
        do=storage.do.get_tensor(layouts.do.outer, swizzle=layouts.do.inner),
        ds=storage.ds.get_tensor(layouts.ds.outer, swizzle=layouts.ds.inner),
        lse=storage.lse.get_tensor(rows),
        row_sums=storage.row_sums.get_tensor(rows),
        probs=cute.make_tensor(
            storage.ds.data_ptr() + cute.cosize(layouts.ds), cute.make_layout(max(spec.handed_elements, 1))
        ),
        staging=storage.k.get_tensor(staging, swizzle=out.inner),
        sums=cute.make_tensor(
            storage.sums.data_ptr(),
            cute.make_layout((spec.sums_part, max(spec.shares * spec.sums_buffers, 1))),
        ),
    )
    return storage.barriers.data_ptr(), tiles
