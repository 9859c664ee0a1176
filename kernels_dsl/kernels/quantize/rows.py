"""Rows of x as fp8 with a scale each: a row stays in registers between maximum and scaling."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.entry_name import entry_name
from kernels_dsl.blocks.fp8 import (
    DTYPES,
    block_max,
    finite_magnitude,
    group_scale,
    largest_magnitudes,
    reciprocal,
)
from kernels_dsl.config.quantize import THREADS, VECTOR

from .views import address, four_modes, load_part, load_whole, vector_at


def quantize_rows(x: cute.Tensor, values: cute.Tensor, scales: cute.Tensor, stream, spec: cutlass.Constexpr):
    """Launch for x (…, M, K) of up to four modes, K contiguous; spec: a `RowQuantization`.

    values (…, M, K) fp8, rows at multiples of 16 bytes; scales (…, M, 1) float32. Both are written.
    """
    x, values, scales = four_modes(x), four_modes(values), four_modes(scales)
    rows = x.shape[0] * x.shape[1] * x.shape[2]
    quantize_rows_kernel(x, values, scales, spec).launch(
        grid=[cute.ceil_div(rows, spec.rows), 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@entry_name("quantize_rows")
@cute.kernel
def quantize_rows_kernel(x: cute.Tensor, values: cute.Tensor, scales: cute.Tensor, spec: cutlass.Constexpr):
    """Device side of `quantize_rows`. Threads of a row that does not exist work on the last one."""
    thread = cute.arch.thread_idx()[0]
    number = cute.arch.block_idx()[0] * spec.rows + thread // spec.threads
    rows = x.shape[0] * x.shape[1] * x.shape[2]
    exists = number < rows
    number = cutlass.min(number, rows - 1)
    matrix, row = number // x.shape[2], number % x.shape[2]
    at = (matrix // x.shape[1], matrix % x.shape[1])
    first = thread % spec.threads * VECTOR
    count = max(spec.vectors, 1)
    elements = cute.make_rmem_tensor(count * VECTOR, Float32)
    step = spec.threads * VECTOR
    amax = Float32(0.0)
    if const_expr(spec.vectors > 0):
        load_row(x, (at, row), first, step, elements)
        amax = maximum(elements)
    else:
        for start in cutlass.range(first, x.shape[3], step):
            load_row(x, (at, row), start, step, elements)
            amax = cute.arch.fmax(amax, maximum(elements))
    if const_expr(spec.threads == 32):
        amax = cute.arch.warp_reduction_max(amax)
    else:
        scratch = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS // 32), 16)
        amax = block_max(amax, scratch, thread, THREADS // 32)
    scale = group_scale(amax, spec.format)
    if exists:
        if first == 0:
            scales[at[0], at[1], row, 0] = scale
        if const_expr(spec.vectors > 0):
            store_row(spec, values, (at, row), first, elements, reciprocal(scale))
        else:
            for start in cutlass.range(first, x.shape[3], step):
                load_row(x, (at, row), start, step, elements)
                store_row(spec, values, (at, row), start, elements, reciprocal(scale))


def maximum(elements: cute.Tensor) -> Float32:
    """The largest finite magnitude of a thread's elements. With one group there is time to look at each."""
    flat = cute.make_layout((1, cute.size(elements)), stride=(0, 1))
    return largest_magnitudes(cute.make_tensor(elements.iterator, flat), finite_magnitude)[0]


@cute.jit
def load_row(x: cute.Tensor, place: tuple, first: Int32, step: cutlass.Constexpr, elements: cute.Tensor):
    """Vectors first, first + step, … of a row, 0 behind its end. Whole vectors first: their loads overlap."""
    at, row = place
    K = x.shape[3]
    elements.fill(0.0)
    for i in range_constexpr(cute.size(elements) // VECTOR):
        column = first + i * step
        if column + VECTOR <= K:
            load_whole(vector_at(x, at, row, column), elements, i * VECTOR)
    if K % VECTOR != 0:
        for i in range_constexpr(cute.size(elements) // VECTOR):
            column = first + i * step
            if (column < K) & (column + VECTOR > K):
                load_part(address(x, at, row, column), elements, i * VECTOR, K - column)


@cute.jit
def store_row(
    spec: cutlass.Constexpr,
    values: cute.Tensor,
    place: tuple,
    first: Int32,
    elements: cute.Tensor,
    factor: Float32,
):
    """The same vectors as fp8. One that begins in the row ends in it or in the pitch behind it."""
    at, row = place
    scaled = cute.make_rmem_tensor(VECTOR, Float32)
    packed = cute.make_rmem_tensor(VECTOR, DTYPES[spec.format])
    for i in range_constexpr(cute.size(elements) // VECTOR):
        column = first + i * spec.threads * VECTOR
        for v in range_constexpr(VECTOR):
            scaled[v] = elements[i * VECTOR + v] * factor
        packed.store(scaled.load().to(DTYPES[spec.format]))
        if column < values.shape[3]:
            target = address(values, at, row, column).align(VECTOR)
            cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(VECTOR)))
