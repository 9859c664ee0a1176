"""One key tile of the SM80-class attention backward: copies, five products a query block, dK and dV."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.mask import column_offset
from kernels_dsl.blocks.attention.probabilities import weigh
from kernels_dsl.blocks.attention.query_blocks import QueryWalk
from kernels_dsl.blocks.attention.score_tile import to_operand
from kernels_dsl.blocks.hw.cp_async import cp_async
from kernels_dsl.blocks.hw.grid_barrier import await_count
from kernels_dsl.blocks.hw.mma_sync import make_tiled_mma, warp_accumulators, warp_operand_a, warp_product
from kernels_dsl.blocks.hw.swizzled_rows import (
    MatrixReader,
    RowsLoader,
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

from .backward_sm80_spec import BackwardSpec
from .backward_work import (
    SHARE_THREADS,
    VECTOR,
    BackwardWork,
    KeyJob,
    QueryBlock,
    add_vector,
    listed_block,
    score_step,
    turn_of,
)

OperandA = Callable[[int], cute.Tensor]
"""A K step's number -> fragments ((2, 2, 2), M) of it."""


class Tensors(NamedTuple):
    """Operands and results (rows, dim, heads, batch)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


class Site(NamedTuple):
    """A warp's place: its tile, and its parts of the products."""

    job: KeyJob
    thread: Int32
    lane: Int32
    key_warp: Int32
    """Part of the keys."""
    query_warp: Int32
    """Part of the queries of a step."""
    dq_row: Int32
    """First query of this warp's part of dQ."""
    dq_column_warp: Int32
    """First column of this warp's part of dQ, 16 at a time."""


class Copies(NamedTuple):
    """This thread's share of the copies of Q and dO, and what a query head adds to their addresses."""

    q: RowsLoader
    do: RowsLoader
    q_head: Int64
    do_head: Int64


class Readers(NamedTuple):
    """Fragments of this warp's parts, named by the product that they are read for and the operand."""

    s_k: MatrixReader
    s_q: MatrixReader
    dp_v: MatrixReader
    dp_do: MatrixReader
    dv_do: MatrixReader
    dk_q: MatrixReader
    dq_ds: MatrixReader
    dq_k: MatrixReader


class Memory(NamedTuple):
    """Addresses that this thread copies to and reads from."""

    base: Int32
    """Address of the CTA's shared memory."""
    copies: Copies
    readers: Readers


class Step(NamedTuple):
    """A step of a key tile: a block of a query head, and its number among the steps that there are."""

    head: Int32
    block: Int32
    number: Int32
    """From 0 to `count`, which is after the last."""
    count: Int32

    @property
    def exists(self) -> Boolean:
        """Says whether it comes before the end."""
        return self.number < self.count


class Gradients(NamedTuple):
    """Accumulators ((2, 2), M, N) of this warp's keys."""

    dk: cute.Tensor
    dv: cute.Tensor


@cute.jit
def key_tile(spec: cutlass.Constexpr, tensors: Tensors, base: Int32, work: BackwardWork, job: KeyJob):
    """One tile of keys, from its first copies to dK and dV."""
    at, seq = job.at, job.seq
    thread = cute.arch.thread_idx()[0]
    site = make_site(spec, job, thread)
    tensors = of_sequence(spec, tensors, job)
    for tile, source, offset in ((spec.k_tile, tensors.k, 0), (spec.v_tile, tensors.v, spec.v_offset)):
        load = rows_loader(tile, source[None, None, at.kv_head], spec.threads, thread)
        load.start(at.n * spec.tile_k, seq.k_len, base + offset, True)
    gradients = Gradients(
        dk=warp_accumulators(spec.warp_keys, spec.config.dim),
        dv=warp_accumulators(spec.warp_keys, spec.config.dim_v),
    )
    gradients.dk.fill(0.0)
    gradients.dv.fill(0.0)
    now = first_step(work, job)
    readers = make_readers(spec, site)
    start_first_copies(spec, Memory(base, make_copies(spec, tensors, thread), readers), work, site, now)
    for _ in cutlass.range(now.count, unroll=1):
        # What follows from these two is worked out in each step: else it would be kept in scarce registers.
        base, thread = opaque(base), opaque(thread)
        memory = Memory(base, make_copies(spec, tensors, thread), readers)
        step(spec, memory, gradients, work, site, now)
        now = following(work, job, now)
    cute.arch.cp_async_wait_group(0)
    if cutlass.const_expr(spec.config.gives_kv):
        cute.arch.sync_threads()  # shared memory is free for the results
        finish(spec, gradients, tensors, base, work, site)


