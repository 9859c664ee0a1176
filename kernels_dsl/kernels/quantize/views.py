"""What the quantisation kernels share: tensors as batches of matrices, and loads of vectors and tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from kernels_dsl.blocks.fp8 import largest_finite
from kernels_dsl.config.quantize import THREADS, TILE, VECTOR

LANES = TILE // VECTOR
"""Threads side by side in a row of a tile."""
WORDS = THREADS // LANES
"""Groups of four rows that the threads of a CTA take at a time."""
ROWS = TILE * TILE // (THREADS * VECTOR)
"""Rows of a tile that a thread has elements of."""


def four_modes(tensor: cute.Tensor) -> cute.Tensor:
    """A tensor of two to four modes as (L1, L2, rows, columns)."""
    missing = 4 - cute.rank(tensor)
    if missing == 0:
        return tensor
    shape = (*(1,) * missing, *tensor.layout.shape)
    return cute.make_tensor(
        tensor.iterator, cute.make_layout(shape, stride=(*(0,) * missing, *tensor.layout.stride))
    )


def address(tensor: cute.Tensor, at: tuple, row: Int32, column: Int32) -> cute.Pointer:
    """Where element (row, column) of matrix `at` lies; columns are contiguous."""
    return tensor[at[0], at[1], row, None].iterator + column


def row_of_tile(word: Int32, i: int, key_order: bool) -> Int32:
    """The row that a thread of group `word` has as its number i. Four in turn make a word of a transpose."""
    word, e = word + i // 4 * WORDS, i % 4
    if key_order:
        return word // 4 * 16 + e // 2 * 8 + word % 4 * 2 + e % 2
    return word * 4 + e


def load_whole(pointer: cute.Pointer, values: cute.Tensor, first: int) -> None:
    """VECTOR elements into values[first:], by 16-byte loads where the tensor's alignment allows."""
    dtype, alignment = pointer.dtype, pointer.alignment
    raw = cute.make_rmem_tensor(VECTOR, dtype)
    width = min(alignment * 8 // dtype.width, VECTOR)
    for start in range(0, VECTOR, width):
        source = cute.make_tensor((pointer + start).align(width * dtype.width // 8), cute.make_layout(width))
        cute.autovec_copy(source, cute.make_tensor(raw.iterator + start, cute.make_layout(width)))
    loaded = raw.load().to(Float32)
    for v in range(VECTOR):
        values[first + v] = loaded[v]


def vector_at(tensor: cute.Tensor, at: tuple, row: Int32, column: Int32) -> cute.Pointer:
    """`address` with the alignment that it has where `column` is a multiple of VECTOR."""
    width = tensor.element_type.width // 8
    return address(tensor, at, row, column).align(min(tensor.iterator.alignment, VECTOR * width))


@cute.jit
def load_part(pointer: cute.Pointer, values: cute.Tensor, first: cutlass.Constexpr, count: Int32):
    """The first `count` of VECTOR elements into values[first:], which is 0 before."""
    elements = cute.make_tensor(pointer, cute.make_layout(VECTOR))
    for v in range_constexpr(VECTOR):
        if v < count:
            values[first + v] = elements[v].to(Float32)


@cute.jit
def load_tile(
    x: cute.Tensor, at: tuple, origin: tuple, place: tuple, values: cute.Tensor, key_order: cutlass.Constexpr
):
    """This thread's elements of the tile at `origin` (row, column): values (ROWS * VECTOR,), 0 outside of x.

    `place`: (group of rows, first column in the tile).
    """
    word, column = place
    m0, k = origin[0], origin[1] + column
    M, K = x.shape[2], x.shape[3]
    if (m0 + TILE <= M) & (origin[1] + TILE <= K):
        for i in range_constexpr(ROWS):
            load_whole(vector_at(x, at, m0 + row_of_tile(word, i, key_order), k), values, i * VECTOR)
    else:
        values.fill(0.0)
        for i in range_constexpr(ROWS):
            row = m0 + row_of_tile(word, i, key_order)
            if row < M:
                if k + VECTOR <= K:
                    load_whole(vector_at(x, at, row, k), values, i * VECTOR)
                else:
                    load_part(address(x, at, row, k), values, i * VECTOR, K - k)


def maximum(elements: cute.Tensor) -> Float32:
    """The largest finite magnitude of a thread's elements."""
    one = cute.make_rmem_tensor(1, Float32)
    flat = cute.make_layout((1, cute.size(elements)), stride=(0, 1))
    largest_finite(cute.make_tensor(elements.iterator, flat), one)
    return one[0]


def by_rows(elements: cute.Tensor) -> cute.Tensor:
    """A thread's elements of a tile as (rows, columns)."""
    return cute.make_tensor(elements.iterator, cute.make_layout((ROWS, VECTOR), stride=(VECTOR, 1)))


def by_columns(elements: cute.Tensor) -> cute.Tensor:
    """A thread's elements of a tile as (columns, rows)."""
    return cute.make_tensor(elements.iterator, cute.make_layout((VECTOR, ROWS), stride=(1, VECTOR)))


def tile_place(number: Int32, x: cute.Tensor) -> tuple:
    """(matrix, origin) of tile `number` of all."""
    tiles_k, tiles_m = cute.ceil_div(x.shape[3], TILE), cute.ceil_div(x.shape[2], TILE)
    band, n = number // tiles_k, number % tiles_k
    matrix, m = band // tiles_m, band % tiles_m
    return (matrix // x.shape[1], matrix % x.shape[1]), (m * TILE, n * TILE)
