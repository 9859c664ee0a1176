"""Matrices as fp8 with a scale each, in one read: elements wait in shared memory for their maximum.

All CTAs are there at the same time. The elements of all matrices are dealt in order, an item to each CTA in
turn. A CTA keeps its last items while the others take the maxima of theirs, and converts each a few items
later, when the matrix is complete.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kernels_dsl.blocks.hw.cp_async import cp_async
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.fp8 import DTYPES, block_max, group_scale, reciprocal
from kernels_dsl.blocks.hw.grid_barrier import arrive, leave, wait
from kernels_dsl.config.quantize import THREADS, VECTOR, WARPS

from .views import address, convert, divisor, four_modes, maximum, memory_at, store_vector

ABSENT = -1.0
"""A maximum that is not there yet."""


def quantize_matrices(
    x: cute.Tensor,
    values: cute.Tensor,
    scales: cute.Tensor,
    workspace: Int64,
    counter: Int64,
    ctas: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch on x (…, M, K) of 16 bits, up to four modes, K contiguous and a multiple of 8, rows at multiples
    of 16 bytes; spec: a `MatrixQuantization`.

    values (…, M, K) fp8, rows at multiples of 16 bytes; scales (…, 1, 1) float32. Both are written.
    workspace: the address of float32, one for each item, written. counter: that of an int32, 0, and 0 again
    afterwards. ctas: no more than the GPU runs at the same time; a matrix has at most `lag` - 1 times as many
    items.
    """
    launch(((x, values, scales),), (workspace, counter), ctas, stream, spec)


