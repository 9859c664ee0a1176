"""One key tile of the SM80-class attention backward: its query blocks, one after another, to dK and dV."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention.seqlen import seq_info
from kernels_dsl.blocks.hw.mma_sync import warp_accumulators
from kernels_dsl.blocks.hw.swizzled_rows import opaque, rows_loader

from .backward_sm80_columns import finish_by_columns, step_by_columns
from .backward_sm80_copies import (
    Gradients,
    Memory,
    Site,
    Tensors,
    first_step,
    following,
    make_copies,
    start_first_copies,
)
from .backward_sm80_gradients import finish_by_gradients, step_by_gradients
from .backward_sm80_places import in_batch, make_readers, make_site, of_sequence
from .backward_sm80_products import give_last_dq
from .backward_sm80_results import finish
from .backward_sm80_spec import BackwardSpec
from .backward_sm80_step import step
from .backward_work import BackwardWork, KeyJob


@cute.jit
def key_tile(spec: cutlass.Constexpr, tensors: Tensors, base: Int32, work: BackwardWork, job: KeyJob):
    """One tile of keys, from its first copies to dK and dV."""
    at, seq = job.at, job.seq
    site = make_site(spec, job, cute.arch.thread_idx()[0])
    found = of_sequence(spec, tensors, job)
    for tile, source, offset in ((spec.k_tile, found.k, 0), (spec.v_tile, found.v, spec.v_offset)):
        load = rows_loader(tile, source[None, None, at.kv_head], spec.threads, site.thread)
        load.start(at.n * spec.tile_k, seq.k_len, base + offset, True)
    if cutlass.const_expr(spec.config.by_gradients):
        # A loop for each half of the warps.
        if site.product == 0:
            walk(spec, tensors, base, work, site, True)
        else:
            walk(spec, tensors, base, work, site, False)
    else:
        walk(spec, tensors, base, work, site, None)


@cute.jit
def walk(
    spec: cutlass.Constexpr,
    whole: Tensors,
    base: Int32,
    work: BackwardWork,
    site: Site,
    gives_dv: cutlass.Constexpr,  # True and False where each warp has one gradient: dV, else dK
):
    """The query blocks of a tile of keys, to this warp's parts of dK and dV."""
    job, thread, tensors = site.job, site.thread, of_sequence(spec, whole, site.job)
    gradients = make_gradients(spec)
    now = first_step(work, job)
    readers = make_readers(spec, site)
    start_first_copies(spec, Memory(base, make_copies(spec, tensors, thread), readers), work, site, now)
    batch = job.at.batch
    for _ in cutlass.range(now.count, unroll=1):
        # What follows from these two is worked out in each step: else it would be kept in scarce registers.
        base, thread = opaque(base), opaque(thread)
        if cutlass.const_expr(spec.finds_places):
            batch = opaque(batch)
            # Known not to be negative, its number is divided by shifts.
            here = make_site(spec, in_batch(job, batch), thread & (spec.threads - 1))
            copies = make_copies(spec, of_sequence(spec, whole, here.job), here.thread)
            memory = Memory(base, copies, make_readers(spec, here))
        elif cutlass.const_expr(spec.config.by_gradients):
            here = site._replace(lane=thread & 31)
            memory = Memory(base, make_copies(spec, tensors, thread), make_readers(spec, here))
        else:
            here, memory = site, Memory(base, make_copies(spec, tensors, thread), readers)
        if cutlass.const_expr(spec.config.by_columns):
            step_by_columns(spec, memory, gradients, work, here, now)
        elif cutlass.const_expr(spec.config.by_gradients):
            step_by_gradients(spec, memory, gradients, work, here, now, gives_dv)
        else:
            step(spec, memory, gradients, work, here, now)
        now = following(work, job, now)
    if cutlass.const_expr(spec.config.by_gradients and spec.config.gives_q):
        here = make_site(spec, job, opaque(thread))
        memory = Memory(base, make_copies(spec, tensors, here.thread), make_readers(spec, here))
        give_last_dq(spec, memory, work, here, now)
    cute.arch.cp_async_wait_group(0)
    if cutlass.const_expr(spec.config.gives_kv):
        cute.arch.sync_threads()  # shared memory is free for the results
        if cutlass.const_expr(spec.config.by_columns or spec.config.by_gradients):
            # Places are worked out again: else those of the results would be spilled during the steps.
            job = job._replace(seq=seq_info(work.extent, job.at.batch))
            site, tensors = make_site(spec, job, opaque(thread)), of_sequence(spec, whole, job)
        if cutlass.const_expr(spec.config.by_columns):
            finish_by_columns(spec, gradients, tensors, base, work, site)
        elif cutlass.const_expr(spec.config.by_gradients):
            finish_by_gradients(spec, gradients, tensors, base, work, site, gives_dv)
        else:
            finish(spec, gradients, tensors, base, work, site)


def make_gradients(spec: BackwardSpec) -> Gradients:
    """Zeros for this warp's parts of dK and dV; of the one that it has where it has one of them."""
    columns = spec.config.dim // spec.column_warps, spec.config.dim_v // spec.column_warps
    dk, dv = (warp_accumulators(spec.warp_keys, count) for count in columns)
    dk.fill(0.0)
    dv.fill(0.0)
    return Gradients(dk, dk if spec.config.by_gradients else dv)
