"""Shared by the quantisation kernels: tensors as batches of matrices, loads of vectors and tiles, maxima."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from kernels_dsl.blocks.hw.dsl import choose
from kernels_dsl.blocks.hw.fp8 import halves, largest_finite, largest_finite_pairs, pair_max, widened
from kernels_dsl.config.quantize import MAXIMA_ALIGN, THREADS, TILE, VECTOR, TileQuantization

LANES = TILE // VECTOR
"""Threads that share a row of a tile."""
WORDS = THREADS // LANES
"""Groups of four rows that the threads of a CTA take at a time."""
ROWS = TILE * TILE // (THREADS * VECTOR)
"""Rows of a tile of which a thread has elements."""


class MatrixIndex(NamedTuple):
    """Indices of a matrix in the two leading modes of a tensor."""

    outer: Int32
    inner: Int32


class Site(NamedTuple):
    """A tile, and this thread's share of it: VECTOR columns of ROWS rows."""

    matrix: MatrixIndex
    row: Int32  # the tile's first
    column: Int32
    word: Int32  # the thread's group of rows
    lane: Int32  # the thread's vector in a row

    @property
    def thread(self) -> Int32:
        """Number of the thread in its CTA."""
        return self.word * LANES + self.lane


class Outputs(NamedTuple):
    """Results of quantising a tensor (L1, L2, M, K) and its transpose; None for those that are not wanted."""

    values: cute.Tensor | None  # fp8 (L1, L2, M, K)
    scales: cute.Tensor | None
    turned_values: cute.Tensor | None  # fp8 (L1, L2, K, M)
    turned_scales: cute.Tensor | None

    def with_four_modes(self) -> Outputs:
        """The same tensors with leading modes of size 1."""
        return Outputs(*(None if t is None else four_modes(t) for t in self))


def four_modes(tensor: cute.Tensor) -> cute.Tensor:
    """A tensor of up to four modes as (L1, L2, rows, columns)."""
    missing = 4 - cute.rank(tensor)
    if missing == 0:
        return tensor
    shape = (*(1,) * missing, *tensor.layout.shape)
    return cute.make_tensor(
        tensor.iterator, cute.make_layout(shape, stride=(*(0,) * missing, *tensor.layout.stride))
    )


def address(tensor: cute.Tensor, matrix: MatrixIndex, row: Int32, column: Int32) -> cute.Pointer:
    """The address of an element; columns are contiguous."""
    return tensor[matrix.outer, matrix.inner, row, None].iterator + column


