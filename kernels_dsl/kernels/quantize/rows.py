"""Rows of x as fp8 with a scale each: a row stays in registers between maximum and scaling.

Rows that one CTA's registers cannot hold are held by a cluster, whose CTAs exchange their maxima through
shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import entry_name, inline_ptx
from kernels_dsl.blocks.hw.fp8 import DTYPES, block_max, group_scale, reciprocal
from kernels_dsl.config.quantize import CTAS_PER_SM, THREADS, VECTOR, RowQuantization

from .views import (
    MatrixIndex,
    address,
    aligned,
    clear,
    divisor,
    four_modes,
    load_part,
    load_whole,
    maximum,
    one_scale,
    store_vector,
    vector_at,
)

WARPS = THREADS // 32
VECTORS_AT_ONCE = 4
"""Vectors that a thread has under way if a row is read twice."""


class RowDivisors(NamedTuple):
    """Divisors that turn a row's number into its indices."""

    rows: cute.FastDivmodDivisorV2  # of a matrix
    inner: cute.FastDivmodDivisorV2  # matrices of the second mode


class RowShare(NamedTuple):
    """A thread's share of a row: vectors from column `first` on, every `step` columns."""

    matrix: MatrixIndex
    row: Int32
    first: Int32
    step: int


class Conversion(NamedTuple):
    """From elements to fp8."""

    factor: Float32
    format: str


