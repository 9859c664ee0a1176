"""Steps of the SM80-class attention backward, and the copies of their operands to shared memory."""

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from kernels_dsl.blocks.attention.query_blocks import QueryWalk
from kernels_dsl.blocks.hw.cp_async import cp_async
from kernels_dsl.blocks.hw.swizzled_rows import MatrixReader, RowsLoader, rows_loader, shared_pointer

from .backward_sm80_spec import BackwardSpec
from .backward_work import BackwardWork, KeyJob, QueryBlock, listed_block


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
    product: Int32
    """0 for warps that compute P, 1 for those that compute dS; where columns are shared."""
    column_warp: Int32
    """First column of this warp's part of dK and dV, 16 at a time; where columns are shared."""


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
    dv_p: MatrixReader
    dv_do: MatrixReader
    dk_ds: MatrixReader
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


class StepBuffers(NamedTuple):
    """Addresses of what a step reads and writes in shared memory."""

    q: Int32
    do: Int32
    ds: Int32


class Gradients(NamedTuple):
    """Accumulators ((2, 2), M, N) of this warp's keys."""

    dk: cute.Tensor
    dv: cute.Tensor


def make_copies(spec: BackwardSpec, tensors: Tensors, thread: Int32) -> Copies:
    """Copies of Q and dO of query head 0."""
    q, do = (
        rows_loader(tile, source[None, None, 0], spec.threads, thread)
        for tile, source in ((spec.q_tile, tensors.q), (spec.do_tile, tensors.do))
    )
    return Copies(q, do, Int64(tensors.q.stride[2]) * 2, Int64(tensors.do.stride[2]) * 2)


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


def preceding(work: BackwardWork, job: KeyJob, now: Step) -> Step:
    """The step before `now`, which is not the first."""
    if work.lists is not None:
        return listed_step(work, job, now.number - 1)
    return step_back(job.walk, now)


@cute.jit
def step_back(walk: QueryWalk, now: Step) -> Step:
    """The step before `now`: the block before, or the last one of the head before."""
    head, block = now.head, now.block - 1
    if now.block == walk.first:
        head, block = now.head - 1, walk.end - 1
    return Step(head, block, now.number - 1, now.count)


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


def ds_of(spec: BackwardSpec, memory: Memory, number: Int32) -> Int32:
    """Address of dS of a step; by columns one buffer has dS, and the other P."""
    ds = memory.base + spec.ds_offset
    return ds if spec.config.by_columns else ds + number % spec.config.ds_stages * spec.ds_tile.bytes


def number_of(spec: BackwardSpec, work: BackwardWork, site: Site, at: Step) -> Int32:
    """Number of a step's query block among those of all heads and sequences, in the order of their sums."""
    job, parts = site.job, spec.row_parts
    tile = at.block // parts if parts > 1 else at.block
    number = work.rows.number(spec.row_tile, spec.varlen, job.seq, job.at.batch, at.head, tile)
    return number * parts + at.block % parts if parts > 1 else number
