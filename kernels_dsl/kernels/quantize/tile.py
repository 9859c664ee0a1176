"""x and its transpose as fp8 in one read of x: a CTA takes a tile of 128 x 128 through its registers.

A thread has 8 neighbours in each of 8 rows. Scales of groups come from maxima over the 16 threads of a row,
over the 16 threads of a column, or over the CTA. The transpose goes through shared memory in words of 4 rows
of one column; an exclusive or keeps writes and reads free of bank conflicts.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kernels_dsl.blocks.hw.dsl import entry_name, transposed
from kernels_dsl.blocks.hw.fp8 import DTYPES, block_max, group_scale, reciprocal, widened
from kernels_dsl.config.quantize import (
    CTAS_PER_SM,
    PITCH,
    THREADS,
    TILE,
    VECTOR,
    WARPS,
    TileQuantization,
)

from .views import (
    LANES,
    ROWS,
    WORDS,
    Outputs,
    Site,
    TileDivisors,
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
    outputs_of,
    row_of_tile,
    site_of,
    store_vector,
    tile_divisors,
    whole_tile,
)

PARTS_AT_ONCE = 4
"""Loads of maxima that a thread has under way."""


class LineMaxima(NamedTuple):
    """Maxima of parts of lines that an earlier pass made, float32 (matrices, parts, lines); None if not
    wanted."""

    columns: cute.Tensor | None
    rows: cute.Tensor | None


class Scratch(NamedTuple):
    """Shared memory of a CTA."""

    maxima: cute.Tensor  # float32 (WARPS, TILE)
    tile: cute.Tensor | None  # Int32 (TILE * TILE / 4,): the transpose


def quantize_tile(
    x: cute.Tensor,
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    scale: Int64,
    stream,
    spec: cutlass.Constexpr[TileQuantization],
):
    """Launch one pass over x (…, M, K), by `spec` of kinds "given", "group" or "block".

    The tensors are those of `launch_tiles`. scale: the address of the one scale of "given", with which scales
    and turned_scales are None; otherwise 0.
    """
    outputs = outputs_of(values, scales, turned_values, turned_scales, scale, spec)
    launch_tiles(x, outputs, None, stream, spec)


def launch_tiles(
    x: cute.Tensor,
    outputs: Outputs,
    parts: cute.Tensor | None,
    stream,
    spec: TileQuantization,
    matrices: Int32 | None = None,
) -> None:
    """Launch one pass over the first `matrices` matrices of x, or all of them, by `spec`.

    x (…, M, K), up to four modes, K contiguous. Outputs have up to four modes, and are None where the spec
    has no such output. values (…, M, K) and turned_values (…, K, M), fp8, may be larger; their rows have
    whole 16 bytes, and are written to their ends. Scales, float32, are read if the spec says "given", one
    element, and written otherwise: "whole" one element, "matrix" (…, 1, 1), "lines", of the transpose alone,
    (…, K, 1), "group" (…, M, ceil(K / 128)) and (…, K, ceil(M / 128)), "block" (…, ceil(M / 128), ceil(K /
    128)) and its transpose. parts: the result of `amax_parts` of the same x, (L, P), for "lines" (L, P, K);
    for "whole" any L.
    """
    x, outputs = four_modes(x), outputs.with_four_modes()
    if matrices is None:
        matrices = x.shape[0] * x.shape[1]
    tiles = cute.ceil_div(x.shape[2], TILE) * cute.ceil_div(x.shape[3], TILE)
    quantize_tile_kernel(x, outputs, parts, tile_divisors(x), spec).launch(
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
    x: cute.Tensor,
    outputs: Outputs,
    parts: cute.Tensor | None,
    divisors: TileDivisors,
    spec: cutlass.Constexpr[TileQuantization],
):
    """Device side of `quantize_tile`.

    The kernel that made `parts` ended with the last tiles, so this one begins with them: L2 still has them.
    They may be read before that kernel has ended, because it waited for the kernels before it.
    """
    thread = cute.arch.thread_idx()[0]
    word, lane = thread // LANES, thread % LANES
    number = cute.arch.block_idx()[0]
    if const_expr(spec.of_parts):
        number = cute.arch.grid_dim()[0] - 1 - number
    site = site_of(number, divisors, word, lane)
    allocator = cutlass.memory.SmemAllocator()
    maxima = allocator.allocate_tensor(Float32, cute.make_layout((WARPS, TILE), stride=(TILE, 1)), 16)
    elements = cute.make_rmem_tensor(ROWS * VECTOR, x.element_type)
    if const_expr(spec.early and not spec.of_parts):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    if const_expr(spec.lets_start):
        cute.arch.griddepcontrol_launch_dependents()
    load_tile(x, site, elements, spec.key_order)
    if const_expr(spec.early and spec.of_parts):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

    scale = Float32(0.0)
    if const_expr("block" in (spec.plain, spec.turned)):
        scale = group_scale(block_max(maximum(elements), maxima[0, None], thread, WARPS), spec.format)
    if const_expr("whole" in (spec.plain, spec.turned)):
        everything = cute.make_layout((1, cute.size(parts)), stride=(0, 1))
        parts = cute.make_tensor(parts.iterator, everything)
        scale = scale_of_parts(parts, Int32(0), maxima[0, None], thread, spec.format)
    if const_expr("matrix" in (spec.plain, spec.turned)):
        number = site.matrix.outer * x.shape[1] + site.matrix.inner
        scale = scale_of_parts(parts, number, maxima[0, None], thread, spec.format)
    tile = None
    if const_expr(spec.turned is not None):
        tile = allocator.allocate_tensor(Int32, cute.make_layout(TILE * TILE // 4), 16)
    convert_tile(spec, x, outputs, elements, scale, Scratch(maxima, tile), LineMaxima(parts, None), site)


@cute.jit
def convert_tile(
    spec: cutlass.Constexpr[TileQuantization],
    x: cute.Tensor,
    outputs: Outputs,
    elements: cute.Tensor,
    scale: Float32,
    scratch: Scratch,
    lines: LineMaxima,
    site: Site,
):
    """Makes scales and fp8 values of a tile that lies in registers. `scale`: of the whole tile, if it has
    one."""
    if const_expr(spec.turned in ("group", "lines")):
        # Before the rows' work, so that nobody waits for it.
        column_scales(spec, x, outputs.turned_scales, elements, scratch.maxima, lines.columns, site)
    if const_expr(spec.plain is not None):
        factors = row_factors(spec, x, outputs.scales, elements, scale, lines.rows, site)
        if const_expr(spec.plain == spec.turned and spec.plain not in ("group", "lines")):
            elements = converted(spec, elements, factors)  # both outputs have the same numbers
        store_rows(spec, x, outputs.values, elements, factors, site)
    if const_expr(spec.turned is not None):
        factors = column_factors(spec, outputs.turned_scales, scale, scratch.maxima, site)
        store_turned(spec, x, outputs.turned_values, elements, factors, scratch.tile, site)


def converted(spec: TileQuantization, elements: cute.Tensor, factors: cute.Tensor) -> cute.Tensor:
    """A thread's elements of a tile as fp8. factors: 1 / scale of each row (ROWS,)."""
    packed = cute.make_rmem_tensor(ROWS * VECTOR, DTYPES[spec.format])
    for i in range(ROWS):
        row = cute.make_tensor(packed.iterator + i * VECTOR, cute.make_layout(VECTOR))
        convert(elements, i * VECTOR, factors[i], row)
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
def store_scale(
    kind: cutlass.Constexpr, scales: cute.Tensor, scale: Float32, block: tuple[Int32, Int32], site: Site
):
    """Stores the scale of this tile, number `block`, by one thread; a matrix's by that of its first tile."""
    outer, inner = site.matrix
    if (site.word == 0) & (site.lane == 0):
        if const_expr(kind == "block"):
            scales[outer, inner, block[0], block[1]] = scale
        elif (block[0] == 0) & (block[1] == 0):
            if const_expr(kind == "matrix"):
                scales[outer, inner, 0, 0] = scale
            elif (outer == 0) & (inner == 0):
                scales[0, 0, 0, 0] = scale


