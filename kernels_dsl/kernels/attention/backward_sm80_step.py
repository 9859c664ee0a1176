"""A step of the SM80-class attention backward whose warps have dK and dV of their keys."""

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.attention.score_tile import to_operand
from kernels_dsl.blocks.hw.mma_sync import warp_accumulators, warp_operand_a

from .backward_sm80_copies import Gradients, Memory, Site, Step, StepBuffers, ds_of, start_next_copies
from .backward_sm80_products import (
    compute_d_probs,
    compute_probabilities,
    give_dq,
    give_mask_gradient,
    in_registers,
    multiply,
    slope,
    store_scores,
)
from .backward_sm80_spec import BackwardSpec
from .backward_work import BackwardWork


@cute.jit
def step(
    spec: cutlass.Constexpr,
    memory: Memory,
    gradients: Gradients,
    work: BackwardWork,
    site: Site,
    now: Step,
):
    """One query block: P and dS from their products, then its shares of dV, dK and dQ."""
    config = spec.config
    if cutlass.const_expr(not spec.one_barrier):
        cute.arch.cp_async_wait_group(config.q_stages - 1)
        cute.arch.sync_threads()
    q_stage, do_stage = now.number % config.q_stages, now.number % config.do_stages
    q = memory.base + spec.q_offset + q_stage * spec.q_tile.bytes
    do = memory.base + spec.do_offset + do_stage * spec.do_tile.bytes
    ds = ds_of(spec, memory, now.number)

    for n in cutlass.range_constexpr(config.passes):
        one_pass(spec, memory, gradients, work, site, now, StepBuffers(q, do, ds), spec.passes[n])

    if cutlass.const_expr(spec.one_barrier):
        cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    start_next_copies(spec, memory, work, site, now)
    if cutlass.const_expr(config.gives_q):
        give_dq(spec, memory, work, site, now)


def one_pass(
    spec: BackwardSpec,
    memory: Memory,
    gradients: Gradients,
    work: BackwardWork,
    site: Site,
    now: Step,
    buffers: StepBuffers,
    queries: range,
) -> None:
    """P and dS of this warp's keys and `queries`, and their shares of dV and dK."""
    config, readers, count = spec.config, memory.readers, len(queries)
    probs = warp_operand_a(spec.warp_keys, count, spec.dtype)
    scores = compute_probabilities(spec, memory, work, site, now, probs, queries)
    d_probs = warp_accumulators(spec.warp_keys, count)
    compute_d_probs(spec, memory, site, now, d_probs, queries)
    if spec.variant.bends_scores:  # dS is not the gradient of the mask
        give_mask_gradient(spec, work, site, now, d_probs, probs, queries)
    slope(d_probs, scores)
    if not spec.variant.bends_scores:
        give_mask_gradient(spec, work, site, now, d_probs, None, queries)

    if config.gives_kv:
        if not spec.variant.bends_scores:
            to_operand(scores, probs)
        do = buffers.do + spec.do_tile.row_offset(queries.start, 0)
        multiply(spec, gradients.dv, in_registers(probs), readers.dv_do, do, count // 16)
    operand = warp_operand_a(spec.warp_keys, count, spec.dtype)
    to_operand(d_probs, operand)
    if config.gives_q:
        store_scores(spec, operand, buffers.ds, site, queries)
    if config.gives_kv:
        q = buffers.q + spec.q_tile.row_offset(queries.start, 0)
        multiply(spec, gradients.dk, in_registers(operand), readers.dk_q, q, count // 16)
