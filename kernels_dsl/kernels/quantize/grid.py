"""Quantisation with scales of all, of matrices or of lines, which come first: two passes in one launch.

All CTAs are there at the same time. They take maxima of their tiles, wait for each other, and convert the
same tiles in the opposite order: the last one is still in registers, those before it are in L2. Those of one
cluster meet at its barrier, more at a counter.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.fp8 import block_max, group_scale, halves
from kernels_dsl.blocks.hw.grid_barrier import arrive, leave, wait
from kernels_dsl.config.quantize import THREADS, TILE, VECTOR, WARPS

from .tile import convert_tile
from .views import (
    LANES,
    ROWS,
    clear,
    four_modes,
    larger_pairs,
    load_tile,
    maxima_at,
    maxima_of_rows,
    maximum,
    maximum_of_row,
    memory_at,
    pairs_of_columns,
    raise_to,
    row_of_tile,
    scale_of_all,
)


def quantize_grid(
    x: cute.Tensor,
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    workspace: Int64,
    counter: Int64,
    ctas: Int32,
    along_m: Int32,
    along_k: Int32,
    scale: Int64,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch on x (…, M, K), up to four modes, K contiguous; the outputs are those of `launch_tiles`.

    spec: a `TileQuantization` of kinds "whole", "matrix" or "lines". workspace: the address of float32,
    of `config.quantize.grid_elements` or more, written. counter: that of an int32, 0, and 0 again afterwards;
    a cluster has no use for it. ctas, along_m, along_k: all CTAs, those along M, along K, of
    `config.quantize.division_of`; there are no more than the GPU runs at the same time. scale: the address of
    the one scale of "whole", with which there are no scales' tensors; otherwise 0.
    """
    x = four_modes(x)
    if "whole" in (spec.plain, spec.turned):
        scales, turned_scales = scale_of_all(scale, spec)
    outputs = tuple(
        None if t is None else four_modes(t) for t in (values, scales, turned_values, turned_scales)
    )
    memory = memory_at(workspace, Float32)
    counted = None
    if not spec.grid.cluster:
        counted = cute.make_tensor(memory_at(counter, Int32), cute.make_layout(1))
    matrices = x.shape[0] * x.shape[1]
    columns, rows = None, None
    used = Int64(1) if "whole" in (spec.plain, spec.turned) else Int64(matrices)
    if "lines" in (spec.plain, spec.turned):
        columns, used = maxima_at(memory, Int64(0), (matrices, 1, x.shape[3]))
        if spec.plain == "lines":
            rows, used = maxima_at(memory, used, (matrices, 1, x.shape[2]))
    cleared = cute.make_tensor(memory, cute.make_layout(Int32(used)))
    quantize_grid_kernel(x, outputs, (cleared, columns, rows), counted, (along_m, along_k), spec).launch(
        grid=[ctas, 1, 1],
        block=[THREADS, 1, 1],
        cluster=[ctas, 1, 1] if spec.grid.cluster else None,
        min_blocks_per_mp=spec.grid.per_sm,
        preferred_smem_carveout=100,  # in percent; without it the compiler asks a GPU, and there may be none
        stream=stream,
        use_pdl=spec.early,
        cooperative=not spec.grid.cluster,
    )


