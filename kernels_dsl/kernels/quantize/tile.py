"""x and its transpose as fp8 in one read of x: a CTA takes a tile of 128 x 128 through its registers.

A thread has 8 neighbours in each of 8 rows. Scales of groups come from maxima over the 16 threads of a row,
over the 16 threads of a column, or over the CTA. The transpose goes through shared memory in words of 4 rows
of one column; an exclusive or keeps both its writes and its reads free of bank conflicts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.entry_name import entry_name
from kernels_dsl.blocks.fp8 import DTYPES, block_max, choose, group_scale, largest_finite, reciprocal
from kernels_dsl.config.quantize import PITCH, THREADS, TILE, VECTOR

from .views import (
    LANES,
    ROWS,
    WORDS,
    address,
    by_columns,
    by_rows,
    four_modes,
    load_tile,
    maximum,
    row_of_tile,
    tile_place,
)

WARPS = THREADS // 32


def quantize_tile(
    x: cute.Tensor,
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch one pass over x (…, M, K), all of up to four modes, K contiguous.

    values (…, M, K) and turned_values (…, K, M), fp8: at least so large, in rows of whole 16 bytes, which are
    written to their ends. Scales, float32, are read where `spec` (a `TileQuantization`) says "given",
    (…, M, 1) and (…, K, 1), else written: "group" (…, M, ceil(K / 128)) and (…, K, ceil(M / 128)), "block"
    (…, ceil(M / 128), ceil(K / 128)) and its transpose.
    """
    x = four_modes(x)
    outputs = tuple(
        None if t is None else four_modes(t) for t in (values, scales, turned_values, turned_scales)
    )
    tiles = cute.ceil_div(x.shape[2], TILE) * cute.ceil_div(x.shape[3], TILE)
    quantize_tile_kernel(x, outputs, spec).launch(
        grid=[tiles * x.shape[0] * x.shape[1], 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@entry_name("quantize_tile")
@cute.kernel
def quantize_tile_kernel(x: cute.Tensor, outputs: tuple, spec: cutlass.Constexpr):
    """Device side of `quantize_tile`."""
    values, scales, turned_values, turned_scales = outputs
    thread = cute.arch.thread_idx()[0]
    word, lane = thread // LANES, thread % LANES
    at, origin = tile_place(cute.arch.block_idx()[0], x)
    allocator = cutlass.memory.SmemAllocator()
    maxima = allocator.allocate_tensor(Float32, cute.make_layout((WARPS, TILE), stride=(TILE, 1)), 16)
    elements = cute.make_rmem_tensor(ROWS * VECTOR, Float32)
    load_tile(x, at, origin, (word, lane * VECTOR), elements, spec.key_order)

    place = (at, origin, word, lane)
    block = Float32(0.0)
    if const_expr("block" in (spec.plain, spec.turned)):
        block = group_scale(block_max(maximum(elements), maxima[0, None], thread, WARPS), spec.format)
    if const_expr(spec.plain is not None):
        factors = row_factors(spec, x, scales, elements, block, place)
        store_rows(spec, x, values, elements, factors, place)
    if const_expr(spec.turned is not None):
        factors = column_factors(spec, x, turned_scales, elements, (block, maxima), place)
        tile = allocator.allocate_tensor(Int32, cute.make_layout(TILE * TILE // 4), 16)
        store_turned(spec, x, turned_values, elements, (factors, tile), place)


@cute.jit
def row_factors(
    spec: cutlass.Constexpr,
    x: cute.Tensor,
    scales: cute.Tensor,
    elements: cute.Tensor,
    block: Float32,
    place: tuple,
) -> cute.Tensor:
    """1 / scale of each of this thread's rows (ROWS,); stores the scales that are not given."""
    at, origin, word, lane = place
    factors = cute.make_rmem_tensor(ROWS, Float32)
    if const_expr(spec.plain == "block"):
        if (word == 0) & (lane == 0):
            scales[at[0], at[1], origin[0] // TILE, origin[1] // TILE] = block
        factors.fill(reciprocal(block))
    elif const_expr(spec.plain == "given"):
        for i in range_constexpr(ROWS):
            row = cutlass.min(origin[0] + row_of_tile(word, i, spec.key_order), x.shape[2] - 1)
            factors[i] = reciprocal(scales[at[0], at[1], row, 0])
    else:
        amax = cute.make_rmem_tensor(ROWS, Float32)
        largest_finite(by_rows(elements), amax)
        # A lane ends up with one row, number lane // 2, so that it makes one scale instead of eight.
        mine = group_scale(maximum_of_row(amax, lane), spec.format)
        row = origin[0] + row_of_tile(word, lane // 2, spec.key_order)
        if (lane % 2 == 0) & (row < x.shape[2]):
            scales[at[0], at[1], row, origin[1] // TILE] = mine
        factor = reciprocal(mine)
        first = cute.arch.lane_idx() // LANES * LANES
        for i in range_constexpr(ROWS):
            factors[i] = cute.arch.shuffle_sync(factor, first + 2 * i)
    return factors


def maximum_of_row(amax: cute.Tensor, lane: Int32) -> Float32:
    """The maximum of amax[lane // 2] over the LANES neighbouring lanes; amax: (ROWS,), one for each row.

    Each exchange halves the rows that a lane has to do with: eight shuffles, not four for each row.
    """
    values = [amax[i] for i in range(ROWS)]
    for offset in (8, 4, 2):
        upper = (lane & offset) != 0
        half = len(values) // 2
        keep = [choose(upper, values[half + i], values[i]) for i in range(half)]
        give = [choose(upper, values[i], values[half + i]) for i in range(half)]
        values = [
            cute.arch.fmax(k, cute.arch.shuffle_sync_bfly(g, offset=offset)) for k, g in zip(keep, give)
        ]
    return cute.arch.fmax(values[0], cute.arch.shuffle_sync_bfly(values[0], offset=1))


@cute.jit
def column_factors(
    spec: cutlass.Constexpr,
    x: cute.Tensor,
    scales: cute.Tensor,
    elements: cute.Tensor,
    shared: tuple,
    place: tuple,
) -> cute.Tensor:
    """1 / scale of each of this thread's columns (VECTOR,); stores the scales that are not given."""
    at, origin, word, lane = place
    block, maxima = shared
    factors = cute.make_rmem_tensor(VECTOR, Float32)
    factors.fill(1.0)
    if const_expr(spec.turned == "block"):
        if (word == 0) & (lane == 0):
            scales[at[0], at[1], origin[1] // TILE, origin[0] // TILE] = block
        factors.fill(reciprocal(block))
    elif const_expr(spec.turned == "given"):
        for v in range_constexpr(VECTOR):
            column = cutlass.min(origin[1] + lane * VECTOR + v, x.shape[3] - 1)
            factors[v] = reciprocal(scales[at[0], at[1], column, 0])
    elif const_expr(spec.turned == "group"):
        amax = cute.make_rmem_tensor(VECTOR, Float32)
        largest_finite(by_columns(elements), amax)
        for v in range_constexpr(VECTOR):
            # The other row of the warp; the other warps through shared memory.
            other = cute.arch.shuffle_sync_bfly(amax[v], offset=LANES)
            maxima[word // 2, lane * VECTOR + v] = cute.arch.fmax(amax[v], other)
        cute.arch.sync_threads()
        thread = word * LANES + lane
        if thread < TILE:
            largest = maxima[0, thread]
            for warp in range_constexpr(1, WARPS):
                largest = cute.arch.fmax(largest, maxima[warp, thread])
            scale = group_scale(largest, spec.format)
            if origin[1] + thread < x.shape[3]:
                scales[at[0], at[1], origin[1] + thread, origin[0] // TILE] = scale
            maxima[0, thread] = reciprocal(scale)
        cute.arch.sync_threads()
        for v in range_constexpr(VECTOR):
            factors[v] = maxima[0, lane * VECTOR + v]
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
    at, origin, word, lane = place
    column = origin[1] + lane * VECTOR
    scaled = cute.make_rmem_tensor(VECTOR, Float32)
    packed = cute.make_rmem_tensor(VECTOR, DTYPES[spec.format])
    for i in range_constexpr(ROWS):
        row = origin[0] + row_of_tile(word, i, spec.key_order)
        for v in range_constexpr(VECTOR):
            scaled[v] = elements[i * VECTOR + v] * factors[i]
        packed.store(scaled.load().to(DTYPES[spec.format]))
        if (row < x.shape[2]) & (column < x.shape[3]):
            target = address(values, at, row, column).align(VECTOR)
            cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(VECTOR)))


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
    four = cute.make_rmem_tensor(4, Float32)
    packed = cute.make_rmem_tensor(4, DTYPES[spec.format])
    for half in range_constexpr(ROWS // 4):
        for v in range_constexpr(VECTOR):
            for e in range_constexpr(4):
                four[e] = elements[(half * 4 + e) * VECTOR + v] * factors[v]
            packed.store(four.load().to(DTYPES[spec.format]))
            index = (lane * VECTOR + v) * (TILE // 4) + ((word + half * WORDS) ^ (lane * 2))
            tile[index] = cute.recast_tensor(packed, Int32)[0]
    cute.arch.sync_threads()
    end = cute.ceil_div(x.shape[2], PITCH) * PITCH
    for step in range_constexpr(TILE * LANES // THREADS):
        column = word + step * WORDS
        pair = (lane * 2) ^ (column // VECTOR * 2)
        source = cute.make_tensor((tile.iterator + column * (TILE // 4) + pair).align(8), cute.make_layout(2))
        moved = cute.make_rmem_tensor(2, Int32)
        cute.autovec_copy(source, moved)
        row = origin[0] + lane * VECTOR
        if (origin[1] + column < x.shape[3]) & (row < end):
            target = address(values, at, origin[1] + column, row).align(VECTOR)
            bytes_of = cute.recast_tensor(moved, DTYPES[spec.format])
            cute.autovec_copy(bytes_of, cute.make_tensor(target, cute.make_layout(VECTOR)))
