"""x and its transpose as fp8 in one read of x: a CTA takes a tile of 128 x 128 through its registers.

A thread has 8 neighbours in each of 8 rows. Scales of groups come from maxima over the 16 threads of a row,
over the 16 threads of a column, or over the CTA. The transpose goes through shared memory in words of 4 rows
of one column; an exclusive or keeps both its writes and its reads free of bank conflicts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.entry_name import entry_name
from kernels_dsl.blocks.fp8 import DTYPES, block_max, finite_magnitude, group_scale, reciprocal
from kernels_dsl.config.quantize import PITCH, THREADS, TILE, VECTOR

from .views import LANES, ROWS, WORDS, address, four_modes, load_tile, maximum, row_of_tile, tile_place

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
    maxima = allocator.allocate_tensor(Float32, cute.make_layout((TILE, WARPS)), 16)
    elements = cute.make_rmem_tensor(ROWS * VECTOR, Float32)
    load_tile(x, at, origin, (word, lane * VECTOR), elements, spec.key_order)

    place = (at, origin, word, lane)
    block = Float32(0.0)
    if const_expr("block" in (spec.plain, spec.turned)):
        block = group_scale(block_max(maximum(elements), maxima[None, 0], thread, WARPS), spec.format)
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
    for i in range_constexpr(ROWS):
        row = origin[0] + row_of_tile(word, i, spec.key_order)
        if const_expr(spec.plain == "given"):
            factors[i] = reciprocal(scales[at[0], at[1], cutlass.min(row, x.shape[2] - 1), 0])
        elif const_expr(spec.plain == "group"):
            amax = Float32(0.0)
            for v in range_constexpr(VECTOR):
                amax = cute.arch.fmax(amax, finite_magnitude(elements[i * VECTOR + v]))
            scale = group_scale(cute.arch.warp_reduction_max(amax, threads_in_group=LANES), spec.format)
            if (lane == 0) & (row < x.shape[2]):
                scales[at[0], at[1], row, origin[1] // TILE] = scale
            factors[i] = reciprocal(scale)
    return factors


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
    if const_expr(spec.turned == "group"):
        for v in range_constexpr(VECTOR):
            amax = Float32(0.0)
            for i in range_constexpr(ROWS):
                amax = cute.arch.fmax(amax, finite_magnitude(elements[i * VECTOR + v]))
            # The other row of the warp, then the other warps.
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=LANES))
            maxima[lane * VECTOR + v, word // 2] = amax
        cute.arch.sync_threads()
    for v in range_constexpr(VECTOR):
        column = origin[1] + lane * VECTOR + v
        if const_expr(spec.turned == "given"):
            factors[v] = reciprocal(scales[at[0], at[1], cutlass.min(column, x.shape[3] - 1), 0])
        elif const_expr(spec.turned == "group"):
            amax = Float32(0.0)
            for warp in range_constexpr(WARPS):
                amax = cute.arch.fmax(amax, maxima[lane * VECTOR + v, warp])
            scale = group_scale(amax, spec.format)
            if (word == 0) & (column < x.shape[3]):
                scales[at[0], at[1], column, origin[0] // TILE] = scale
            factors[v] = reciprocal(scale)
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