@entry_name("quantize_grid")
@cute.kernel
def quantize_grid_kernel(
    x: cute.Tensor,
    outputs: tuple,
    maxima_of: tuple,
    counter: cute.Tensor | None,
    along: tuple,
    spec: cutlass.Constexpr,
):
    """Device side of `quantize_grid`; counter: None for a cluster.

    The tiles of a matrix are dealt to along[0] x along[1] CTAs, which walk over them side by side, down the
    columns. Matrices beyond those that fit the grid follow in further rounds.
    """
    workspace, columns, rows = maxima_of  # the first has the other two in it
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    ctas = cute.arch.grid_dim()[0]
    word, lane = thread // LANES, thread % LANES
    if const_expr(spec.early):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # they begin when all CTAs of this launch run
    for i in cutlass.range(cta * THREADS + thread, cute.size(workspace), ctas * THREADS, unroll=1):
        workspace[i] = Float32(0.0)
    come_by(counter, thread)

    allocator = cutlass.memory.SmemAllocator()
    scratch = allocator.allocate_tensor(Float32, cute.make_layout((WARPS, TILE), stride=(TILE, 1)), 16)
    tile = None
    if const_expr(spec.turned is not None):
        tile = allocator.allocate_tensor(Int32, cute.make_layout(TILE * TILE // 4), 16)
    elements = cute.make_rmem_tensor(ROWS * VECTOR, x.element_type)
    kept = None
    if const_expr(spec.grid.kept > 0):
        kept = allocator.allocate_tensor(x.element_type, kept_layout(spec.grid.kept), 16)
    tiles_m, tiles_k = cute.ceil_div(x.shape[2], TILE), cute.ceil_div(x.shape[3], TILE)
    rounds = Int32(1)
    if const_expr(spec.grid.rounds):
        rounds = (x.shape[0] * x.shape[1] * along[0] * along[1] - cta + ctas - 1) // ctas
    most = no_columns(x.element_type)

    for round in cutlass.range(rounds, unroll=1):
        matrix, i, j = part_of(cta + round * ctas, along)
        at = (matrix // x.shape[1], matrix % x.shape[1])
        steps = steps_to(i, along[0], tiles_m) * steps_to(j, along[1], tiles_k)
        amax, m, k = Float32(0.0), i, j
        for n in cutlass.range(steps, unroll=1):
            load_tile(x, at, (m * TILE, k * TILE), (word, lane * VECTOR), elements, False)
            if const_expr(spec.grid.kept > 0):
                if (round == 0) & (n < spec.grid.kept):
                    copy_vectors(elements, kept[None, None, thread, n])
            if const_expr(columns is None):
                amax = cute.arch.fmax(amax, maximum(elements))
            else:
                if (n == 0) & (round == 0):
                    wait_for_all(counter, ctas, Int32(1), thread)
                larger_pairs(most, pairs_of_columns(elements), x.element_type)
                if const_expr(rows is not None):
                    own = maximum_of_row(maxima_of_rows(elements), lane)
                    row = m * TILE + row_of_tile(word, lane // 2, False)
                    if (lane % 2 == 0) & (row < x.shape[2]):
                        raise_to(rows[matrix, 0, None].iterator + row, own)
                if m + along[0] >= tiles_m:
                    place = (matrix, k * TILE, x.shape[3], thread)
                    publish_columns(columns, most, scratch, place, x.element_type)
                    clear(most)
            m += along[0]
            if m >= tiles_m:
                m, k = i, k + along[1]
        if const_expr(columns is None):
            amax = block_max(amax, scratch[0, None], thread, WARPS)
            if round == 0:
                wait_for_all(counter, ctas, Int32(1), thread)
            cute.arch.sync_threads()
            if thread == 0:
                raise_to(workspace.iterator + number_of_scale(spec, matrix), amax)

    come_by(counter, thread)
    wait_for_all(counter, ctas, Int32(2), thread)
    if const_expr(counter is not None):
        leave(counter, ctas, Int32(2), thread)

    for back in cutlass.range(rounds, unroll=1):
        matrix, i, j = part_of(cta + (rounds - 1 - back) * ctas, along)
        at = (matrix // x.shape[1], matrix % x.shape[1])
        scale = Float32(0.0)
        if const_expr(columns is None):
            scale = group_scale(workspace[number_of_scale(spec, matrix)], spec.format)
        steps_m, steps_k = steps_to(i, along[0], tiles_m), steps_to(j, along[1], tiles_k)
        last_m = i + (steps_m - 1) * along[0]
        steps, m, k = steps_m * steps_k, last_m, j + (steps_k - 1) * along[1]
        first_round = back == rounds - 1
        for forth in cutlass.range(steps, unroll=1):
            place = (at, (m * TILE, k * TILE), word, lane)
            if (back > 0) | (forth > 0):
                take_tile(spec, x, place, elements, kept, (first_round, steps - 1 - forth))
                cute.arch.sync_threads()  # shared memory is used again
            convert_tile(spec, x, outputs, elements, (scale, scratch, tile), (columns, rows), place)
            m -= along[0]
            if m < 0:
                m, k = last_m, k - along[1]


@cute.jit
def come_by(counter, thread: Int32):
    """What this CTA has written to global memory is there for who waits. counter: None for a cluster."""
    if const_expr(counter is None):
        cute.arch.cluster_arrive()
    else:
        arrive(counter, thread)


@cute.jit
def wait_for_all(counter, ctas: Int32, point: Int32, thread: Int32):
    """Until all have come by `point` times."""
    if const_expr(counter is None):
        cute.arch.cluster_wait()
    else:
        wait(counter, ctas, point, thread)


@cute.jit
def take_tile(
    spec: cutlass.Constexpr, x: cute.Tensor, place: tuple, elements: cute.Tensor, kept, which: tuple
):
    """A tile for the second time: from shared memory, where it is one of the first round's first."""
    at, origin, word, lane = place
    first_round, number = which
    if const_expr(spec.grid.kept > 0):
        if first_round & (number < spec.grid.kept):
            copy_vectors(kept[None, None, word * LANES + lane, number], elements)
        else:
            load_tile(x, at, origin, (word, lane * VECTOR), elements, False)
    else:
        load_tile(x, at, origin, (word, lane * VECTOR), elements, False)


def kept_layout(tiles: int) -> cute.Layout:
    """(VECTOR, ROWS, THREADS, tiles): a thread's vectors beside its neighbours', for itself alone."""
    strides = (1, THREADS * VECTOR, VECTOR, TILE * TILE)
    return cute.make_layout((VECTOR, ROWS, THREADS, tiles), stride=strides)


def copy_vectors(source: cute.Tensor, target: cute.Tensor) -> None:
    """A thread's elements of a tile from registers to shared memory, or back."""
    for i in range(ROWS):
        pair = [
            cute.make_tensor((t.iterator + offset).align(16), cute.make_layout(VECTOR))
            for t, offset in ((source, _offset(source, i)), (target, _offset(target, i)))
        ]
        cute.autovec_copy(*pair)


def _offset(vectors: cute.Tensor, i: int) -> int:
    return i * (VECTOR if cute.rank(vectors) == 1 else THREADS * VECTOR)


def part_of(item: Int32, along: tuple) -> tuple:
    """(matrix, first tile along M, along K) of part `item` of all."""
    across = along[0] * along[1]
    rest = item % across
    return item // across, rest // along[1], rest % along[1]


def steps_to(first: Int32, step: Int32, end: Int32) -> Int32:
    """How many of first, first + step, … come before `end`."""
    return (end - 1 - first) // step + 1


def number_of_scale(spec: cutlass.Constexpr, matrix: Int32) -> Int32:
    """Which of all scales a matrix has."""
    return Int32(0) if const_expr("whole" in (spec.plain, spec.turned)) else matrix


def no_columns(dtype) -> cute.Tensor:
    """What `larger_pairs` gathers maxima of a thread's columns in."""
    narrow = dtype is not Float32
    most = cute.make_rmem_tensor(VECTOR // (1 + narrow), Int32 if narrow else Float32)
    clear(most)
    return most


@cute.jit
def publish_columns(columns: cute.Tensor, most: cute.Tensor, scratch: cute.Tensor, place: tuple, dtype):
    """The maxima of a band of columns of which each thread has its own; dtype: x's. Synchronises."""
    matrix, first, end, thread = place
    word, lane = thread // LANES, thread % LANES
    found = halves(most, dtype) if const_expr(most.element_type is not Float32) else most
    for v in range_constexpr(VECTOR):
        other = cute.arch.shuffle_sync_bfly(found[v], offset=LANES)
        scratch[word // 2, lane * VECTOR + v] = cute.arch.fmax(found[v], other)
    cute.arch.sync_threads()
    if thread < TILE:
        if first + thread < end:
            amax = scratch[0, thread]
            for warp in range_constexpr(1, WARPS):
                amax = cute.arch.fmax(amax, scratch[warp, thread])
            raise_to(columns[matrix, 0, None].iterator + first + thread, amax)
    cute.arch.sync_threads()
