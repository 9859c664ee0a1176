"""A step of the SM80-class attention backward whose warps have one gradient each: half of them dV, half dK.

Accumulators of 32 keys x 128 columns take 128 registers a thread, so a warp has either dV or dK of its keys,
and what that takes: the first half P, the others dS. P comes to the warp with dK of the same keys by way of
shared memory, as the registers of an operand, where its dS will lie:

    S^T = K Q^T, P = exp2(S - lse)        | P to shared memory | dQ of the block before | dV += P^T dO
    dQ of the block before, dP^T = V dO^T | wait for P         | dS = P (dP - row sum), to shared memory
                                                               | dK += dS^T Q
    barrier, copies of a later block start

A fragment of Q or dO serves four products of 16 x 8, as there are 32 keys, and neither P nor dS is read from
shared memory for dV and dK. As dQ comes a step late, the matrix unit has work while P is computed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.score_tile import to_operand
from kernels_dsl.blocks.hw.barriers import NamedBarrier
from kernels_dsl.blocks.hw.mma_sync import warp_accumulators, warp_operand_a
from kernels_dsl.blocks.hw.swizzled_rows import shared_pointer

from .backward_sm80_copies import Gradients, Memory, Site, Step, Tensors, ds_of, start_next_copies
from .backward_sm80_products import (
    compute_d_probs,
    compute_probabilities,
    give_last_dq,
    give_mask_gradient,
    in_registers,
    multiply,
    store_scores,
)
from .backward_sm80_results import store_keys
from .backward_sm80_spec import BackwardSpec
from .backward_work import BackwardWork

PAIR_THREADS = 64
"""Threads of the two warps with the same keys."""
FRAGMENT = 8
"""Elements that a thread has of 16 x 16 of an operand A."""


@cute.jit
def step_by_gradients(
    spec: cutlass.Constexpr,
    memory: Memory,
    gradients: Gradients,
    work: BackwardWork,
    site: Site,
    now: Step,
    gives_dv: cutlass.Constexpr,
):
    """One query block for a warp with dV or with dK, and dQ of the block before."""
    config, readers, steps = spec.config, memory.readers, spec.tile_q // 16
    q = memory.base + spec.q_offset + now.number % config.q_stages * spec.q_tile.bytes
    do = memory.base + spec.do_offset + now.number % config.do_stages * spec.do_tile.bytes
    ds = ds_of(spec, memory, now.number)
    if cutlass.const_expr(gives_dv):
        operand_a = in_registers(give_probabilities(spec, memory, work, site, now, ds))
        if cutlass.const_expr(config.gives_q):
            give_last_dq(spec, memory, work, site, now)
        if cutlass.const_expr(config.gives_kv):
            multiply(spec, gradients.dv, operand_a, readers.dv_do, do, steps)
    else:
        if cutlass.const_expr(config.gives_q):
            give_last_dq(spec, memory, work, site, now)
        operand_a = in_registers(compute_slopes(spec, memory, work, site, now, ds))
        if cutlass.const_expr(config.gives_kv):
            multiply(spec, gradients.dk, operand_a, readers.dk_q, q, steps)
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    start_next_copies(spec, memory, work, site, now)


def give_probabilities(
    spec: BackwardSpec, memory: Memory, work: BackwardWork, site: Site, now: Step, ds: Int32
) -> cute.Tensor:
    """P of this warp's keys as an operand A, and the factors of their dS to the warp that computes it."""
    probs = warp_operand_a(spec.warp_keys, spec.warp_queries, spec.dtype)
    scores = compute_probabilities(spec, memory, work, site, now, probs, spec.all_queries)
    factors = probs
    if spec.variant.bends_scores:
        factors = warp_operand_a(spec.warp_keys, spec.warp_queries, spec.dtype)
    to_operand(scores, factors)
    for source, place in zip(fragments(factors), handed_fragments(spec, ds, site)):
        cute.autovec_copy(source, place)
    cute.arch.barrier_arrive(barrier_id=pair_barrier(site), number_of_threads=PAIR_THREADS)
    return probs


def compute_slopes(
    spec: BackwardSpec, memory: Memory, work: BackwardWork, site: Site, now: Step, ds: Int32
) -> cute.Tensor:
    """dS of this warp's keys as an operand A, and to shared memory."""
    if work.d_mask is not None and spec.variant.bends_scores:
        raise ValueError("warps for each gradient lack P for the gradient of a mask beside bent scores")
    d_probs = warp_accumulators(spec.warp_keys, spec.warp_queries)
    compute_d_probs(spec, memory, site, now, d_probs, spec.all_queries)
    cute.arch.barrier(barrier_id=pair_barrier(site), number_of_threads=PAIR_THREADS)
    for part, place in zip(fragments(d_probs), handed_fragments(spec, ds, site)):
        factors = cute.make_rmem_tensor(FRAGMENT, spec.dtype)
        cute.autovec_copy(place, factors)
        part.store(part.load() * factors.load().to(Float32))
    give_mask_gradient(spec, work, site, now, d_probs, None, spec.all_queries)
    slopes = warp_operand_a(spec.warp_keys, spec.warp_queries, spec.dtype)
    to_operand(d_probs, slopes)
    if spec.config.gives_q:
        cute.arch.sync_warp()  # all lanes have read factors that dS replaces
        store_scores(spec, slopes, ds, site, spec.all_queries)
    return slopes


def pair_barrier(site: Site) -> Int32:
    """The named barrier of the two warps with the same keys."""
    return int(NamedBarrier.GIVEN) + site.key_warp


def fragments(values: cute.Tensor) -> list[cute.Tensor]:
    """A thread's accumulators or operand A, 16 x 16 scores at a time, which are in the same order."""
    layout = cute.make_layout(FRAGMENT)
    return [cute.make_tensor(values.iterator + i, layout) for i in range(0, cute.size(values), FRAGMENT)]


def handed_fragments(spec: BackwardSpec, ds: Int32, site: Site) -> list[cute.Tensor]:
    """Places of the fragments that a thread hands to the same thread of the other warp: a vector of 16 bytes
    of each, within the rows of dS at `ds` that have their keys."""
    size = spec.warp_keys * spec.warp_queries
    first = ds + site.key_warp * (2 * size) + site.lane * 16
    layout = cute.make_layout(FRAGMENT)
    return [
        cute.make_tensor(shared_pointer(spec.dtype, first + 512 * i, 16), layout)
        for i in range(size // (32 * FRAGMENT))
    ]


@cute.jit
def finish_by_gradients(
    spec: cutlass.Constexpr,
    gradients: Gradients,
    tensors: Tensors,
    base: Int32,
    work: BackwardWork,
    site: Site,
    gives_dv: cutlass.Constexpr,
):
    """Stores this warp's dV or dK."""
    head = site.job.at.kv_head
    if cutlass.const_expr(gives_dv):
        store_keys(spec, gradients.dv, tensors.dv[None, None, head], base, Float32(1.0), site)
    else:
        store_keys(spec, gradients.dk, tensors.dk[None, None, head], base, work.scores.scale, site)