def quantize_three(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    made: tuple,
    workspace: Int64,
    counter: Int64,
    ctas: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """`quantize_matrices` of three tensors that differ in their modes before M alone, in one launch.

    made: values and scales of each in turn.
    """
    launch(((q, *made[:2]), (k, *made[2:4]), (v, *made[4:])), (workspace, counter), ctas, stream, spec)


def launch(tensors: tuple, addresses: tuple, ctas: Int32, stream, spec: cutlass.Constexpr) -> None:
    """Launch on tensors ((x, values, scales), …), whose matrices are numbered one after the other."""
    tensors = tuple(tuple(four_modes(t) for t in group) for group in tensors)
    x = tensors[0][0]
    matrices = sum((matrices_of(group[0]) for group in tensors[1:]), matrices_of(x))
    lanes = x.shape[3] // VECTOR
    items = cute.ceil_div(x.shape[2] * lanes, spec.vectors * THREADS)
    workspace, counter = (memory_at(a, dtype) for a, dtype in zip(addresses, (Float32, Int32)))
    maxima = cute.make_tensor(workspace, cute.make_layout((items, matrices)))
    counter = cute.make_tensor(counter, cute.make_layout(1))
    turn, row = (ctas // items, ctas % items), (THREADS // lanes, THREADS % lanes)
    divisors = (divisor(items), divisor(lanes))
    inner = tuple(divisor(group[0].shape[1]) for group in tensors)
    numbers = (turn, row, *divisors, inner)
    quantize_matrices_kernel(*zip(*tensors), (maxima, counter), numbers, spec).launch(
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
    sources: tuple,
    values: tuple,
    scales: tuple,
    shared_by_all: tuple,
    numbers: tuple,
    spec: cutlass.Constexpr,
):
    """Device side of `quantize_matrices`. A maximum says by its sign whether it is there: no fences.

    numbers: as many items as CTAs, in whole matrices and a rest; all threads' vectors, in whole rows and a
    rest; what divides by the items of a matrix, by the vectors of a row, by the matrices of each tensor's
    second mode.
    """
    maxima, counter = shared_by_all
    turn, row, by_items, by_lanes, inner = numbers
    x = sources[0]
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
    strides = (1, THREADS * VECTOR, VECTOR, spec.vectors * THREADS * VECTOR)
    layout = cute.make_layout((VECTOR, spec.vectors, THREADS, slots), stride=strides)
    kept = allocator.allocate_tensor(x.element_type, layout, 16)
    elements = cute.make_rmem_tensor(spec.vectors * VECTOR, x.element_type)
    items = maxima.shape[0]
    turn, row = (*turn, items), (*row, by_lanes)
    steps = (cute.size(maxima) - cta + ctas - 1) // ctas
    first = divmod(cta, by_items)
    ahead, taken = first, first
    for n in range_constexpr(spec.ahead):
        if n < steps:
            fetch(spec, sources, inner, ahead, row, kept[None, None, thread, n])
        cute.arch.cp_async_commit_group()
        ahead = after(ahead, turn)
    matrix_amax = Float32(ABSENT)
    for step in cutlass.range(steps + spec.lag, unroll=1):
        slot = (step + spec.ahead) % slots
        # The item `lag` ago, of whose matrix all were taken in the steps before this.
        if step >= spec.lag:
            if thread < items:
                if matrix_amax < Float32(0.0):
                    matrix_amax = once_there(maxima[None, taken[0]].iterator + thread)
            for n in cutlass.range(thread + THREADS, items, THREADS, unroll=1):
                matrix_amax = cute.arch.fmax(matrix_amax, once_there(maxima[None, taken[0]].iterator + n))
            matrix_amax = block_max(matrix_amax, scratch[None, 0, step % 2], thread, WARPS)
            scale = group_scale(matrix_amax, spec.format)
            if (thread == 0) & (taken[1] == 0):
                target, _ = matrix_at(scales, inner, taken[0])
                cute.make_tensor(pointer(scales[0], target, Int64(0), 4), cute.make_layout(1))[0] = scale
            conversion = (kept[None, None, thread, slot], reciprocal(scale), x.shape[2])
            store_item(spec, values, inner, taken, row, conversion)
            taken = after(taken, turn)
        if step + spec.ahead < steps:
            fetch(spec, sources, inner, ahead, row, kept[None, None, thread, slot])
            ahead = after(ahead, turn)
        cute.arch.cp_async_commit_group()
        # What the next step waits for may be there, so that it need not wait.
        matrix_amax = Float32(ABSENT)
        if (step + 1 >= spec.lag) & (taken[0] < maxima.shape[1]) & (thread < items):
            own = maxima[None, taken[0]].iterator + thread
            matrix_amax = cute.arch.load(own, Float32, sem="relaxed", scope="gpu")
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


def after(item: tuple, turn: tuple) -> tuple:
    """(matrix, number in it) of a CTA's item after `item`. turn: as many items as CTAs, in whole matrices and
    a rest, and the items of a matrix."""
    whole, rest, items = turn
    number = item[1] + rest
    over = Int32(number >= items)
    return item[0] + whole + over, number - items * over


@cute.jit
def once_there(maximum: cute.Pointer) -> Float32:
    """A maximum, once another CTA has stored it."""
    found = cute.arch.load(maximum, Float32, sem="relaxed", scope="gpu")
    while found < Float32(0.0):
        found = cute.arch.load(maximum, Float32, sem="relaxed", scope="gpu")
    return found


def first_place(spec: cutlass.Constexpr, number: Int32, row: tuple) -> tuple:
    """(row, vector in it) of this thread's first vector of item `number` of a matrix.

    row: all threads' vectors, in whole rows and a rest, and what divides by the vectors of a row.
    """
    return divmod(number * (spec.vectors * THREADS) + cute.arch.thread_idx()[0], row[2])


def straight(spec: cutlass.Constexpr, number: Int32, row: tuple, end: Int32) -> cutlass.Boolean:
    """Whether a thread's vectors of an item lie below each other, all within the matrix of `end` rows."""
    _, rest, by_lanes = row
    return (rest == 0) & ((number + 1) * (spec.vectors * THREADS) <= end * by_lanes.divisor)


@cute.jit
def places(spec: cutlass.Constexpr, number: Int32, row: tuple):
    """(rows, columns) of this thread's vectors of item `number` of a matrix, which may be behind its end."""
    rows, columns = cute.make_rmem_tensor(spec.vectors, Int32), cute.make_rmem_tensor(spec.vectors, Int32)
    whole, rest, by_lanes = row
    lanes = by_lanes.divisor
    m, lane = first_place(spec, number, row)
    for i in range_constexpr(spec.vectors):
        rows[i], columns[i] = m, lane * VECTOR
        over = Int32(lane + rest >= lanes)
        m, lane = m + whole + over, lane + rest - lanes * over
    return rows, columns


def matrices_of(tensor: cute.Tensor) -> Int32:
    """Matrices of a tensor of four modes."""
    return tensor.shape[0] * tensor.shape[1]


def begins(tensor: cute.Tensor, inner: cute.FastDivmodDivisorV2, number: Int32) -> tuple:
    """(address of a tensor's matrix, elements from one row to the next)."""
    at = divmod(number, inner)
    return address(tensor, at, Int32(0), Int32(0)).toint(), Int64(tensor.stride[2])


def pointer(like: cute.Tensor, start: Int64, offset: Int64, alignment: int) -> cute.Pointer:
    """To element `offset` from address `start` on, which is a multiple of `alignment` bytes."""
    dtype = like.element_type
    place = start + offset * (dtype.width // 8)
    return cute.make_ptr(dtype, place, like.iterator.memspace, assumed_align=alignment)


@cute.jit
def matrix_at(tensors: tuple, inner: tuple, number: Int32):
    """(address of matrix `number` of all tensors, elements from one row to the next)."""
    start, pitch = begins(tensors[0], inner[0], number)
    before = matrices_of(tensors[0])
    for t in range_constexpr(1, len(tensors)):
        if number >= before:
            start, pitch = begins(tensors[t], inner[t], number - before)
        before = before + matrices_of(tensors[t])
    return start, pitch


@cute.jit
def fetch(spec: cutlass.Constexpr, sources: tuple, inner: tuple, item: tuple, row: tuple, own: cute.Tensor):
    """Starts the copy of this thread's vectors of an item to own (VECTOR, vectors), 0 behind its matrix."""
    start, pitch = matrix_at(sources, inner, item[0])
    if straight(spec, item[1], row, sources[0].shape[2]):
        m, lane = first_place(spec, item[1], row)
        for i in range_constexpr(spec.vectors):
            offset = (m * pitch + lane * VECTOR) + row[0] * pitch * i
            cp_async(own[None, i].iterator.align(16), pointer(sources[0], start, offset, 16), 16, Int32(16))
    else:
        rows, columns = places(spec, item[1], row)
        for i in range_constexpr(spec.vectors):
            there = Int32(16) * Int32(rows[i] < sources[0].shape[2])
            source = pointer(sources[0], start, rows[i] * pitch + columns[i], 16)
            cp_async(own[None, i].iterator.align(16), source, 16, there)


def take(own: cute.Tensor, elements: cute.Tensor) -> None:
    """What was fetched to registers: own (VECTOR, vectors), elements of any shape of as many."""
    whole = cute.make_layout(VECTOR)
    for i in range(cute.size(elements) // VECTOR):
        source = cute.make_tensor(own[None, i].iterator.align(16), whole)
        cute.autovec_copy(source, cute.make_tensor((elements.iterator + i * VECTOR).align(16), whole))


@cute.jit
def store_item(
    spec: cutlass.Constexpr, values: tuple, inner: tuple, item: tuple, row: tuple, conversion: tuple
):
    """This thread's vectors of an item as fp8. conversion: what was fetched of it, 1 / scale, rows of a
    matrix."""
    own, factor, end = conversion
    start, pitch = matrix_at(values, inner, item[0])
    if straight(spec, item[1], row, end):
        m, lane = first_place(spec, item[1], row)
        for i in range_constexpr(spec.vectors):
            offset = (m * pitch + lane * VECTOR) + row[0] * pitch * i
            store_vector(converted(spec, own[None, i], factor), pointer(values[0], start, offset, VECTOR))
    else:
        rows, columns = places(spec, item[1], row)
        for i in range_constexpr(spec.vectors):
            if rows[i] < end:
                target = pointer(values[0], start, rows[i] * pitch + columns[i], VECTOR)
                store_vector(converted(spec, own[None, i], factor), target)


def converted(spec: cutlass.Constexpr, own: cute.Tensor, factor: Float32) -> cute.Tensor:
    """A vector that was fetched, as fp8."""
    vector = cute.make_rmem_tensor(VECTOR, own.element_type)
    cute.autovec_copy(cute.make_tensor(own.iterator.align(16), cute.make_layout(VECTOR)), vector)
    packed = cute.make_rmem_tensor(VECTOR, DTYPES[spec.format])
    convert(vector, 0, factor, packed)
    return packed