def quantize_rows(
    x: cute.Tensor,
    values: cute.Tensor,
    scales: cute.Tensor | None,
    scale: Int64,
    stream,
    spec: cutlass.Constexpr[RowQuantization],
):
    """Launch on x (…, M, K), up to four modes, K contiguous.

    values (…, M, K) fp8, rows at multiples of 16 bytes; scales (…, M, 1) float32. Both are written. With
    `spec.whole` there is one scale, of all of x, at address `scale`, and scales is None; x and values are
    contiguous, and K is a multiple of 16. Otherwise `scale` is 0.
    """
    if const_expr(spec.whole):
        x, values, scales = one_row(x), one_row(values), one_scale(scale)
    x, values, scales = four_modes(x), four_modes(values), four_modes(scales)
    rows = x.shape[0] * x.shape[1] * x.shape[2]
    divisors = RowDivisors(divisor(x.shape[2]), divisor(x.shape[1]))
    quantize_rows_kernel(x, values, scales, divisors, spec).launch(
        grid=[cute.ceil_div(rows, spec.rows) * spec.cluster, 1, 1],
        block=[THREADS, 1, 1],
        cluster=[spec.cluster, 1, 1] if spec.cluster > 1 else None,
        min_blocks_per_mp=2 if spec.vectors > 8 else CTAS_PER_SM[x.element_type.width // 8],
        preferred_smem_carveout=0,  # in percent; without it the compiler asks a GPU, and there may be none
        stream=stream,
        use_pdl=spec.early,
    )


@entry_name("quantize_rows")
@cute.kernel
def quantize_rows_kernel(
    x: cute.Tensor,
    values: cute.Tensor,
    scales: cute.Tensor,
    divisors: RowDivisors,
    spec: cutlass.Constexpr[RowQuantization],
):
    """Device side of `quantize_rows`. Threads of a row that does not exist work on the last one."""
    thread = cute.arch.thread_idx()[0]
    if const_expr(spec.cluster > 1):
        cute.arch.cluster_arrive_relaxed()  # all CTAs' shared memory exists once all have arrived
    if const_expr(spec.early):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    number = cute.arch.block_idx()[0] // spec.cluster * spec.rows + thread // spec.threads
    rank = cute.arch.block_idx()[0] % spec.cluster
    rows = x.shape[0] * x.shape[1] * x.shape[2]
    exists = number < rows
    number = cutlass.min(number, rows - 1)
    matrix, row = divmod(number, divisors.rows)
    index = MatrixIndex(*divmod(matrix, divisors.inner))
    first = (rank * spec.threads + thread % spec.threads) * VECTOR
    count = spec.vectors or VECTORS_AT_ONCE
    elements = cute.make_rmem_tensor(count * VECTOR, x.element_type)
    step = spec.cluster * spec.threads * VECTOR
    share = RowShare(index, row, first, step)
    amax = Float32(0.0)
    if const_expr(spec.vectors > 0):
        load_row(x, share, elements)
        amax = maximum(elements)
    else:
        for start in cutlass.range(first, x.shape[3], step * count, unroll=1):
            load_row(x, share._replace(first=start), elements)
            amax = cute.arch.fmax(amax, maximum(elements))
    if const_expr(spec.threads == 32):
        amax = cute.arch.warp_reduction_max(amax)
    else:
        allocator = cutlass.memory.SmemAllocator()
        amax = block_max(amax, allocator.allocate_tensor(Float32, cute.make_layout(WARPS), 16), thread, WARPS)
        if const_expr(spec.cluster > 1):
            amax = cluster_max(
                amax, allocator.allocate_tensor(Float32, cute.make_layout(spec.cluster), 16), rank, thread
            )
    scale = group_scale(amax, spec.format)
    if exists:
        if first == 0:
            scales[index.outer, index.inner, row, 0] = scale
        if const_expr(spec.vectors > 0):
            store_row(values, share, elements, Conversion(reciprocal(scale), spec.format))
        else:
            for start in cutlass.range(first, x.shape[3], step * count, unroll=1):
                load_row(x, share._replace(first=start), elements)
                conversion = Conversion(reciprocal(scale), spec.format)
                store_row(values, share._replace(first=start), elements, conversion)


def one_row(tensor: cute.Tensor) -> cute.Tensor:
    """A contiguous tensor as one row."""
    return cute.make_tensor(tensor.iterator, cute.make_layout((1, cute.size(tensor)), stride=(0, 1)))


@dsl_user_op
def store_to_peer(pointer: cute.Pointer, peer: Int32, value: Float32, *, loc=None, ip=None) -> None:
    """Stores `value` at `pointer` in the shared memory of CTA `peer` of the cluster."""
    theirs = Int32(cute.arch.map_dsmem_ptr(pointer, peer, loc=loc, ip=ip).toint(loc=loc, ip=ip))
    text = "st.shared::cluster.f32 [$0], $1;"
    inline_ptx(None, (theirs, Float32(value)), text, "r,f,~{memory}", effects=True, loc=loc, ip=ip)


@cute.jit
def cluster_max(value: Float32, maxima: cute.Tensor, rank: Int32, thread: Int32) -> Float32:
    """The maximum over the CTAs of a cluster; maxima: (CTAs,) shared."""
    cute.arch.cluster_wait()
    if thread < cute.size(maxima):
        store_to_peer(maxima.iterator + rank, thread, value)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    for peer in range_constexpr(cute.size(maxima)):
        value = cute.arch.fmax(value, maxima[peer])
    return value


@cute.jit
def load_row(x: cute.Tensor, share: RowShare, elements: cute.Tensor):
    """Loads a share of a row, 0 after the row's end. Whole vectors go first, so that their loads overlap."""
    matrix, row, first, step = share
    K = x.shape[3]
    clear(elements)
    for i in range_constexpr(cute.size(elements) // VECTOR):
        column = first + i * step
        if column + VECTOR <= K:
            load_whole(vector_at(x, matrix, row, column), elements, i * VECTOR)
    if K % VECTOR != 0:
        for i in range_constexpr(cute.size(elements) // VECTOR):
            column = first + i * step
            if (column < K) & (column + VECTOR > K):
                load_part(address(x, matrix, row, column), elements, i * VECTOR, K - column)


@cute.jit
def store_row(values: cute.Tensor, share: RowShare, elements: cute.Tensor, conversion: Conversion):
    """Stores a share of a row as fp8. A vector that begins in the row ends in it or in its padding."""
    matrix, row, first, step = share
    factor, format = conversion
    packed = cute.make_rmem_tensor(VECTOR, DTYPES[format])
    for i in range_constexpr(cute.size(elements) // VECTOR):
        column = first + i * step
        vector = cute.make_tensor(elements.iterator + i * VECTOR, cute.make_layout(VECTOR))
        packed.store((vector.load().to(Float32) * factor).to(DTYPES[format]))
        if column < values.shape[3]:
            store_vector(packed, aligned(address(values, matrix, row, column), VECTOR))
