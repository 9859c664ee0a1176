"""Rows of x and rows of its transpose as fp8 with a scale each, of a tensor much larger than L2.

x is read twice, which is the least: first by rows, which become fp8 at once and leave the maxima of columns,
then by tiles, whose transpose becomes fp8. Each pass writes one of the outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.fp8 import block_max, group_scale, halves, largest_finite_both, reciprocal
from kernels_dsl.config.quantize import THREADS, VECTOR, LineQuantization

from .rows import Conversion, RowShare, load_row, store_row
from .tile import launch_tiles
from .views import MatrixIndex, Outputs, aligned, clear, four_modes, maxima_at, memory_at, raise_to

CLEARED = THREADS * VECTOR
"""Numbers that a CTA of `clear_maxima_kernel` clears."""


class RowPass(NamedTuple):
    """Results of the pass over rows."""

    values: cute.Tensor  # fp8 (L1, L2, M, K)
    scales: cute.Tensor  # (L1, L2, M, 1)
    columns: cute.Tensor  # (L, 1, K): maxima of columns, 0 before


def quantize_lines(
    x: cute.Tensor,
    values: cute.Tensor,
    scales: cute.Tensor,
    turned_values: cute.Tensor,
    turned_scales: cute.Tensor,
    workspace: Int64,
    rows_each: Int32,
    stream,
    spec: cutlass.Constexpr[LineQuantization],
):
    """Launch on x (…, M, K) of 16 bits, up to four modes, K contiguous.

    values (…, M, K) and turned_values (…, K, M) fp8, scales (…, M, 1) and (…, K, 1) float32: as in
    `launch_tiles`. workspace: the address of float32, of `config.quantize.line_elements`, written. rows_each:
    rows of a CTA.
    """
    rows = four_modes(x)
    matrices = rows.shape[0] * rows.shape[1]
    columns, end = maxima_at(memory_at(workspace, Float32), Int64(0), (matrices, 1, rows.shape[3]))
    cleared = cute.make_tensor(columns.iterator, cute.make_layout(Int32(end)))
    clear_maxima_kernel(cleared, spec).launch(
        grid=[cute.ceil_div(cute.size(cleared), CLEARED), 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=spec.early,
    )
    outputs = RowPass(four_modes(values), four_modes(scales), columns)
    quantize_lines_kernel(rows, outputs, rows_each, spec).launch(
        grid=[cute.ceil_div(rows.shape[2], rows_each) * matrices, 1, 1],
        block=[spec.threads, 1, 1],
        min_blocks_per_mp=spec.per_sm,
        preferred_smem_carveout=50,  # in percent; without it the compiler asks a GPU, and there may be none
        stream=stream,
        use_pdl=spec.early,
    )
    launch_tiles(x, Outputs(None, None, turned_values, turned_scales), columns, stream, spec.turned)


@entry_name("quantize_clear")
@cute.kernel
def clear_maxima_kernel(maxima: cute.Tensor, spec: cutlass.Constexpr[LineQuantization]):
    """Sets maxima (n,) to 0."""
    if const_expr(spec.early):
        # In this order: the kernel after this one may read x as soon as it starts.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    first = cute.arch.block_idx()[0] * CLEARED + cute.arch.thread_idx()[0]
    for i in range_constexpr(VECTOR):
        if first + i * THREADS < cute.size(maxima):
            maxima[first + i * THREADS] = Float32(0.0)


@entry_name("quantize_lines")
@cute.kernel
def quantize_lines_kernel(
    x: cute.Tensor, outputs: RowPass, rows_each: Int32, spec: cutlass.Constexpr[LineQuantization]
):
    """Converts rows of x and takes the maxima of columns: `rows_each` rows a CTA, `spec.rows` at a time."""
    values, scales, columns = outputs
    thread, number = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if const_expr(spec.early):
        cute.arch.griddepcontrol_launch_dependents()
    parts = cute.ceil_div(x.shape[2], rows_each)
    matrix, start = number // parts, number % parts * rows_each
    end = cutlass.min(start + rows_each, x.shape[2])
    index = MatrixIndex(matrix // x.shape[1], matrix % x.shape[1])
    step, warps = const_expr(spec.threads * VECTOR), const_expr(spec.threads // 32)
    columns_each = const_expr(spec.vectors * VECTOR)
    allocator = cutlass.memory.SmemAllocator()
    scratch = allocator.allocate_tensor(Float32, cute.make_layout((warps, 2)), 16)
    shared = allocator.allocate_tensor(Float32, cute.make_layout(step), 16)
    elements = cute.make_rmem_tensor((columns_each, spec.rows), x.element_type)
    most = cute.make_rmem_tensor(columns_each // 2, Int32)
    clear(most)
    following = cute.make_rmem_tensor((columns_each, spec.rows), x.element_type)
    if const_expr(spec.ahead):
        load_rows(x, RowShare(index, start, thread * VECTOR, step), end, elements)
    for first in cutlass.range(start, end, spec.rows, unroll=1):
        if const_expr(spec.ahead):
            load_rows(x, RowShare(index, first + spec.rows, thread * VECTOR, step), end, following)
        else:
            load_rows(x, RowShare(index, first, thread * VECTOR, step), end, elements)
        for n in range_constexpr(spec.rows):
            row, own = cutlass.min(first + n, end - 1), elements[None, n]
            amax = largest_finite_both(cute.recast_tensor(own, Int32), most, x.element_type)
            # Two sets in turn: a thread that reads one has left the barrier before the one of this row.
            scale = group_scale(block_max(amax, scratch[None, (first + n) % 2], thread, warps), spec.format)
            if thread == 0:
                scales[index.outer, index.inner, row, 0] = scale
            share = RowShare(index, row, thread * VECTOR, step)
            store_row(values, share, own, Conversion(reciprocal(scale), spec.format))
        if const_expr(spec.ahead):
            elements.store(following.load())
    if const_expr(spec.early):
        cute.arch.griddepcontrol_wait()  # for zeros
    for i in range_constexpr(spec.vectors):
        own = cute.make_tensor(most.iterator + i * VECTOR // 2, cute.make_layout(VECTOR // 2))
        target = cute.make_tensor(aligned(shared.iterator + thread * VECTOR, 16), cute.make_layout(VECTOR))
        cute.autovec_copy(halves(own, x.element_type), target)
        cute.arch.sync_threads()
        publish(columns[matrix, 0, None], shared, i * step, thread)
        cute.arch.sync_threads()


@cute.jit
def load_rows(x: cute.Tensor, share: RowShare, end: Int32, elements: cute.Tensor):
    """Loads the share of rows share.row, share.row + 1, … to elements (…, rows); from `end` on, the last
    again."""
    for n in range_constexpr(cute.size(elements, mode=[1])):
        load_row(x, share._replace(row=cutlass.min(share.row + n, end - 1)), elements[None, n])


@cute.jit
def publish(columns: cute.Tensor, found: cute.Tensor, first: cutlass.Constexpr, thread: Int32):
    """Raises the maxima of columns from `first` on to those that this CTA found.

    Neighbours in a warp are neighbours in memory. Maxima that are already larger, as most are, need no atomic
    operation.
    """
    threads = const_expr(cute.size(found) // VECTOR)
    before = cute.make_rmem_tensor(VECTOR, Float32)
    before.fill(0.0)
    for n in range_constexpr(VECTOR):
        column = first + n * threads + thread
        if column < cute.size(columns):
            before[n] = cute.arch.load(columns.iterator + column, Float32, sem="relaxed", scope="gpu")
    for n in range_constexpr(VECTOR):
        column = first + n * threads + thread
        if (column < cute.size(columns)) & (found[n * threads + thread] > before[n]):
            raise_to(columns.iterator + column, found[n * threads + thread])
