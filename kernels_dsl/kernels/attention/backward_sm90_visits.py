"""Query blocks of a key tile, as each consumer role of the SM90 attention backward visits them."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.wgmma import WGMMA_M

from .backward_sm90_spec import BackwardSpec
from .backward_work import BackwardWork, KeyJob, QueryBlock, listed_block


class Visit(NamedTuple):
    """A query block of a head, and its number among the query tiles of all heads and sequences."""

    query: QueryBlock
    number: Int32


class Site(NamedTuple):
    """A consumer thread's place: its job, its first key, and its first query in a block."""

    work: BackwardWork
    job: KeyJob
    key: Int32
    query: Int32
    group: Int32
    thread: Int32
    part: Int32 | int
    """Number of this warpgroup's 64 keys among those of its CTA."""
    start: Int32
    """First key of the CTA."""
    rank: Int32 | int
    """Number of the CTA among those that share a tile of keys."""


@cute.jit
def for_each_block(
    spec: cutlass.Constexpr, site: Site, state: Any, step: cutlass.Constexpr, skipped: cutlass.Constexpr = 0
):
    """Calls `step(state, visit)`, which returns the next state, for each query block of a key tile but the
    first `skipped`. Returns the last state."""
    work, job = site.work, site.job
    at, walk = job.at, job.walk
    begin = walk.first + skipped
    if cutlass.const_expr(work.lists is not None):
        for place in cutlass.range(begin, walk.first + walk.count, unroll=1):
            state = step(state, visit_of(spec, site, listed_block(work, job, place)))
    else:
        for member in cutlass.range(work.heads_per_kv, unroll=1):
            head = at.kv_head * work.heads_per_kv + member
            for block in cutlass.range(begin, walk.end, unroll=1):
                state = step(state, visit_of(spec, site, QueryBlock(head, block)))
            begin = walk.first
    return state


def first_visit(spec: BackwardSpec, site: Site) -> Visit:
    """The first query block that `for_each_block` visits, where there is one."""
    work, job = site.work, site.job
    if cutlass.const_expr(work.lists is not None):
        return visit_of(spec, site, listed_block(work, job, job.walk.first))
    return visit_of(spec, site, QueryBlock(job.at.kv_head * work.heads_per_kv, job.walk.first))


def is_last(site: Site, visit: Visit) -> Boolean:
    """Says whether a query block is the last one that `for_each_block` visits."""
    work, at, walk = site.work, site.job.at, site.job.walk
    if work.lists is not None:
        return visit.query.place == walk.first + walk.count - 1
    last_head = (at.kv_head + 1) * work.heads_per_kv - 1
    return (visit.query.block == walk.end - 1) & (visit.query.head == last_head)


def site_of(spec: BackwardSpec, work: BackwardWork, job: KeyJob, group: Int32, part: Int32 | int) -> Site:
    """The place of this thread in consumer warpgroup `group`, which has the keys of `part`."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    rank = rank_of(spec)
    start = job.at.n * spec.tile_k + rank * spec.cta_keys
    key = start + part * WGMMA_M + thread // 32 * 16 + thread % 32 // 4
    return Site(work, job, key, thread % 4 * 2, group, thread, part, start, rank)


def rank_of(spec: BackwardSpec) -> Int32 | int:
    """Number of this CTA among those that share a tile of keys."""
    return cute.arch.block_idx_in_cluster() if spec.ctas > 1 else 0


def visit_of(spec: BackwardSpec, site: Site, query: QueryBlock) -> Visit:
    """The visit of a query block."""
    job, rows = site.job, site.work.rows
    return Visit(query, rows.number(spec.tile_q, spec.varlen, job.seq, job.at.batch, query.head, query.block))
