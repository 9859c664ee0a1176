"""x and its transpose as fp8 in one read of x: a CTA takes a tile of 128 x 128 through its registers.

A thread has 8 neighbours in each of 8 rows. Scales of groups come from maxima over the 16 threads of a row,
over the 16 threads of a column, or over the CTA. The transpose goes through shared memory in words of 4 rows
of one column; an exclusive or keeps both its writes and its reads free of bank conflicts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kernels_dsl.blocks.hw.dsl import entry_name, transposed
from kernels_dsl.blocks.hw.fp8 import DTYPES, block_max, group_scale, reciprocal, widened
from kernels_dsl.config.quantize import CTAS_PER_SM, PITCH, THREADS, TILE, VECTOR, WARPS

from .views import (
    LANES,
    ROWS,
    WORDS,
    address,
    aligned,
    convert,
    four_modes,
    further,
    load_tile,
    maxima_of_columns,
    maxima_of_rows,
    maximum,
    maximum_of_row,
    row_of_tile,
    scale_of_all,
    store_vector,
    tile_divisors,
    tile_place,
    whole_tile,
)

PARTS_AT_ONCE = 4
"""Loads of maxima that a thread has under way."""


def quantize_tile(
    x: cute.Tensor,
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    scale: Int64,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch one pass over x (…, M, K), by `spec`, a `TileQuantization` of kinds "given", "group" or "block".

    The tensors are those of `launch_tiles`. scale: the address of the one scale of "given", with which there
    are no scales' tensors; otherwise 0.
    """
    if "given" in (spec.plain, spec.turned):
        scales, turned_scales = scale_of_all(scale, spec)
    launch_tiles((x, values, scales, turned_values, turned_scales), None, stream, spec)


