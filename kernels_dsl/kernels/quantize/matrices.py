"""Matrices as fp8 with a scale each, in one read: elements wait in shared memory for their maximum.

All CTAs run at the same time. The elements of all matrices are dealt in order, an item to each CTA in turn. A
CTA keeps its last items while the others take the maxima of theirs, and converts each a few items later, when
its matrix is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kernels_dsl.blocks.hw.cp_async import cp_async
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.fp8 import DTYPES, block_max, group_scale, reciprocal
from kernels_dsl.blocks.hw.grid_barrier import arrive, leave, wait
from kernels_dsl.config.quantize import THREADS, VECTOR, WARPS, MatrixQuantization

from .views import MatrixIndex, address, convert, divisor, four_modes, maximum, memory_at, store_vector

ABSENT = -1.0
"""A maximum that is not there yet."""


class MatrixTensors(NamedTuple):
    """A tensor and its outputs, of four modes."""

    x: cute.Tensor  # (L1, L2, M, K)
    values: cute.Tensor  # fp8 (L1, L2, M, K)
    scales: cute.Tensor  # float32 (L1, L2, 1, 1)


class Source(NamedTuple):
    """Tensors whose matrices are numbered one after the other, and divisors by their second modes."""

    tensors: tuple[cute.Tensor, ...]
    inner: tuple[cute.FastDivmodDivisorV2, ...]


class Quotient(NamedTuple):
    """A count in whole units, and the remainder."""

    whole: Int32
    remainder: Int32


class Strides(NamedTuple):
    """Steps of all CTAs and of all threads, and their divisors."""

    turn: Quotient  # as many items as CTAs, in matrices
    row: Quotient  # the vectors of all threads of a CTA, in rows
    by_items: cute.FastDivmodDivisorV2  # items of a matrix
    by_lanes: cute.FastDivmodDivisorV2  # vectors of a row
    inner: tuple[cute.FastDivmodDivisorV2, ...]  # matrices of each tensor's second mode


class Item(NamedTuple):
    """A piece of a matrix that a CTA takes at a time."""

    matrix: Int32
    number: Int32  # in the matrix

    def after(self, turn: Quotient, items: Int32) -> Item:
        """The CTA's next item; `items`: of a matrix."""
        number = self.number + turn.remainder
        over = Int32(number >= items)
        return Item(self.matrix + turn.whole + over, number - items * over)


class MatrixRows(NamedTuple):
    """Address of a matrix, and elements from one row to the next."""

    start: Int64
    pitch: Int64


def quantize_matrices(
    x: cute.Tensor,
    values: cute.Tensor,
    scales: cute.Tensor,
    workspace: Int64,
    counter: Int64,
    ctas: Int32,
    stream,
    spec: cutlass.Constexpr[MatrixQuantization],
):
    """Launch on x (…, M, K) of 16 bits, up to four modes, K contiguous and a multiple of 8, rows at multiples
    of 16 bytes.

    values (…, M, K) fp8, rows at multiples of 16 bytes; scales (…, 1, 1) float32. Both are written.
    workspace: the address of float32, one for each item, written. counter: the address of an int32, 0 before
    and after. ctas: at most as many as the GPU runs at the same time; a matrix has at most `lag` - 1 times as
    many items.
    """
    launch([MatrixTensors(x, values, scales)], workspace, counter, ctas, stream, spec)


def quantize_three(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    made: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
    workspace: Int64,
    counter: Int64,
    ctas: Int32,
    stream,
    spec: cutlass.Constexpr[MatrixQuantization],
):
    """`quantize_matrices` of three tensors that differ only in their modes before M, in one launch.

    made: values and scales of each in turn.
    """
    tensors = [MatrixTensors(x, *pair) for x, pair in zip((q, k, v), (made[:2], made[2:4], made[4:]))]
    launch(tensors, workspace, counter, ctas, stream, spec)


