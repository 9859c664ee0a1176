"""One key tile of the SM80-class attention backward: five products a query block, dK and dV."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.score_tile import to_operand
from kernels_dsl.blocks.attention.seqlen import seq_info
from kernels_dsl.blocks.hw.mma_sync import warp_accumulators, warp_operand_a
from kernels_dsl.blocks.hw.swizzled_rows import (
    MatrixReader,
    RowsTile,
    opaque,
    reader_a,
    reader_a_transposed,
    reader_b,
    reader_b_transposed,
    rows_loader,
    shared_pointer,
    store_rows,
)

from .backward_sm80_columns import finish_by_columns, step_by_columns
from .backward_sm80_copies import (
    Gradients,
    Memory,
    Readers,
    Site,
    Step,
    StepBuffers,
    Tensors,
    first_step,
    following,
    make_copies,
    start_first_copies,
    start_next_copies,
)
from .backward_sm80_products import (
    add_dq,
    compute_d_probs,
    compute_probabilities,
    from_shared,
    give_mask_gradient,
    in_registers,
    multiply,
    slope,
    store_scores,
)
from .backward_sm80_spec import BackwardSpec
from .backward_work import BackwardWork, KeyJob


@cute.jit
def key_tile(spec: cutlass.Constexpr, tensors: Tensors, base: Int32, work: BackwardWork, job: KeyJob):
    """One tile of keys, from its first copies to dK and dV."""
    at, seq = job.at, job.seq
    thread = cute.arch.thread_idx()[0]
    site = make_site(spec, job, thread)
    whole, tensors = tensors, of_sequence(spec, tensors, job)
    for tile, source, offset in ((spec.k_tile, tensors.k, 0), (spec.v_tile, tensors.v, spec.v_offset)):
        load = rows_loader(tile, source[None, None, at.kv_head], spec.threads, thread)
        load.start(at.n * spec.tile_k, seq.k_len, base + offset, True)
    gradients = Gradients(
        dk=warp_accumulators(spec.warp_keys, spec.config.dim // spec.column_warps),
        dv=warp_accumulators(spec.warp_keys, spec.config.dim_v // spec.column_warps),
    )
    gradients.dk.fill(0.0)
    gradients.dv.fill(0.0)
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
        else:
            here, memory = site, Memory(base, make_copies(spec, tensors, thread), readers)
        if cutlass.const_expr(spec.config.by_columns):
            step_by_columns(spec, memory, gradients, work, here, now)
        else:
            step(spec, memory, gradients, work, here, now)
        now = following(work, job, now)
    cute.arch.cp_async_wait_group(0)
    if cutlass.const_expr(spec.config.gives_kv):
        cute.arch.sync_threads()  # shared memory is free for the results
        if cutlass.const_expr(spec.config.by_columns):
            # Places are worked out again: else those of the results would be spilled during the steps.
            job = job._replace(seq=seq_info(work.extent, job.at.batch))
            site, tensors = make_site(spec, job, opaque(thread)), of_sequence(spec, whole, job)
            finish_by_columns(spec, gradients, tensors, base, work, site)
        else:
            finish(spec, gradients, tensors, base, work, site)


def in_batch(job: KeyJob, batch: Int32) -> KeyJob:
    """The job with the number of its sequence as another value."""
    return job._replace(at=job.at._replace(batch=batch))


def make_site(spec: BackwardSpec, job: KeyJob, thread: Int32) -> Site:
    """The parts of this thread's warp."""
    warp = cute.arch.make_warp_uniform(thread // 32)
    site = Site(
        job=job,
        thread=thread,
        lane=thread % 32,
        key_warp=warp % spec.key_warps,
        query_warp=warp // spec.key_warps,
        dq_row=warp // spec.dq_column_warps * spec.dq_rows,
        dq_column_warp=warp % spec.dq_column_warps,
        product=Int32(0),
        column_warp=Int32(0),
    )
    if not spec.config.by_columns:
        return site
    # Warps with the same keys number their parts of the columns, and those with the same product of queries.
    return site._replace(
        query_warp=site.query_warp % spec.query_warps,
        product=warp // spec.score_warps,
        column_warp=site.query_warp,
    )


def of_sequence(spec: BackwardSpec, tensors: Tensors, job: KeyJob) -> Tensors:
    """The tensors (rows, dim, heads) of one sequence."""
    seq, image = job.seq, Int32(0) if spec.varlen else job.at.batch
    starts = Tensors(seq.q_start, seq.k_start, seq.k_start, seq.q_start, seq.k_start, seq.k_start)
    return Tensors(
        *(cute.domain_offset((start, 0, 0), t[None, None, None, image]) for start, t in zip(starts, tensors))
    )


def make_readers(spec: BackwardSpec, site: Site) -> Readers:
    """Readers of the operands of each product."""
    dtype, lane = spec.dtype, site.lane
    first_key = site.key_warp * spec.warp_keys
    first_query = site.query_warp * spec.warp_queries

    def of_queries(reader: MatrixReader) -> MatrixReader:
        return replace(reader, offset=reader.offset + reader.tile.row_offset(first_query, 0))

    def of_rows(tile: RowsTile) -> MatrixReader:
        if spec.config.by_columns:
            return reader_b_transposed(tile, dtype, lane, site.column_warp * 16)
        return of_queries(reader_b_transposed(tile, dtype, lane))

    return Readers(
        s_k=reader_a(spec.k_tile, dtype, lane, first_key),
        s_q=of_queries(reader_b(spec.q_tile, dtype, lane)),
        dp_v=reader_a(spec.v_tile, dtype, lane, first_key),
        dp_do=of_queries(reader_b(spec.do_tile, dtype, lane)),
        dv_p=reader_a(spec.ds_tile, dtype, lane, first_key),
        dv_do=of_rows(spec.do_tile),
        dk_ds=reader_a(spec.ds_tile, dtype, lane, first_key),
        dk_q=of_rows(spec.q_tile),
        dq_ds=reader_a_transposed(spec.ds_tile, dtype, site.lane, site.dq_row),
        dq_k=reader_b_transposed(spec.k_tile, dtype, site.lane, site.dq_column_warp * 16),
    )


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
    config, readers = spec.config, memory.readers
    if cutlass.const_expr(not spec.one_barrier):
        cute.arch.cp_async_wait_group(config.q_stages - 1)
        cute.arch.sync_threads()
    q_stage, do_stage = now.number % config.q_stages, now.number % config.do_stages
    q = memory.base + spec.q_offset + q_stage * spec.q_tile.bytes
    do = memory.base + spec.do_offset + do_stage * spec.do_tile.bytes
    ds = memory.base + spec.ds_offset + now.number % config.ds_stages * spec.ds_tile.bytes

    for n in cutlass.range_constexpr(config.passes):
        one_pass(spec, memory, gradients, work, site, now, StepBuffers(q, do, ds), spec.passes[n])

    if cutlass.const_expr(spec.one_barrier):
        cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    start_next_copies(spec, memory, work, site, now)
    if cutlass.const_expr(spec.config.gives_q):
        dq = warp_accumulators(spec.dq_rows, spec.dq_columns)
        dq.fill(0.0)
        operand_a = from_shared(spec, readers.dq_ds, ds, spec.dq_rows)
        multiply(
            spec, dq, operand_a, readers.dq_k, memory.base, spec.tile_k // 16, stride=spec.dq_column_warps
        )
        add_dq(spec, work, site, now, dq)


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


@cute.jit
def finish(
    spec: cutlass.Constexpr,
    gradients: Gradients,
    tensors: Tensors,
    base: Int32,
    work: BackwardWork,
    site: Site,
):
    """Stores dK and dV of this warp's keys. Of two warps with the same keys one stores dK, the other dV."""
    head = site.job.at.kv_head
    dk, dv = tensors.dk[None, None, head], tensors.dv[None, None, head]
    if cutlass.const_expr(spec.query_warps == 1):
        store_keys(spec, gradients.dv, dv, base, Float32(1.0), site)
        store_keys(spec, gradients.dk, dk, base, work.scores.scale, site)
    else:
        dk_part = base + site.key_warp * (spec.warp_keys * 4 * spec.config.dim)
        dv_part = base + spec.warp_keys * 4 * (
            spec.key_warps * spec.config.dim + site.key_warp * spec.config.dim_v
        )
        if site.query_warp == 0:
            give(gradients.dk, dk_part, site)
        else:
            give(gradients.dv, dv_part, site)
        cute.arch.sync_threads()
        if site.query_warp == 0:
            take(gradients.dv, dv_part, site)
        else:
            take(gradients.dk, dk_part, site)
        cute.arch.sync_threads()
        if site.query_warp == 0:
            store_keys(spec, gradients.dv, dv, base, Float32(1.0), site)
        else:
            store_keys(spec, gradients.dk, dk, base, work.scores.scale, site)


def give(values: cute.Tensor, address: Int32, site: Site) -> None:
    """Accumulators to shared memory, where another warp takes them."""
    for i in range(cute.size(values) // 4):
        vector = shared_pointer(Float32, address + (32 * i + site.lane) * 16, 16)
        source = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
        cute.autovec_copy(source, cute.make_tensor(vector, cute.make_layout(4)))


def take(values: cute.Tensor, address: Int32, site: Site) -> None:
    """Adds to accumulators what another warp gave."""
    for i in range(cute.size(values) // 4):
        vector = shared_pointer(Float32, address + (32 * i + site.lane) * 16, 16)
        found = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(cute.make_tensor(vector, cute.make_layout(4)), found)
        own = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
        own.store(own.load() + found.load())


def store_keys(
    spec: BackwardSpec, values: cute.Tensor, target: cute.Tensor, base: Int32, scale: Float32, site: Site
) -> None:
    """Stores this warp's rows of dK or dV, times `scale`, by way of shared memory of its own."""
    warp = site.query_warp * spec.key_warps + site.key_warp
    tile = RowsTile(spec.warp_keys, 8 * cute.size(values, mode=[2]))
    widest = RowsTile(spec.warp_keys, max(spec.config.dim, spec.config.dim_v)).bytes
    result = cute.make_rmem_tensor_like(values, spec.dtype)
    result.store((values.load() * scale).to(spec.dtype))
    first_row = site.job.at.n * spec.tile_k + site.key_warp * spec.warp_keys
    cute.arch.sync_warp()
    store_rows(result, tile, base + warp * widest, target, first_row, site.job.seq.k_len, site.lane)