def launch_tiles(
    tensors: tuple,
    parts: cute.Tensor | None,
    stream,
    spec: cutlass.Constexpr,
    matrices: Int32 | None = None,
) -> None:
    """One pass over the first `matrices` matrices of x, None: all; by `spec`, a `TileQuantization`.

    tensors: x (…, M, K), values and scales, those of the transpose, all of up to four modes, K contiguous;
    None where the spec has no such output. values (…, M, K) and turned_values (…, K, M), fp8: at least so
    large, in rows of whole 16 bytes, which are written to their ends. Scales, float32, are read where the
    spec says "given", one element, else written: "whole" one element, "matrix" (…, 1, 1), "lines", of the
    transpose alone, (…, K, 1), "group" (…, M, ceil(K / 128)) and (…, K, ceil(M / 128)), "block"
    (…, ceil(M / 128), ceil(K / 128)) and its transpose. parts: what `amax_parts` made of the same x, (L, P),
    for "lines" (L, P, K); for "whole" any L.
    """
    x, *outputs = (None if t is None else four_modes(t) for t in tensors)
    if matrices is None:
        matrices = x.shape[0] * x.shape[1]
    tiles = cute.ceil_div(x.shape[2], TILE) * cute.ceil_div(x.shape[3], TILE)
    quantize_tile_kernel(x, tuple(outputs), parts, tile_divisors(x), spec).launch(
        grid=[tiles * matrices, 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=CTAS_PER_SM[x.element_type.width // 8],
        preferred_smem_carveout=100,  # in percent; without it the compiler asks a GPU, and there may be none
        stream=stream,
        use_pdl=spec.early,
    )


@entry_name("quantize_tile")
@cute.kernel
def quantize_tile_kernel(
    x: cute.Tensor, outputs: tuple, parts: cute.Tensor, divisors: tuple, spec: cutlass.Constexpr
):
    """Device side of `quantize_tile`.

    The kernel that made `parts` ended with the last tiles, so this one begins with those: L2 still has them.
    They may be read before that kernel has ended, since it let this one start after the kernels before it.
    """
    thread = cute.arch.thread_idx()[0]
    word, lane = thread // LANES, thread % LANES
    number = cute.arch.block_idx()[0]
    if const_expr(spec.of_parts):
        number = cute.arch.grid_dim()[0] - 1 - number
    at, origin = tile_place(number, divisors)
    allocator = cutlass.memory.SmemAllocator()
    maxima = allocator.allocate_tensor(Float32, cute.make_layout((WARPS, TILE), stride=(TILE, 1)), 16)
    elements = cute.make_rmem_tensor(ROWS * VECTOR, x.element_type)
    if const_expr(spec.early and not spec.of_parts):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    if const_expr(spec.lets_start):
        cute.arch.griddepcontrol_launch_dependents()
    load_tile(x, at, origin, (word, lane * VECTOR), elements, spec.key_order)
    if const_expr(spec.early and spec.of_parts):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

    place = (at, origin, word, lane)
    shared = Float32(0.0)
    if const_expr("block" in (spec.plain, spec.turned)):
        shared = group_scale(block_max(maximum(elements), maxima[0, None], thread, WARPS), spec.format)
    if const_expr("whole" in (spec.plain, spec.turned)):
        everything = cute.make_layout((1, cute.size(parts)), stride=(0, 1))
        parts = cute.make_tensor(parts.iterator, everything)
        shared = scale_of_parts(parts, Int32(0), maxima[0, None], thread, spec.format)
    if const_expr("matrix" in (spec.plain, spec.turned)):
        shared = scale_of_parts(parts, at[0] * x.shape[1] + at[1], maxima[0, None], thread, spec.format)
    tile = None
    if const_expr(spec.turned is not None):
        tile = allocator.allocate_tensor(Int32, cute.make_layout(TILE * TILE // 4), 16)
    convert_tile(spec, x, outputs, elements, (shared, maxima, tile), (parts, None), place)


@cute.jit
def convert_tile(
    spec: cutlass.Constexpr,
    x: cute.Tensor,
    outputs: tuple,
    elements: cute.Tensor,
    shared: tuple,
    maxima_of: tuple,
    place: tuple,
):
    """Scales and fp8 values of a tile that lies in registers. `shared`: the scale of all of it, if it has
    one, and shared memory for maxima of columns and for the transpose."""
    values, scales, turned_values, turned_scales = outputs
    scale, maxima, tile = shared
    parts, row_parts = maxima_of
    if const_expr(spec.turned in ("group", "lines")):
        # Before the rows' work, so that nobody waits for it.
        column_scales(spec, x, turned_scales, elements, (maxima, parts), place)
    if const_expr(spec.plain is not None):
        factors = row_factors(spec, x, scales, elements, (scale, row_parts), place)
        if const_expr(spec.plain == spec.turned and spec.plain not in ("group", "lines")):
            elements = converted(spec, elements, factors)  # both outputs have the same numbers
        store_rows(spec, x, values, elements, factors, place)
    if const_expr(spec.turned is not None):
        factors = column_factors(spec, turned_scales, (scale, maxima), place)
        store_turned(spec, x, turned_values, elements, (factors, tile), place)


def converted(spec: cutlass.Constexpr, elements: cute.Tensor, factors: cute.Tensor) -> cute.Tensor:
    """A thread's elements of a tile as fp8. factors: 1 / scale of each row (ROWS,)."""
    packed = cute.make_rmem_tensor(ROWS * VECTOR, DTYPES[spec.format])
    for i in range(ROWS):
        convert(
            elements,
            i * VECTOR,
            factors[i],
            cute.make_tensor(packed.iterator + i * VECTOR, cute.make_layout(VECTOR)),
        )
    return packed


@cute.jit
def scale_of_parts(
    parts: cute.Tensor, matrix: Int32, scratch: cute.Tensor, thread: Int32, format: cutlass.Constexpr
) -> Float32:
    """The scale of a matrix from the maxima of its parts."""
    last = parts.shape[1] - 1
    amax = Float32(0.0)
    for first in cutlass.range(thread, parts.shape[1], THREADS * PARTS_AT_ONCE, unroll=1):
        for p in range_constexpr(PARTS_AT_ONCE):
            amax = cute.arch.fmax(amax, parts[matrix, cutlass.min(first + p * THREADS, last)])
    return group_scale(block_max(amax, scratch, thread, WARPS), format)


@cute.jit
def store_scale(kind: cutlass.Constexpr, scales: cute.Tensor, scale: Float32, block: tuple, place: tuple):
    """One thread stores the scale of this tile, number `block`; of a matrix, that of its first tile does."""
    at, _, word, lane = place
    if (word == 0) & (lane == 0):
        if const_expr(kind == "block"):
            scales[at[0], at[1], block[0], block[1]] = scale
        elif (block[0] == 0) & (block[1] == 0):
            if const_expr(kind == "matrix"):
                scales[at[0], at[1], 0, 0] = scale
            elif (at[0] == 0) & (at[1] == 0):
                scales[0, 0, 0, 0] = scale


@cute.jit
def row_factors(
    spec: cutlass.Constexpr,
    x: cute.Tensor,
    scales: cute.Tensor,
    elements: cute.Tensor,
    shared: tuple,
    place: tuple,
) -> cute.Tensor:
    """1 / scale of each of this thread's rows (ROWS,); stores the scales that are not given."""
    at, origin, word, lane = place
    scale, row_parts = shared
    factors = cute.make_rmem_tensor(ROWS, Float32)
    if const_expr(spec.plain in ("block", "matrix", "whole")):
        store_scale(spec.plain, scales, scale, (origin[0] // TILE, origin[1] // TILE), place)
        factors.fill(reciprocal(scale))
    elif const_expr(spec.plain == "given"):
        factors.fill(reciprocal(scales[0, 0, 0, 0]))
    else:
        # A lane has one row, number lane // 2, so that it makes one scale instead of eight.
        row = origin[0] + row_of_tile(word, lane // 2, spec.key_order)
        largest = Float32(0.0)
        if const_expr(spec.plain == "lines"):
            matrix, line = at[0] * x.shape[1] + at[1], cutlass.min(row, x.shape[2] - 1)
            for p in cutlass.range(row_parts.shape[1]):
                largest = cute.arch.fmax(largest, row_parts[matrix, p, line])
        else:
            largest = maximum_of_row(maxima_of_rows(elements), lane)
        mine = group_scale(largest, spec.format)
        group = origin[1] // TILE
        if (lane % 2 == 0) & (row < x.shape[2]):
            if const_expr(spec.plain == "group"):
                scales[at[0], at[1], row, group] = mine
            elif group == 0:
                scales[at[0], at[1], row, 0] = mine
        factor = reciprocal(mine)
        first = cute.arch.lane_idx() // LANES * LANES
        for i in range_constexpr(ROWS):
            factors[i] = cute.arch.shuffle_sync(factor, first + 2 * i)
    return factors


@cute.jit
def column_scales(
    spec: cutlass.Constexpr,
    x: cute.Tensor,
    scales: cute.Tensor,
    elements: cute.Tensor,
    shared: tuple,
    place: tuple,
):
    """A scale for each column of the tile, stored; maxima[0, :] = 1 / scale, for whom synchronises next."""
    at, origin, word, lane = place
    maxima, parts = shared
    thread = word * LANES + lane
    if const_expr(spec.turned == "group"):
        amax = maxima_of_columns(elements)
        for v in range_constexpr(VECTOR):
            # The other row of the warp; the other warps through shared memory.
            other = cute.arch.shuffle_sync_bfly(amax[v], offset=LANES)
            maxima[word // 2, lane * VECTOR + v] = cute.arch.fmax(amax[v], other)
    else:
        column, first = thread % TILE, thread // TILE
        matrix, line = at[0] * x.shape[1] + at[1], cutlass.min(origin[1] + column, x.shape[3] - 1)
        found, last = Float32(0.0), parts.shape[1] - 1
        step = cutlass.const_expr(THREADS // TILE)
        for p in cutlass.range(first, parts.shape[1], step * PARTS_AT_ONCE, unroll=1):
            for n in range_constexpr(PARTS_AT_ONCE):
                found = cute.arch.fmax(found, parts[matrix, cutlass.min(p + n * step, last), line])
        maxima[first, column] = found
    cute.arch.sync_threads()
    if thread < TILE:
        largest = maxima[0, thread]
        for warp in range_constexpr(1, WARPS if spec.turned == "group" else THREADS // TILE):
            largest = cute.arch.fmax(largest, maxima[warp, thread])
        own = group_scale(largest, spec.format)
        if origin[1] + thread < x.shape[3]:
            if const_expr(spec.turned == "group"):
                scales[at[0], at[1], origin[1] + thread, origin[0] // TILE] = own
            elif origin[0] == 0:
                scales[at[0], at[1], origin[1] + thread, 0] = own
        maxima[0, thread] = reciprocal(own)


@cute.jit
def column_factors(spec: cutlass.Constexpr, scales: cute.Tensor, shared: tuple, place: tuple) -> cute.Tensor:
    """1 / scale of each of this thread's columns (VECTOR,); stores a scale of all of them."""
    _, origin, _, lane = place
    scale, maxima = shared
    factors = cute.make_rmem_tensor(VECTOR, Float32)
    factors.fill(1.0)
    if const_expr(spec.turned in ("block", "matrix", "whole")):
        store_scale(spec.turned, scales, scale, (origin[1] // TILE, origin[0] // TILE), place)
        factors.fill(reciprocal(scale))
    elif const_expr(spec.turned == "given"):
        factors.fill(reciprocal(scales[0, 0, 0, 0]))
    elif const_expr(spec.turned in ("group", "lines")):
        cute.arch.sync_threads()
        cute.autovec_copy(
            cute.make_tensor(aligned(maxima.iterator + lane * VECTOR, 16), cute.make_layout(VECTOR)), factors
        )
    return factors


@cute.jit
def store_rows(
    spec: cutlass.Constexpr,
    x: cute.Tensor,
    values: cute.Tensor,
    elements: cute.Tensor,
    factors: cute.Tensor,
    place: tuple,
):
    """This thread's vectors of fp8. One that begins in a row ends in it or in the pitch behind it."""
    if whole_tile(x, place[1]):
        store_some_rows(spec, x, values, elements, factors, place, True)
    else:
        store_some_rows(spec, x, values, elements, factors, place, False)


@cute.jit
def store_some_rows(
    spec: cutlass.Constexpr,
    x: cute.Tensor,
    values: cute.Tensor,
    elements: cute.Tensor,
    factors: cute.Tensor,
    place: tuple,
    all_of_them: cutlass.Constexpr,
):
    """`store_rows`; all_of_them: the tile is whole."""
    at, origin, word, lane = place
    row, column = origin[0] + row_of_tile(word, 0, spec.key_order), origin[1] + lane * VECTOR
    first = aligned(address(values, at, row, column), VECTOR)
    packed = cute.make_rmem_tensor(VECTOR, DTYPES[spec.format])
    for i in range_constexpr(ROWS):
        if const_expr(elements.element_type is packed.element_type):
            packed = cute.make_tensor(elements.iterator + i * VECTOR, cute.make_layout(VECTOR))
        else:
            convert(elements, i * VECTOR, factors[i], packed)
        step = row_of_tile(0, i, spec.key_order)
        if const_expr(all_of_them):
            store_vector(packed, further(first, values, step))
        elif (row + step < x.shape[2]) & (column < x.shape[3]):
            store_vector(packed, further(first, values, step))


@cute.jit
def store_turned(
    spec: cutlass.Constexpr,
    x: cute.Tensor,
    values: cute.Tensor,
    elements: cute.Tensor,
    shared: tuple,
    place: tuple,
):
    """The tile's transpose: words of four rows of a column to shared memory, from there rows of 128 bytes.

    Word w of column k lies at k * 32 + (w ^ 2 * (k // 8)).
    """
    at, origin, word, lane = place
    factors, tile = shared
    for half in range_constexpr(ROWS // 4):
        words = words_of_columns(spec, elements, half * 4, factors)
        for v in range_constexpr(VECTOR):
            index = (lane * VECTOR + v) * (TILE // 4) + ((word + half * WORDS) ^ (lane * 2))
            tile[index] = words[v]
    cute.arch.sync_threads()
    end = cute.ceil_div(x.shape[2], PITCH) * PITCH
    row, column = origin[0] + lane * VECTOR, origin[1] + word
    first = aligned(address(values, at, column, row), VECTOR)
    words = tile.iterator + word * (TILE // 4)
    pair = (lane * 2) ^ (word // VECTOR * 2)
    moved = cute.make_rmem_tensor(2, Int32)
    bytes_of = cute.recast_tensor(moved, DTYPES[spec.format])
    for n in range_constexpr(TILE // WORDS):
        step = const_expr(n * WORDS)
        source = aligned(words + step * (TILE // 4) + (pair ^ (step // VECTOR * 2)), VECTOR)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), moved)
        if (column + step < x.shape[3]) & (row < end):
            store_vector(bytes_of, further(first, values, step))


def words_of_columns(
    spec: cutlass.Constexpr, elements: cute.Tensor, first: int, factors: cute.Tensor
) -> list[Int32]:
    """Each column's four rows from number `first` on, as fp8."""
    if elements.element_type is DTYPES[spec.format]:
        rows = cute.recast_tensor(elements, Int32)
        words = [[rows[(first + e) * (VECTOR // 4) + n] for e in range(4)] for n in range(VECTOR // 4)]
        return [column for four in words for column in transposed(four)]
    floats, packed = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, DTYPES[spec.format])
    found = []
    for v in range(VECTOR):
        for e in range(4):
            floats[e] = widened(elements, (first + e) * VECTOR + v) * factors[v]
        packed.store(floats.load().to(packed.element_type))
        found.append(cute.recast_tensor(packed, Int32)[0])
    return found