def launch(
    tensors: Sequence[MatrixTensors],
    workspace: Int64,
    counter: Int64,
    ctas: Int32,
    stream,
    spec: MatrixQuantization,
) -> None:
    """Launch on tensors whose matrices are numbered one after the other."""
    tensors = [MatrixTensors(*map(four_modes, group)) for group in tensors]
    x = tensors[0].x
    matrices = sum((matrices_of(group.x) for group in tensors[1:]), matrices_of(x))
    lanes = x.shape[3] // VECTOR
    items = cute.ceil_div(x.shape[2] * lanes, spec.vectors * THREADS)
    maxima_memory, counter_memory = memory_at(workspace, Float32), memory_at(counter, Int32)
    maxima = cute.make_tensor(maxima_memory, cute.make_layout((items, matrices)))
    counted = cute.make_tensor(counter_memory, cute.make_layout(1))
    turn, row = Quotient(ctas // items, ctas % items), Quotient(THREADS // lanes, THREADS % lanes)
    divisors = (divisor(items), divisor(lanes))
    inner = tuple(divisor(group.x.shape[1]) for group in tensors)
    strides = Strides(turn, row, *divisors, inner)
    quantize_matrices_kernel(*map(tuple, zip(*tensors)), maxima, counted, strides, spec).launch(
        grid=[ctas, 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=spec.per_sm,
        preferred_smem_carveout=100,  # in percent; without it the compiler asks a GPU, and there may be none
        stream=stream,
        use_pdl=spec.early,
        cooperative=True,
    )


@entry_name("quantize_matrices")
@cute.kernel
def quantize_matrices_kernel(
    sources: tuple[cute.Tensor, ...],
    values: tuple[cute.Tensor, ...],
    scales: tuple[cute.Tensor, ...],
    maxima: cute.Tensor,
    counter: cute.Tensor,
    strides: Strides,
    spec: cutlass.Constexpr[MatrixQuantization],
):
    """Device side of `quantize_matrices`. The sign of a maximum says that it is there, so there are no
    fences.

    maxima (items of a matrix, matrices).
    """
    inner, turn = strides.inner, strides.turn
    sources, values, scales = Source(sources, inner), Source(values, inner), Source(scales, inner)
    x = sources.tensors[0]
    thread, cta, ctas = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    if const_expr(spec.early):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # they begin when all CTAs of this launch run
    for i in cutlass.range(cta * THREADS + thread, cute.size(maxima), ctas * THREADS, unroll=1):
        maxima[i] = Float32(ABSENT)
    arrive(counter, thread)

    allocator = cutlass.memory.SmemAllocator()
    scratch = allocator.allocate_tensor(Float32, cute.make_layout((WARPS, 2, 2)), 16)
    slots = const_expr(spec.ahead + spec.lag)
    steps_of = (1, THREADS * VECTOR, VECTOR, spec.vectors * THREADS * VECTOR)
    layout = cute.make_layout((VECTOR, spec.vectors, THREADS, slots), stride=steps_of)
    kept = allocator.allocate_tensor(x.element_type, layout, 16)
    elements = cute.make_rmem_tensor(spec.vectors * VECTOR, x.element_type)
    items = maxima.shape[0]
    steps = (cute.size(maxima) - cta + ctas - 1) // ctas
    first = Item(*divmod(cta, strides.by_items))
    ahead, taken = first, first
    for n in range_constexpr(spec.ahead):
        if n < steps:
            fetch(spec, sources, ahead, strides, kept[None, None, thread, n])
        cute.arch.cp_async_commit_group()
        ahead = ahead.after(turn, items)
    matrix_amax = Float32(ABSENT)
    for step in cutlass.range(steps + spec.lag, unroll=1):
        slot = (step + spec.ahead) % slots
        # The item `lag` ago, of whose matrix all were taken in the steps before this.
        if step >= spec.lag:
            if thread < items:
                if matrix_amax < Float32(0.0):
                    matrix_amax = once_there(maxima[None, taken.matrix].iterator + thread)
            for n in cutlass.range(thread + THREADS, items, THREADS, unroll=1):
                matrix_amax = cute.arch.fmax(matrix_amax, once_there(maxima[None, taken.matrix].iterator + n))
            matrix_amax = block_max(matrix_amax, scratch[None, 0, step % 2], thread, WARPS)
            scale = group_scale(matrix_amax, spec.format)
            if (thread == 0) & (taken.number == 0):
                target = matrix_at(scales, taken.matrix).start
                one = pointer(scales.tensors[0], target, Int64(0), 4)
                cute.make_tensor(one, cute.make_layout(1))[0] = scale
            own, end = kept[None, None, thread, slot], x.shape[2]
            store_item(spec, values, taken, strides, own, reciprocal(scale), end)
            taken = taken.after(turn, items)
        if step + spec.ahead < steps:
            fetch(spec, sources, ahead, strides, kept[None, None, thread, slot])
            ahead = ahead.after(turn, items)
        cute.arch.cp_async_commit_group()
        # The maximum that the next step needs may be there already, which saves a wait.
        matrix_amax = Float32(ABSENT)
        if (step + 1 >= spec.lag) & (taken.matrix < maxima.shape[1]) & (thread < items):
            next_maximum = maxima[None, taken.matrix].iterator + thread
            matrix_amax = cute.arch.load(next_maximum, Float32, sem="relaxed", scope="gpu")
        if step < steps:
            cute.arch.cp_async_wait_group(spec.ahead)
            take(kept[None, None, thread, step % slots], elements)
            amax = block_max(maximum(elements), scratch[None, 1, step % 2], thread, WARPS)
            if step == 0:
                wait(counter, ctas, Int32(1), thread)  # until all are absent
            if thread == 0:
                target = maxima.iterator + (cta + step * ctas)
                cute.arch.store(target, cute.arch.fmax(amax, Float32(0.0)), sem="relaxed", scope="gpu")
    leave(counter, ctas, Int32(1), thread)


@cute.jit
def once_there(maximum: cute.Pointer) -> Float32:
    """Waits until another CTA has stored a maximum, and loads it."""
    found = cute.arch.load(maximum, Float32, sem="relaxed", scope="gpu")
    while found < Float32(0.0):
        found = cute.arch.load(maximum, Float32, sem="relaxed", scope="gpu")
    return found


def first_vector(spec: MatrixQuantization, number: Int32, strides: Strides) -> tuple[Int32, Int32]:
    """(row, vector in it) of this thread's first vector of item `number` of a matrix."""
    return divmod(number * (spec.vectors * THREADS) + cute.arch.thread_idx()[0], strides.by_lanes)


def straight(spec: MatrixQuantization, number: Int32, strides: Strides, end: Int32) -> cutlass.Boolean:
    """True if a thread's vectors of an item lie below each other, all within the matrix of `end` rows."""
    lanes = strides.by_lanes.divisor
    return (strides.row.remainder == 0) & ((number + 1) * (spec.vectors * THREADS) <= end * lanes)


class Positions(NamedTuple):
    """Rows and columns of a thread's vectors of an item, Int32 registers."""

    rows: cute.Tensor
    columns: cute.Tensor


@cute.jit
def positions(spec: cutlass.Constexpr[MatrixQuantization], number: Int32, strides: Strides) -> Positions:
    """Positions in item `number` of a matrix, perhaps after its end."""
    rows, columns = cute.make_rmem_tensor(spec.vectors, Int32), cute.make_rmem_tensor(spec.vectors, Int32)
    whole, remainder = strides.row
    lanes = strides.by_lanes.divisor
    m, lane = first_vector(spec, number, strides)
    for i in range_constexpr(spec.vectors):
        rows[i], columns[i] = m, lane * VECTOR
        over = Int32(lane + remainder >= lanes)
        m, lane = m + whole + over, lane + remainder - lanes * over
    return Positions(rows, columns)


def matrices_of(tensor: cute.Tensor) -> Int32:
    """Matrices of a tensor of four modes."""
    return tensor.shape[0] * tensor.shape[1]


def rows_of_matrix(tensor: cute.Tensor, inner: cute.FastDivmodDivisorV2, number: Int32) -> MatrixRows:
    """The rows of matrix `number` of a tensor."""
    index = MatrixIndex(*divmod(number, inner))
    return MatrixRows(address(tensor, index, Int32(0), Int32(0)).toint(), Int64(tensor.stride[2]))


def pointer(like: cute.Tensor, start: Int64, offset: Int64, alignment: int) -> cute.Pointer:
    """A pointer to element `offset` from address `start` on, a multiple of `alignment` bytes."""
    dtype = like.element_type
    address = start + offset * (dtype.width // 8)
    return cute.make_ptr(dtype, address, like.iterator.memspace, assumed_align=alignment)


@cute.jit
def matrix_at(source: Source, number: Int32) -> MatrixRows:
    """The rows of matrix `number` of all tensors."""
    tensors, inner = source
    start, pitch = rows_of_matrix(tensors[0], inner[0], number)
    before = matrices_of(tensors[0])
    for t in range_constexpr(1, len(tensors)):
        if number >= before:
            start, pitch = rows_of_matrix(tensors[t], inner[t], number - before)
        before = before + matrices_of(tensors[t])
    return MatrixRows(start, pitch)


@cute.jit
def fetch(
    spec: cutlass.Constexpr[MatrixQuantization],
    source: Source,
    item: Item,
    strides: Strides,
    own: cute.Tensor,
):
    """Starts the copy of this thread's vectors of an item to own (VECTOR, vectors), 0 after the matrix's
    end."""
    start, pitch = matrix_at(source, item.matrix)
    x = source.tensors[0]
    if straight(spec, item.number, strides, x.shape[2]):
        m, lane = first_vector(spec, item.number, strides)
        for i in range_constexpr(spec.vectors):
            offset = (m * pitch + lane * VECTOR) + strides.row.whole * pitch * i
            cp_async(own[None, i].iterator.align(16), pointer(x, start, offset, 16), 16, Int32(16))
    else:
        rows, columns = positions(spec, item.number, strides)
        for i in range_constexpr(spec.vectors):
            valid = Int32(16) * Int32(rows[i] < x.shape[2])
            vector = pointer(x, start, rows[i] * pitch + columns[i], 16)
            cp_async(own[None, i].iterator.align(16), vector, 16, valid)


def take(own: cute.Tensor, elements: cute.Tensor) -> None:
    """Copies fetched vectors, own (VECTOR, vectors), to the registers `elements` of as many."""
    whole = cute.make_layout(VECTOR)
    for i in range(cute.size(elements) // VECTOR):
        source = cute.make_tensor(own[None, i].iterator.align(16), whole)
        cute.autovec_copy(source, cute.make_tensor((elements.iterator + i * VECTOR).align(16), whole))


@cute.jit
def store_item(
    spec: cutlass.Constexpr[MatrixQuantization],
    target: Source,
    item: Item,
    strides: Strides,
    own: cute.Tensor,
    factor: Float32,
    end: Int32,
):
    """Stores this thread's fetched vectors of an item as fp8. factor: 1 / scale; end: rows of a matrix."""
    start, pitch = matrix_at(target, item.matrix)
    values = target.tensors[0]
    if straight(spec, item.number, strides, end):
        m, lane = first_vector(spec, item.number, strides)
        for i in range_constexpr(spec.vectors):
            offset = (m * pitch + lane * VECTOR) + strides.row.whole * pitch * i
            store_vector(converted(spec, own[None, i], factor), pointer(values, start, offset, VECTOR))
    else:
        rows, columns = positions(spec, item.number, strides)
        for i in range_constexpr(spec.vectors):
            if rows[i] < end:
                vector = pointer(values, start, rows[i] * pitch + columns[i], VECTOR)
                store_vector(converted(spec, own[None, i], factor), vector)


def converted(spec: MatrixQuantization, own: cute.Tensor, factor: Float32) -> cute.Tensor:
    """A fetched vector as fp8."""
    vector = cute.make_rmem_tensor(VECTOR, own.element_type)
    cute.autovec_copy(cute.make_tensor(own.iterator.align(16), cute.make_layout(VECTOR)), vector)
    packed = cute.make_rmem_tensor(VECTOR, DTYPES[spec.format])
    convert(vector, 0, factor, packed)
    return packed