@cute.jit
def row_factors(
    spec: cutlass.Constexpr[TileQuantization],
    x: cute.Tensor,
    scales: cute.Tensor,
    elements: cute.Tensor,
    scale: Float32,
    rows: cute.Tensor | None,
    site: Site,
) -> cute.Tensor:
    """1 / scale of each of this thread's rows (ROWS,); stores the scales that are not given."""
    (outer, inner), lane = site.matrix, site.lane
    factors = cute.make_rmem_tensor(ROWS, Float32)
    if const_expr(spec.plain in ("block", "matrix", "whole")):
        store_scale(spec.plain, scales, scale, (site.row // TILE, site.column // TILE), site)
        factors.fill(reciprocal(scale))
    elif const_expr(spec.plain == "given"):
        factors.fill(reciprocal(scales[0, 0, 0, 0]))
    else:
        # A lane has one row, number lane // 2, so that it makes one scale instead of eight.
        row = site.row + row_of_tile(site.word, lane // 2, spec.key_order)
        largest = Float32(0.0)
        if const_expr(spec.plain == "lines"):
            matrix, line = outer * x.shape[1] + inner, cutlass.min(row, x.shape[2] - 1)
            for p in cutlass.range(rows.shape[1]):
                largest = cute.arch.fmax(largest, rows[matrix, p, line])
        else:
            largest = maximum_of_row(maxima_of_rows(elements), lane)
        mine = group_scale(largest, spec.format)
        group = site.column // TILE
        if (lane % 2 == 0) & (row < x.shape[2]):
            if const_expr(spec.plain == "group"):
                scales[outer, inner, row, group] = mine
            elif group == 0:
                scales[outer, inner, row, 0] = mine
        factor = reciprocal(mine)
        first = cute.arch.lane_idx() // LANES * LANES
        for i in range_constexpr(ROWS):
            factors[i] = cute.arch.shuffle_sync(factor, first + 2 * i)
    return factors


@cute.jit
def column_scales(
    spec: cutlass.Constexpr[TileQuantization],
    x: cute.Tensor,
    scales: cute.Tensor,
    elements: cute.Tensor,
    maxima: cute.Tensor,
    parts: cute.Tensor | None,
    site: Site,
):
    """Stores a scale for each column of the tile, and 1 / scale to maxima[0, :]. The caller synchronises."""
    (outer, inner), word, lane = site.matrix, site.word, site.lane
    thread = site.thread
    if const_expr(spec.turned == "group"):
        amax = maxima_of_columns(elements)
        for v in range_constexpr(VECTOR):
            # The other row of the warp; the other warps through shared memory.
            other = cute.arch.shuffle_sync_bfly(amax[v], offset=LANES)
            maxima[word // 2, lane * VECTOR + v] = cute.arch.fmax(amax[v], other)
    else:
        column, first = thread % TILE, thread // TILE
        matrix, line = outer * x.shape[1] + inner, cutlass.min(site.column + column, x.shape[3] - 1)
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
        if site.column + thread < x.shape[3]:
            if const_expr(spec.turned == "group"):
                scales[outer, inner, site.column + thread, site.row // TILE] = own
            elif site.row == 0:
                scales[outer, inner, site.column + thread, 0] = own
        maxima[0, thread] = reciprocal(own)


@cute.jit
def column_factors(
    spec: cutlass.Constexpr[TileQuantization],
    scales: cute.Tensor,
    scale: Float32,
    maxima: cute.Tensor,
    site: Site,
) -> cute.Tensor:
    """1 / scale of each of this thread's columns (VECTOR,); stores a scale of all of them."""
    factors = cute.make_rmem_tensor(VECTOR, Float32)
    factors.fill(1.0)
    if const_expr(spec.turned in ("block", "matrix", "whole")):
        store_scale(spec.turned, scales, scale, (site.column // TILE, site.row // TILE), site)
        factors.fill(reciprocal(scale))
    elif const_expr(spec.turned == "given"):
        factors.fill(reciprocal(scales[0, 0, 0, 0]))
    elif const_expr(spec.turned in ("group", "lines")):
        cute.arch.sync_threads()
        own = aligned(maxima.iterator + site.lane * VECTOR, 16)
        cute.autovec_copy(cute.make_tensor(own, cute.make_layout(VECTOR)), factors)
    return factors


@cute.jit
def store_rows(
    spec: cutlass.Constexpr[TileQuantization],
    x: cute.Tensor,
    values: cute.Tensor,
    elements: cute.Tensor,
    factors: cute.Tensor,
    site: Site,
):
    """Stores this thread's vectors of fp8. A vector that begins in a row ends in it or in its padding."""
    if whole_tile(x, site):
        store_some_rows(spec, x, values, elements, factors, site, True)
    else:
        store_some_rows(spec, x, values, elements, factors, site, False)


@cute.jit
def store_some_rows(
    spec: cutlass.Constexpr[TileQuantization],
    x: cute.Tensor,
    values: cute.Tensor,
    elements: cute.Tensor,
    factors: cute.Tensor,
    site: Site,
    whole: cutlass.Constexpr,
):
    """`store_rows`; whole: the tile lies within x."""
    row, column = site.row + row_of_tile(site.word, 0, spec.key_order), site.column + site.lane * VECTOR
    first = aligned(address(values, site.matrix, row, column), VECTOR)
    packed = cute.make_rmem_tensor(VECTOR, DTYPES[spec.format])
    for i in range_constexpr(ROWS):
        if const_expr(elements.element_type is packed.element_type):
            packed = cute.make_tensor(elements.iterator + i * VECTOR, cute.make_layout(VECTOR))
        else:
            convert(elements, i * VECTOR, factors[i], packed)
        step = row_of_tile(0, i, spec.key_order)
        if const_expr(whole):
            store_vector(packed, further(first, values, step))
        elif (row + step < x.shape[2]) & (column < x.shape[3]):
            store_vector(packed, further(first, values, step))


@cute.jit
def store_turned(
    spec: cutlass.Constexpr[TileQuantization],
    x: cute.Tensor,
    values: cute.Tensor,
    elements: cute.Tensor,
    factors: cute.Tensor | None,
    tile: cute.Tensor,
    site: Site,
):
    """Stores the tile's transpose: words of four rows of a column go to shared memory, and from there to rows
    of 128 bytes. factors: of columns (VECTOR,); None if elements are fp8 already.

    Word w of column k lies at k * 32 + (w ^ 2 * (k // 8)).
    """
    word, lane = site.word, site.lane
    for half in range_constexpr(ROWS // 4):
        words = words_of_columns(spec, elements, half * 4, factors)
        for v in range_constexpr(VECTOR):
            index = (lane * VECTOR + v) * (TILE // 4) + ((word + half * WORDS) ^ (lane * 2))
            tile[index] = words[v]
    cute.arch.sync_threads()
    end = cute.ceil_div(x.shape[2], PITCH) * PITCH
    row, column = site.row + lane * VECTOR, site.column + word
    first = aligned(address(values, site.matrix, column, row), VECTOR)
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
    spec: TileQuantization, elements: cute.Tensor, first: int, factors: cute.Tensor | None
) -> list[Int32]:
    """Four rows of each column, from number `first` on, as fp8 in a word."""
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
