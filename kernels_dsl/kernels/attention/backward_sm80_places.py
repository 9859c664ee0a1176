"""A warp's parts of the products of the SM80-class attention backward, and where it reads them."""

from dataclasses import replace

import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.hw.swizzled_rows import (
    MatrixReader,
    RowsTile,
    reader_a,
    reader_a_transposed,
    reader_b,
    reader_b_transposed,
)

from .backward_sm80_copies import Readers, Site, Tensors
from .backward_sm80_spec import BackwardSpec
from .backward_work import KeyJob


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
    if spec.config.by_gradients:
        return site._replace(query_warp=Int32(0), product=site.query_warp)
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
