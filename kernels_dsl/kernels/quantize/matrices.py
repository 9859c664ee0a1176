"""Matrices as fp8 with a scale each, in one read: elements wait in shared memory for their maximum.

All CTAs are there at the same time. The elements of all matrices are dealt in order, an item to each CTA in
turn. A CTA keeps its last items while the others take the maxima of theirs, and converts each a few items
later, when the matrix is complete.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.cp_async import cp_async
from kernels_dsl.blocks.entry_name import entry_name
from kernels_dsl.blocks.fp8 import DTYPES, group_scale, reciprocal
from kernels_dsl.blocks.grid_barrier import arrive, leave, wait
from kernels_dsl.config.quantize import THREADS, VECTOR, WARPS

from .views import address, four_modes, maximum, vector_at

ABSENT = -1.0
"""A maximum that is not there yet."""


def quantize_matrices(
    x: cute.Tensor,
    values: cute.Tensor,
    scales: cute.Tensor,
    workspace: cute.Tensor,
    counter: cute.Tensor,
    ctas: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch on x (…, M, K) of 16 bits, up to four modes, K contiguous and a multiple of 8, rows at multiples
    of 16 bytes; spec: a `MatrixQuantization`.

    values (…, M, K) fp8, rows at multiples of 16 bytes; scales (…, 1, 1) float32. Both are written.
    workspace: float32, one for each item, written. counter: int32 (1,), 0, and 0 again afterwards. ctas: no
    more than the GPU runs at the same time; a matrix has at most `lag` - 1 times as many items.
    """
    x, values, scales = four_modes(x), four_modes(values), four_modes(scales)
    matrices = x.shape[0] * x.shape[1]
    items = cute.ceil_div(x.shape[2] * (x.shape[3] // VECTOR), spec.vectors * THREADS)
    maxima = cute.make_tensor(workspace.iterator, cute.make_layout((items, matrices)))
    quantize_matrices_kernel(x, values, scales, (maxima, counter), spec).launch(
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
    x: cute.Tensor, values: cute.Tensor, scales: cute.Tensor, shared_by_all: tuple, spec: cutlass.Constexpr
):
    """Device side of `quantize_matrices`. A maximum says by its sign whether it is there: no fences."""
    maxima, counter = shared_by_all
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
    items, lanes = maxima.shape[0], x.shape[3] // VECTOR
    steps = (cute.size(maxima) - cta + ctas - 1) // ctas
    # Divisions take longer than all else: one each before the loop.
    turn = (ctas // items, ctas % items, items)
    row = (lanes, THREADS // lanes, THREADS % lanes)
    first = (cta // items, cta % items)
    ahead, taken = first, first
    for n in range_constexpr(spec.ahead):
        if n < steps:
            fetch(spec, x, ahead, row, kept[None, None, thread, n])
        cute.arch.cp_async_commit_group()
        ahead = after(ahead, turn)
    for step in cutlass.range(steps + spec.lag, unroll=1):
        slot = (step + spec.ahead) % slots
        # Of the item `lag` ago, of whose matrix all were taken in the steps before this.
        amax, matrix_amax = Float32(0.0), Float32(0.0)
        parts = maxima[None, taken[0]].iterator
        if (step >= spec.lag) & (thread < items):
            matrix_amax = cute.arch.load(parts + thread, Float32, sem="relaxed", scope="gpu")
        cute.arch.cp_async_wait_group(spec.ahead - 1)
        if step < steps:
            take(kept[None, None, thread, step % slots], elements)
            amax = maximum(elements)
        if step >= spec.lag:
            if matrix_amax < Float32(0.0):
                matrix_amax = once_there(parts + thread)
            for n in cutlass.range(thread + THREADS, items, THREADS, unroll=1):
                matrix_amax = cute.arch.fmax(matrix_amax, once_there(parts + n))
        amax, matrix_amax = block_maxima((amax, matrix_amax), scratch[None, None, step % 2], thread)
        if step == 0:
            wait(counter, ctas, Int32(1), thread)  # until all are absent
        if (step < steps) & (thread == 0):
            target = maxima.iterator + (cta + step * ctas)
            cute.arch.store(target, cute.arch.fmax(amax, Float32(0.0)), sem="relaxed", scope="gpu")
        if step >= spec.lag:
            scale = group_scale(matrix_amax, spec.format)
            if (thread == 0) & (taken[1] == 0):
                scales[taken[0] // x.shape[1], taken[0] % x.shape[1], 0, 0] = scale
            conversion = (kept[None, None, thread, slot], reciprocal(scale))
            store_item(spec, (x, values), taken, row, conversion)
            taken = after(taken, turn)
        if step + spec.ahead < steps:
            fetch(spec, x, ahead, row, kept[None, None, thread, slot])
            ahead = after(ahead, turn)
        cute.arch.cp_async_commit_group()
    leave(counter, ctas, Int32(1), thread)


def after(item: tuple, turn: tuple) -> tuple:
    """(matrix, number in it) of a CTA's item after `item`. turn: as many items as CTAs, in whole matrices and
    a rest, and the items of a matrix."""
    whole, rest, items = turn
    number = item[1] + rest
    over = Int32(number >= items)
    return item[0] + whole + over, number - items * over


@cute.jit
def block_maxima(both: tuple, scratch: cute.Tensor, thread: Int32):
    """The maxima of two numbers over all threads of a CTA; scratch: (WARPS, 2) shared."""
    for n in range_constexpr(2):
        scratch[thread // 32, n] = cute.arch.warp_reduction_max(both[n])
    cute.arch.sync_threads()
    first, second = scratch[0, 0], scratch[0, 1]
    for warp in range_constexpr(1, WARPS):
        first = cute.arch.fmax(first, scratch[warp, 0])
        second = cute.arch.fmax(second, scratch[warp, 1])
    return first, second


@cute.jit
def once_there(maximum: cute.Pointer) -> Float32:
    """A maximum, once another CTA has stored it."""
    found = cute.arch.load(maximum, Float32, sem="relaxed", scope="gpu")
    while found < Float32(0.0):
        found = cute.arch.load(maximum, Float32, sem="relaxed", scope="gpu")
    return found


@cute.jit
def places(spec: cutlass.Constexpr, number: Int32, row: tuple):
    """(rows, columns) of this thread's vectors of item `number` of a matrix, which may be behind its end.

    row: vectors of a row, and whole rows and a rest of all threads' vectors.
    """
    rows, columns = cute.make_rmem_tensor(spec.vectors, Int32), cute.make_rmem_tensor(spec.vectors, Int32)
    lanes, whole, rest = row
    first = number * (spec.vectors * THREADS) + cute.arch.thread_idx()[0]
    m, lane = first // lanes, first % lanes
    for i in range_constexpr(spec.vectors):
        rows[i], columns[i] = m, lane * VECTOR
        over = Int32(lane + rest >= lanes)
        m, lane = m + whole + over, lane + rest - lanes * over
    return rows, columns


@cute.jit
def fetch(spec: cutlass.Constexpr, x: cute.Tensor, item: tuple, row: tuple, own: cute.Tensor):
    """Starts the copy of this thread's vectors of an item to own (VECTOR, vectors), 0 behind its matrix."""
    at = (item[0] // x.shape[1], item[0] % x.shape[1])
    rows, columns = places(spec, item[1], row)
    for i in range_constexpr(spec.vectors):
        there = Int32(16) * Int32(rows[i] < x.shape[2])
        source = vector_at(x, at, rows[i], columns[i])
        cp_async(own[None, i].iterator.align(16), source, 16, there)


def take(own: cute.Tensor, elements: cute.Tensor) -> None:
    """What was fetched to registers: own (VECTOR, vectors), elements of any shape of as many."""
    whole = cute.make_layout(VECTOR)
    for i in range(cute.size(elements) // VECTOR):
        source = cute.make_tensor(own[None, i].iterator.align(16), whole)
        cute.autovec_copy(source, cute.make_tensor((elements.iterator + i * VECTOR).align(16), whole))


@cute.jit
def store_item(spec: cutlass.Constexpr, tensors: tuple, item: tuple, row: tuple, conversion: tuple):
    """This thread's vectors of an item as fp8. tensors: x and values; conversion: what was fetched of it, and
    1 / scale."""
    x, values = tensors
    own, factor = conversion
    at = (item[0] // x.shape[1], item[0] % x.shape[1])
    rows, columns = places(spec, item[1], row)
    packed = cute.make_rmem_tensor(VECTOR, DTYPES[spec.format])
    vector = cute.make_rmem_tensor(VECTOR, x.element_type)
    for i in range_constexpr(spec.vectors):
        if rows[i] < x.shape[2]:
            source = cute.make_tensor(own[None, i].iterator.align(16), cute.make_layout(VECTOR))
            cute.autovec_copy(source, vector)
            packed.store((vector.load().to(Float32) * factor).to(DTYPES[spec.format]))
            target = address(values, at, rows[i], columns[i]).align(VECTOR)
            cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(VECTOR)))