def make_site(spec: BackwardSpec, job: KeyJob, thread: Int32) -> Site:
    """The parts of this thread's warp."""
    warp = cute.arch.make_warp_uniform(thread // 32)
    return Site(
        job=job,
        thread=thread,
        lane=thread % 32,
        key_warp=warp % spec.key_warps,
        query_warp=warp // spec.key_warps,
        dq_row=warp // spec.dq_column_warps * spec.dq_rows,
        dq_column_warp=warp % spec.dq_column_warps,
    )


def of_sequence(spec: BackwardSpec, tensors: Tensors, job: KeyJob) -> Tensors:
    """The tensors (rows, dim, heads) of one sequence."""
    seq, image = job.seq, Int32(0) if spec.varlen else job.at.batch
    starts = Tensors(seq.q_start, seq.k_start, seq.k_start, seq.q_start, seq.k_start, seq.k_start)
    return Tensors(
        *(cute.domain_offset((start, 0, 0), t[None, None, None, image]) for start, t in zip(starts, tensors))
    )


def make_copies(spec: BackwardSpec, tensors: Tensors, thread: Int32) -> Copies:
    """Copies of Q and dO of query head 0."""
    q, do = (
        rows_loader(tile, source[None, None, 0], spec.threads, thread)
        for tile, source in ((spec.q_tile, tensors.q), (spec.do_tile, tensors.do))
    )
    return Copies(q, do, Int64(tensors.q.stride[2]) * 2, Int64(tensors.do.stride[2]) * 2)


def make_readers(spec: BackwardSpec, site: Site) -> Readers:
    """Readers of the operands of each product."""
    dtype, lane = spec.dtype, site.lane
    first_key = site.key_warp * spec.warp_keys
    first_query = site.query_warp * spec.warp_queries

    def of_queries(reader: MatrixReader) -> MatrixReader:
        return replace(reader, offset=reader.offset + reader.tile.row_offset(first_query, 0))

    return Readers(
        s_k=reader_a(spec.k_tile, dtype, lane, first_key),
        s_q=of_queries(reader_b(spec.q_tile, dtype, lane)),
        dp_v=reader_a(spec.v_tile, dtype, lane, first_key),
        dp_do=of_queries(reader_b(spec.do_tile, dtype, lane)),
        dv_do=of_queries(reader_b_transposed(spec.do_tile, dtype, lane)),
        dk_q=of_queries(reader_b_transposed(spec.q_tile, dtype, lane)),
        dq_ds=reader_a_transposed(spec.ds_tile, dtype, site.lane, site.dq_row),
        dq_k=reader_b_transposed(spec.k_tile, dtype, site.lane, site.dq_column_warp * 16),
    )


def first_step(work: BackwardWork, job: KeyJob) -> Step:
    """The first step of a key tile."""
    at, walk = job.at, job.walk
    if work.lists is not None:
        return listed_step(work, job, Int32(0))
    return Step(at.kv_head * work.heads_per_kv, walk.first, Int32(0), walk.count * work.heads_per_kv)


def following(work: BackwardWork, job: KeyJob, now: Step) -> Step:
    """The step after `now`."""
    if work.lists is not None:
        return listed_step(work, job, now.number + 1)
    return step_in_range(job.walk, now)


@cute.jit
def step_in_range(walk: QueryWalk, now: Step) -> Step:
    """The step after `now`: the next block, or the first one of the next head."""
    head, block = now.head, now.block + 1
    if block == walk.end:
        head, block = now.head + 1, walk.first
    return Step(head, block, now.number + 1, now.count)


@cute.jit
def listed_step(work: BackwardWork, job: KeyJob, number: Int32) -> Step:
    """Step `number` of a key tile whose query blocks are listed; of none after the last."""
    head, block = Int32(0), Int32(0)
    if number < job.walk.count:
        query = listed_block(work, job, job.walk.first + number)
        head, block = query.head, query.block
    return Step(head, block, number, job.walk.count)


def query_of(work: BackwardWork, job: KeyJob, at: Step) -> QueryBlock:
    """The query block of a step."""
    return QueryBlock(at.head, at.block, None if work.lists is None else job.walk.first + at.number)


@cute.jit
def start_first_copies(spec: cutlass.Constexpr, memory: Memory, work: BackwardWork, site: Site, first: Step):
    """Starts the copies of the first blocks: those of step 0 with K and V, and then those of step 1."""
    if first.exists:
        copy_do(spec, memory, work, site, first)
        copy_q(spec, memory, work, site, first)
    cute.arch.cp_async_commit_group()
    if cutlass.const_expr(spec.config.q_stages > 1):
        second = following(work, site.job, first)
        if second.exists:
            if cutlass.const_expr(spec.config.do_stages > 1):
                copy_do(spec, memory, work, site, second)
            copy_q(spec, memory, work, site, second)
        cute.arch.cp_async_commit_group()
    if cutlass.const_expr(spec.one_barrier):
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_threads()


@cute.jit
def start_next_copies(spec: cutlass.Constexpr, memory: Memory, work: BackwardWork, site: Site, now: Step):
    """Starts copies to the buffers that step `now` has done with: those of the next step first, in a group of
    their own."""
    config = spec.config
    after = following(work, site.job, now)
    if cutlass.const_expr(config.do_stages == 1):
        if after.exists:
            copy_do(spec, memory, work, site, after)
            if cutlass.const_expr(config.q_stages == 1):
                copy_q(spec, memory, work, site, after)
        cute.arch.cp_async_commit_group()
    if cutlass.const_expr(config.q_stages > 1):
        after = following(work, site.job, after)
        if after.exists:
            if cutlass.const_expr(config.do_stages > 1):
                copy_do(spec, memory, work, site, after)
            copy_q(spec, memory, work, site, after)
        cute.arch.cp_async_commit_group()


def copy_q(spec: BackwardSpec, memory: Memory, work: BackwardWork, site: Site, at: Step) -> None:
    """Starts the copies of Q and the log-sum-exp of one step."""
    load = memory.copies.q
    load = replace(load, source=load.source + Int64(at.head) * memory.copies.q_head)
    stage = at.number % spec.config.q_stages
    target = memory.base + spec.q_offset + stage * load.tile.bytes
    load.start(at.block * spec.tile_q, site.job.seq.q_len, target, True)
    target = memory.base + spec.lse_offset + stage * spec.rows_bytes
    copy_rows(spec, work.sums.lse, number_of(spec, work, site, at), target, site.thread)


def copy_do(spec: BackwardSpec, memory: Memory, work: BackwardWork, site: Site, at: Step) -> None:
    """Starts the copies of dO and the row sums of one step."""
    load = memory.copies.do
    load = replace(load, source=load.source + Int64(at.head) * memory.copies.do_head)
    stage = at.number % spec.config.do_stages
    target = memory.base + spec.do_offset + stage * load.tile.bytes
    load.start(at.block * spec.tile_q, site.job.seq.q_len, target, True)
    target = memory.base + spec.row_sums_offset + stage * spec.rows_bytes
    copy_rows(spec, work.sums.row_sums, number_of(spec, work, site, at), target, site.thread)


@cute.jit
def copy_rows(spec: cutlass.Constexpr, source: cute.Tensor, number: Int32, target: Int32, thread: Int32):
    """Starts the copy of a float32 number for each query of a step."""
    if thread < spec.rows_bytes // 16:
        vector = source.iterator + Int64(number) * spec.tile_q + thread * 4
        cp_async(shared_pointer(Float32, target + thread * 16, 16), vector.align(16), 16, Int32(16))


def number_of(spec: BackwardSpec, work: BackwardWork, site: Site, at: Step) -> Int32:
    """Number of a query block among the query tiles of all heads and sequences."""
    return work.rows.number(spec.tile_q, spec.varlen, site.job.seq, site.job.at.batch, at.head, at.block)


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
    k, v = memory.base, memory.base + spec.v_offset
    q_stage, do_stage = now.number % config.q_stages, now.number % config.do_stages
    q = memory.base + spec.q_offset + q_stage * spec.q_tile.bytes
    do = memory.base + spec.do_offset + do_stage * spec.do_tile.bytes
    ds = memory.base + spec.ds_offset + now.number % config.ds_stages * spec.ds_tile.bytes

    scores = warp_accumulators(spec.warp_keys, spec.warp_queries)
    scores.fill(0.0)
    operand_a = from_shared(spec, readers.s_k, k, spec.warp_keys)
    multiply(spec, scores, operand_a, readers.s_q, q, config.dim // 16)
    view = softmax.rows_and_columns(scores)
    first_key = site.job.at.n * spec.tile_k + site.key_warp * spec.warp_keys + site.lane // 4
    first_query = now.block * spec.tile_q + site.query_warp * spec.warp_queries + site.lane % 4 * 2
    at = score_step(work, site.job, query_of(work, site.job, now), (first_query, first_key))
    rows = first_row(spec, memory.base + spec.lse_offset + q_stage * spec.rows_bytes, site)
    probs = warp_operand_a(spec.warp_keys, spec.warp_queries, spec.dtype)
    weigh(spec.variant, scores, partial(row_values, rows), at, probs)

    d_probs = warp_accumulators(spec.warp_keys, spec.warp_queries)
    d_view = softmax.rows_and_columns(d_probs)
    rows = first_row(spec, memory.base + spec.row_sums_offset + do_stage * spec.rows_bytes, site)
    columns = row_values(rows, 0, spec.warp_queries // 4)
    for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
        for r in cutlass.range_constexpr(cute.size(view, mode=[0])):
            d_view[r, c] = -columns[c]
    operand_a = from_shared(spec, readers.dp_v, v, spec.warp_keys)
    multiply(spec, d_probs, operand_a, readers.dp_do, do, config.dim_v // 16)
    for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
        for r in cutlass.range_constexpr(cute.size(view, mode=[0])):
            d_view[r, c] = d_view[r, c] * view[r, c]

    if cutlass.const_expr(spec.config.gives_kv):
        if cutlass.const_expr(not spec.variant.bends_scores):
            to_operand(scores, probs)
        multiply(spec, gradients.dv, in_registers(probs), readers.dv_do, do, spec.warp_queries // 16)
    operand = warp_operand_a(spec.warp_keys, spec.warp_queries, spec.dtype)
    to_operand(d_probs, operand)
    if cutlass.const_expr(spec.config.gives_q):
        store_d_scores(spec, operand, ds, site)
    if cutlass.const_expr(spec.config.gives_kv):
        multiply(spec, gradients.dk, in_registers(operand), readers.dk_q, q, spec.warp_queries // 16)

    if cutlass.const_expr(spec.one_barrier):
        cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    start_next_copies(spec, memory, work, site, now)
    if cutlass.const_expr(spec.config.gives_q):
        dq = warp_accumulators(spec.dq_rows, spec.dq_columns)
        dq.fill(0.0)
        operand_a = from_shared(spec, readers.dq_ds, ds, spec.dq_rows)
        multiply(spec, dq, operand_a, readers.dq_k, k, spec.tile_k // 16, stride=spec.dq_column_warps)
        add_dq(spec, work, site, now, dq)


def from_shared(spec: BackwardSpec, reader: MatrixReader, address: Int32, rows: int) -> OperandA:
    """Operand A of `multiply`, read when it is first asked for. Of a transposed tile rows are columns."""
    fragments: dict[int, cute.Tensor] = {}

    def fragment(k: int) -> cute.Tensor:
        if k not in fragments:
            fragments[k] = warp_operand_a(rows, 16, spec.dtype)[None, None, 0]
            for m in range(rows // 16):
                row, column = (16 * k, 16 * m) if reader.transposed else (16 * m, 16 * k)
                reader.read(address, row, column, fragments[k][None, m])
        return fragments[k]

    return fragment


def in_registers(operand: cute.Tensor) -> OperandA:
    """Operand A of `multiply`, ((2, 2, 2), M, K)."""
    return lambda k: operand[None, None, k]


def multiply(
    spec: BackwardSpec,
    acc: cute.Tensor,
    operand_a: OperandA,
    reader: MatrixReader,
    address: Int32,
    k_steps: int,
    stride: int = 1,
) -> None:
    """acc += A @ B.T of one warp. B is read from the tile at `address`, every `stride`-th 16 of its N."""

    def read_b(k: int, n: int, into: cute.Tensor) -> None:
        operand_a(k)  # is read before the fragments of B of the same step
        row, column = (16 * k, 16 * n * stride) if reader.transposed else (16 * n * stride, 16 * k)
        reader.read(address, row, column, into)

    steps = (k_steps, cute.size(acc, mode=[2]) // 2)
    mma = make_tiled_mma(spec.dtype, 1, 1)
    warp_product(mma, acc, operand_a, read_b, steps, spec.config.ahead, spec.dtype)


def first_row(spec: BackwardSpec, address: Int32, site: Site) -> Int32:
    """Address of the number of this thread's first query, of those of a step at `address`."""
    return address + (site.query_warp * spec.warp_queries + site.lane % 4 * 2) * 4


def row_values(address: Int32, first: int, count: int) -> cute.Tensor:
    """One float32 of each of `count` of this thread's queries, from number `first` on, out of shared memory,
    where that of the first lies at `address`."""
    found = cute.make_rmem_tensor(count, Float32)
    for i in range(0, count, 2):
        source = shared_pointer(Float32, address + 4 * column_offset(first + i), 8)
        target = cute.make_tensor(found.iterator + i, cute.make_layout(2))
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), target)
    return found


def store_d_scores(spec: BackwardSpec, operand: cute.Tensor, address: Int32, site: Site) -> None:
    """dS^T of this warp's keys and queries to shared memory, two queries at a time."""
    tile: RowsTile = spec.ds_tile
    row = site.key_warp * spec.warp_keys + site.lane // 4
    chunk = site.query_warp * (spec.warp_queries // 8)
    first = address + tile.chunk_offset(row, chunk) + site.lane % 4 * 4
    columns = spec.warp_queries // 8
    for r in range(spec.warp_keys // 8):
        for n in range(columns):
            target = (first ^ tile.flip(8 * n)) + tile.row_offset(8 * r, 8 * n)
            registers = operand.iterator + 4 * (r // 2 * columns + n) + r % 2 * 2
            pair = cute.make_tensor(registers, cute.make_layout(2))
            cute.autovec_copy(
                pair, cute.make_tensor(shared_pointer(spec.dtype, target, 4), cute.make_layout(2))
            )


@cute.jit
def add_dq(spec: cutlass.Constexpr, work: BackwardWork, site: Site, now: Step, dq: cute.Tensor):
    """Adds this warp's part of dQ of one query block to the sums in global memory.

    A warp adds 128 bytes at a time, or 512 by vectors: sums lie as the accumulators do, and `backward_finish`
    brings them into order.
    """
    number = number_of(spec, work, site, now)
    order = spec.sums
    if cutlass.const_expr(spec.config.deterministic):
        turn = work.sums.turns.iterator + 2 * number
        if site.thread == 0:
            await_count(turn, turn_of(spec, work, site.job, query_of(work, site.job, now)))
        cute.arch.sync_threads()
    rows_of_share = site.dq_row // 16 * 32 + site.lane
    first = (
        work.sums.dq.iterator
        + Int64(number) * order.size
        + (site.dq_column_warp * (2 * VECTOR * SHARE_THREADS) + rows_of_share * order.vector)
    )
    for n in cutlass.range_constexpr(cute.size(dq, mode=[2])):
        eight = n // 2 * 2 * spec.dq_column_warps + n % 2
        for m in cutlass.range_constexpr(cute.size(dq, mode=[1])):
            for i in cutlass.range_constexpr(0, VECTOR, order.vector):
                values = [dq[(j % 2, j // 2), m, n] for j in range(i, i + order.vector)]
                offset = (eight * VECTOR + i) * SHARE_THREADS + 32 * m * order.vector
                add_vector(first + offset, values)
    if cutlass.const_expr(spec.config.deterministic):
        cute.arch.sync_threads()
        if site.thread == 0:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.atomic_add(turn, Int32(1), sem="release", scope="gpu")


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
