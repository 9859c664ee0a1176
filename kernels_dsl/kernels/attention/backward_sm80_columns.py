"""A step of the SM80-class attention backward with wide heads: warps share the columns of dK and dV.

Accumulators of 16 keys x 256 columns take 128 registers a thread, so no warp can have both dK and dV of its
keys. Half of the warps compute P, half dS, and both go through shared memory to all warps with the same keys,
each of which has some columns of dK and dV:

    S^T = K Q^T, P = exp2(S - lse)   | barrier | dV += P^T dO
    dP^T = V dO^T - row sum          | barrier | dS = P dP, dV += P^T dO | barrier | dK += dS^T Q | dQ = dS K

Where scores are bent, the factor of dS is not P: it lies where dS will, each element of which replaces it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.score_tile import to_operand
from kernels_dsl.blocks.hw.mma_sync import warp_accumulators, warp_operand_a
from kernels_dsl.blocks.hw.swizzled_rows import RowsTile, store_rows

from .backward_sm80_copies import Gradients, Memory, Site, Step, Tensors, start_next_copies
from .backward_sm80_products import (
    compute_d_probs,
    compute_probabilities,
    from_shared,
    give_dq,
    give_mask_gradient,
    load_scores,
    multiply,
    slope_in_shared,
    store_scores,
)
from .backward_sm80_spec import BackwardSpec
from .backward_work import BackwardWork


@cute.jit
def step_by_columns(
    spec: cutlass.Constexpr,
    memory: Memory,
    gradients: Gradients,
    work: BackwardWork,
    site: Site,
    now: Step,
):
    """One query block: P and dS, each by half of the warps, then shares of dV, dK and dQ by all of them."""
    config, readers = spec.config, memory.readers
    bent = cutlass.const_expr(spec.variant.bends_scores)
    if cutlass.const_expr(not spec.one_barrier):
        cute.arch.cp_async_wait_group(config.q_stages - 1)
    if cutlass.const_expr(not spec.one_barrier or bent):  # the factors replace dS of the step before
        cute.arch.sync_threads()
    q = memory.base + spec.q_offset + now.number % config.q_stages * spec.q_tile.bytes
    do = memory.base + spec.do_offset + now.number % config.do_stages * spec.do_tile.bytes
    ds = memory.base + spec.ds_offset
    p = ds + spec.ds_tile.bytes
    factors = ds if bent else p

    if site.product == 0:
        for n in cutlass.range_constexpr(config.passes):
            queries = spec.passes[n]
            probs = warp_operand_a(spec.warp_keys, len(queries), spec.dtype)
            scores = compute_probabilities(spec, memory, work, site, now, probs, queries)
            if cutlass.const_expr(bent):
                store_scores(spec, probs, p, site, queries)
            to_operand(scores, probs)
            store_scores(spec, probs, factors, site, queries)
        cute.arch.sync_threads()
    else:
        # The same barrier in both branches: after a common one dP would have registers in the other one too.
        d_probs = warp_accumulators(spec.warp_keys, spec.warp_queries)
        compute_d_probs(spec, memory, site, now, d_probs, spec.all_queries)
        cute.arch.sync_threads()
        if cutlass.const_expr(bent and work.d_mask is not None):
            probs = load_scores(spec, d_probs.layout, p, site)
            give_mask_gradient(spec, work, site, now, d_probs, probs, spec.all_queries)
        slope_in_shared(spec, d_probs, factors, ds, site)
        if cutlass.const_expr(not bent):
            give_mask_gradient(spec, work, site, now, d_probs, None, spec.all_queries)
    steps, stride = spec.tile_q // 16, spec.column_warps
    if cutlass.const_expr(config.gives_kv):
        operand_a = from_shared(spec, readers.dv_p, p, spec.warp_keys)
        multiply(spec, gradients.dv, operand_a, readers.dv_do, do, steps, stride)
    cute.arch.sync_threads()
    if cutlass.const_expr(config.gives_kv):
        operand_a = from_shared(spec, readers.dk_ds, ds, spec.warp_keys)
        multiply(spec, gradients.dk, operand_a, readers.dk_q, q, steps, stride)

    if cutlass.const_expr(spec.one_barrier):
        cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    start_next_copies(spec, memory, work, site, now)
    if cutlass.const_expr(config.gives_q):
        give_dq(spec, memory, work, site, now)


def finish_by_columns(
    spec: BackwardSpec, gradients: Gradients, tensors: Tensors, base: Int32, work: BackwardWork, site: Site
) -> None:
    """Stores this warp's columns of dK and dV."""
    head = site.job.at.kv_head
    store_columns(spec, gradients.dv, tensors.dv[None, None, head], base, Float32(1.0), site)
    store_columns(spec, gradients.dk, tensors.dk[None, None, head], base, work.scores.scale, site)


def store_columns(
    spec: BackwardSpec, values: cute.Tensor, target: cute.Tensor, base: Int32, scale: Float32, site: Site
) -> None:
    """Stores 16 columns of every 16 `column_warps`, times `scale`, by way of this warp's shared memory."""

    def place(column: Int32) -> Int32:
        return column // 16 * (16 * spec.column_warps) + site.column_warp * 16 + column % 16

    tile = RowsTile(spec.warp_keys, 8 * cute.size(values, mode=[2]))
    widest = RowsTile(spec.warp_keys, max(spec.config.dim, spec.config.dim_v) // spec.column_warps).bytes
    result = cute.make_rmem_tensor_like(values, spec.dtype)
    result.store((values.load() * scale).to(spec.dtype))
    first_row = site.job.at.n * spec.tile_k + site.key_warp * spec.warp_keys
    own = base + (site.column_warp * spec.key_warps + site.key_warp) * widest
    cute.arch.sync_warp()
    store_rows(result, tile, own, target, first_row, site.job.seq.k_len, site.lane, place)