def aligned(pointer: cute.Pointer, alignment: int) -> cute.Pointer:
    """The same address, declared a multiple of `alignment` bytes. `Pointer.align` would round it up."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=alignment)


def further(pointer: cute.Pointer, tensor: cute.Tensor, rows: int) -> cute.Pointer:
    """The address `rows` rows of the tensor further on, with the same alignment."""
    return aligned(pointer + Int64(tensor.stride[2]) * rows, pointer.alignment)


def whole_tile(x: cute.Tensor, site: Site) -> cutlass.Boolean:
    """True if the tile lies within x."""
    return (site.row + TILE <= x.shape[2]) & (site.column + TILE <= x.shape[3])


def row_of_tile(word: Int32, i: int, key_order: bool) -> Int32:
    """Row i, in the tile, of a thread of group `word`. Four rows in turn make a word of a transpose."""
    word, e = word + i // 4 * WORDS, i % 4
    if key_order:
        return word // 4 * 16 + e // 2 * 8 + word % 4 * 2 + e % 2
    return word * 4 + e


def load_whole(pointer: cute.Pointer, values: cute.Tensor, first: int) -> None:
    """Loads VECTOR elements into values[first:], 16 bytes at a time where the alignment allows."""
    dtype, alignment = pointer.dtype, pointer.alignment
    width = min(alignment * 8 // dtype.width, VECTOR)
    for start in range(0, VECTOR, width):
        source = cute.make_tensor(aligned(pointer + start, width * dtype.width // 8), cute.make_layout(width))
        cute.autovec_copy(source, cute.make_tensor(values.iterator + first + start, cute.make_layout(width)))


def vector_at(tensor: cute.Tensor, matrix: MatrixIndex, row: Int32, column: Int32) -> cute.Pointer:
    """`address` of a column that is a multiple of VECTOR, with the alignment that follows."""
    width = tensor.element_type.width // 8
    return aligned(address(tensor, matrix, row, column), min(tensor.iterator.alignment, VECTOR * width))


def convert(elements: cute.Tensor, first: int, factor: Float32, packed: cute.Tensor) -> None:
    """Stores elements from number `first` on, times the factor, to packed (n,) fp8."""
    floats = cute.make_rmem_tensor(cute.size(packed), Float32)
    for n in range(cute.size(packed)):
        floats[n] = widened(elements, first + n) * factor
    packed.store(floats.load().to(packed.element_type))


def store_vector(packed: cute.Tensor, target: cute.Pointer) -> None:
    """Stores VECTOR fp8 numbers to an address that is a multiple of VECTOR bytes."""
    cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(VECTOR)))


@cute.jit
def load_part(pointer: cute.Pointer, values: cute.Tensor, first: cutlass.Constexpr, count: Int32):
    """Loads the first `count` of VECTOR elements into values[first:], which holds zeros."""
    elements = cute.make_tensor(pointer, cute.make_layout(VECTOR))
    for v in range_constexpr(VECTOR):
        if v < count:
            values[first + v] = elements[v]


@cute.jit
def load_tile(x: cute.Tensor, site: Site, values: cute.Tensor, key_order: cutlass.Constexpr):
    """Loads this thread's elements of a tile to values (ROWS * VECTOR,) of x's dtype, 0 outside of x."""
    matrix, word = site.matrix, site.word
    m0, k = site.row, site.column + site.lane * VECTOR
    M, K = x.shape[2], x.shape[3]
    if whole_tile(x, site):
        first = vector_at(x, matrix, m0 + row_of_tile(word, 0, key_order), k)
        for i in range_constexpr(ROWS):
            load_whole(further(first, x, row_of_tile(0, i, key_order)), values, i * VECTOR)
    else:
        clear(values)
        for i in range_constexpr(ROWS):
            row = m0 + row_of_tile(word, i, key_order)
            if row < M:
                if k + VECTOR <= K:
                    load_whole(vector_at(x, matrix, row, k), values, i * VECTOR)
                else:
                    load_part(address(x, matrix, row, k), values, i * VECTOR, K - k)


def clear(elements: cute.Tensor) -> None:
    """Sets all elements to 0."""
    words = cute.recast_tensor(elements, Int32)
    words.fill(0)


def _grouped(elements: cute.Tensor, shape: tuple[int, int], stride: tuple[int, int]) -> cute.Tensor:
    return cute.make_tensor(elements.iterator, cute.make_layout(shape, stride=stride))


def maximum(elements: cute.Tensor) -> Float32:
    """The largest finite magnitude of a thread's elements, of x's dtype."""
    if elements.element_type is Float32:
        found = cute.make_rmem_tensor(1, Float32)
        largest_finite(_grouped(elements, (1, cute.size(elements)), (0, 1)), found)
        return found[0]
    words, found = cute.recast_tensor(elements, Int32), cute.make_rmem_tensor(1, Int32)
    largest_finite_pairs(_grouped(words, (1, cute.size(words)), (0, 1)), found, elements.element_type)
    both = halves(found, elements.element_type)
    return cute.arch.fmax(both[0], both[1])


def maxima_of_rows(elements: cute.Tensor) -> cute.Tensor:
    """The largest finite magnitude of each of a thread's rows of a tile, float32 (ROWS,)."""
    amax = cute.make_rmem_tensor(ROWS, Float32)
    if elements.element_type is Float32:
        largest_finite(_grouped(elements, (ROWS, VECTOR), (VECTOR, 1)), amax)
        return amax
    words, found = cute.recast_tensor(elements, Int32), cute.make_rmem_tensor(ROWS, Int32)
    largest_finite_pairs(_grouped(words, (ROWS, VECTOR // 2), (VECTOR // 2, 1)), found, elements.element_type)
    both = halves(found, elements.element_type)
    for i in range(ROWS):
        amax[i] = cute.arch.fmax(both[2 * i], both[2 * i + 1])
    return amax


def pairs_of_columns(elements: cute.Tensor) -> cute.Tensor:
    """The largest finite magnitude of each of a thread's columns of a tile: `empty_columns` filled."""
    if elements.element_type is Float32:
        amax = cute.make_rmem_tensor(VECTOR, Float32)
        largest_finite(_grouped(elements, (VECTOR, ROWS), (1, VECTOR)), amax)
        return amax
    words, found = cute.recast_tensor(elements, Int32), cute.make_rmem_tensor(VECTOR // 2, Int32)
    largest_finite_pairs(_grouped(words, (VECTOR // 2, ROWS), (1, VECTOR // 2)), found, elements.element_type)
    return found


def empty_columns(dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Zeros for the maxima of a thread's columns: pairs of `dtype` as Int32 (VECTOR / 2,), or float32
    (VECTOR,)."""
    narrow = dtype is not Float32
    most = cute.make_rmem_tensor(VECTOR // (1 + narrow), Int32 if narrow else Float32)
    clear(most)
    return most


def larger_pairs(most: cute.Tensor, found: cute.Tensor, dtype: type[cutlass.Numeric]) -> None:
    """Raises most to found, both as `pairs_of_columns` makes them."""
    for n in range(cute.size(most)):
        if most.element_type is Float32:
            most[n] = cute.arch.fmax(most[n], found[n])
        else:
            most[n] = pair_max(most[n], found[n], dtype)


def maxima_of_columns(elements: cute.Tensor) -> cute.Tensor:
    """The largest finite magnitude of each of a thread's columns of a tile, float32 (VECTOR,)."""
    found = pairs_of_columns(elements)
    return found if elements.element_type is Float32 else halves(found, elements.element_type)


def maximum_of_row(amax: cute.Tensor, lane: Int32) -> Float32:
    """The maximum of amax[lane // 2] over the LANES neighbouring lanes; amax: (ROWS,), one for each row.

    Each exchange halves a lane's rows, which takes eight shuffles instead of four for each row.
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


def divisor(size: Int32) -> cute.FastDivmodDivisorV2:
    """A divisor by `size`, made on the host. A plain division takes some 30 dependent instructions before a
    thread has its first address."""
    return cute.fast_divmod_create_divisor_v2(Int32(size))


class TileDivisors(NamedTuple):
    """Divisors that turn a tile's number into its site."""

    along_k: cute.FastDivmodDivisorV2  # tiles along K
    along_m: cute.FastDivmodDivisorV2  # tiles along M
    inner: cute.FastDivmodDivisorV2  # matrices of the second mode


def tile_divisors(x: cute.Tensor) -> TileDivisors:
    """The divisors for x's tiles."""
    sizes = (cute.ceil_div(x.shape[3], TILE), cute.ceil_div(x.shape[2], TILE), x.shape[1])
    return TileDivisors(*(divisor(size) for size in sizes))


def site_of(number: Int32, divisors: TileDivisors, word: Int32, lane: Int32) -> Site:
    """The site of a thread in tile `number`."""
    band, n = divmod(number, divisors.along_k)
    matrix, m = divmod(band, divisors.along_m)
    return Site(MatrixIndex(*divmod(matrix, divisors.inner)), m * TILE, n * TILE, word, lane)


def memory_at(address: Int64, dtype: type[cutlass.Numeric]) -> cute.Pointer:
    """A pointer to global memory that a launch gets as a number, a multiple of 16 bytes."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)


def one_scale(address: Int64) -> cute.Tensor:
    """The one scale of a whole tensor, as a tensor of four modes."""
    layout = cute.make_layout((1, 1, 1, 1))
    return cute.make_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4), layout)


def outputs_of(
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    scale: Int64,
    spec: TileQuantization,
) -> Outputs:
    """The outputs of a host function, with the scale at address `scale` for kinds of one scale."""
    if {"whole", "given"} & {spec.plain, spec.turned}:
        scales = None if spec.plain is None else one_scale(scale)
        turned_scales = None if spec.turned is None else one_scale(scale)
    return Outputs(values, scales, turned_values, turned_scales)


def maxima_at(
    workspace: cute.Pointer, first: Int64, shape: tuple[Int32, ...], pad: bool = True
) -> tuple[cute.Tensor, Int64]:
    """(tensor of this shape that begins at element `first` of the workspace, end of it).

    Rows begin at multiples of 16 bytes; without `pad`, for `first` 0 only, they are contiguous.
    """
    pitch = cute.ceil_div(shape[-1], MAXIMA_ALIGN) * MAXIMA_ALIGN if pad else shape[-1]
    strides, step = [1], pitch
    for size in reversed(shape[1:-1]):
        strides.append(step)
        step = step * size
    strides.append(Int64(step))  # the only one that may reach beyond 32 bits
    layout = cute.make_layout(tuple(shape), stride=tuple(reversed(strides)))
    count = cute.ceil_div(Int64(step) * shape[0], MAXIMA_ALIGN) * MAXIMA_ALIGN
    pointer = aligned(workspace + first, 4 * MAXIMA_ALIGN)
    return cute.make_tensor(pointer, layout), first + count


def raise_to(maximum: cute.Pointer, value: Float32) -> None:
    """Raises a number in global memory, not negative, to `value`; NaN counts as 0."""
    bits = cute.arch.fmax(value, Float32(0.0)).bitcast(Int32)
    target = cute.recast_ptr(maximum, dtype=Int32)
    cute.arch.red(target, bits, op="max", dtype="s32", sem="relaxed", scope="gpu")
