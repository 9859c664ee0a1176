"""What the quantisation kernels share: tensors as batches of matrices, and loads of vectors and tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from kernels_dsl.blocks.hw.fp8 import choose, halves, largest_finite, largest_finite_pairs, pair_max, widened
from kernels_dsl.config.quantize import MAXIMA_ALIGN, THREADS, TILE, VECTOR

LANES = TILE // VECTOR
"""Threads side by side in a row of a tile."""
WORDS = THREADS // LANES
"""Groups of four rows that the threads of a CTA take at a time."""
ROWS = TILE * TILE // (THREADS * VECTOR)
"""Rows of a tile that a thread has elements of."""


def four_modes(tensor: cute.Tensor) -> cute.Tensor:
    """A tensor of up to four modes as (L1, L2, rows, columns)."""
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


def aligned(pointer: cute.Pointer, alignment: int) -> cute.Pointer:
    """The same address, known to be a multiple of so many bytes. `Pointer.align` would round it up."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=alignment)


def further(pointer: cute.Pointer, tensor: cute.Tensor, rows: int) -> cute.Pointer:
    """So many rows of the tensor further on, as aligned as there."""
    return aligned(pointer + Int64(tensor.stride[2]) * rows, pointer.alignment)


def whole_tile(x: cute.Tensor, origin: tuple) -> cutlass.Boolean:
    """Whether x has all of the tile at `origin` (row, column)."""
    return (origin[0] + TILE <= x.shape[2]) & (origin[1] + TILE <= x.shape[3])


def row_of_tile(word: Int32, i: int, key_order: bool) -> Int32:
    """The row that a thread of group `word` has as its number i. Four in turn make a word of a transpose."""
    word, e = word + i // 4 * WORDS, i % 4
    if key_order:
        return word // 4 * 16 + e // 2 * 8 + word % 4 * 2 + e % 2
    return word * 4 + e


def load_whole(pointer: cute.Pointer, values: cute.Tensor, first: int) -> None:
    """VECTOR elements into values[first:], by 16-byte loads where the tensor's alignment allows."""
    dtype, alignment = pointer.dtype, pointer.alignment
    width = min(alignment * 8 // dtype.width, VECTOR)
    for start in range(0, VECTOR, width):
        source = cute.make_tensor(aligned(pointer + start, width * dtype.width // 8), cute.make_layout(width))
        cute.autovec_copy(source, cute.make_tensor(values.iterator + first + start, cute.make_layout(width)))


def vector_at(tensor: cute.Tensor, at: tuple, row: Int32, column: Int32) -> cute.Pointer:
    """`address` with the alignment that it has where `column` is a multiple of VECTOR."""
    width = tensor.element_type.width // 8
    return aligned(address(tensor, at, row, column), min(tensor.iterator.alignment, VECTOR * width))


def convert(elements: cute.Tensor, first: int, factor: Float32, packed: cute.Tensor) -> None:
    """packed (n,) fp8 = n elements from number `first` on, times the factor."""
    floats = cute.make_rmem_tensor(cute.size(packed), Float32)
    for n in range(cute.size(packed)):
        floats[n] = widened(elements, first + n) * factor
    packed.store(floats.load().to(packed.element_type))


def store_vector(packed: cute.Tensor, target: cute.Pointer) -> None:
    """VECTOR fp8 numbers to a multiple of VECTOR bytes."""
    cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(VECTOR)))


@cute.jit
def load_part(pointer: cute.Pointer, values: cute.Tensor, first: cutlass.Constexpr, count: Int32):
    """The first `count` of VECTOR elements into values[first:], which is 0 before."""
    elements = cute.make_tensor(pointer, cute.make_layout(VECTOR))
    for v in range_constexpr(VECTOR):
        if v < count:
            values[first + v] = elements[v]


@cute.jit
def load_tile(
    x: cute.Tensor, at: tuple, origin: tuple, place: tuple, values: cute.Tensor, key_order: cutlass.Constexpr
):
    """This thread's elements of the tile at `origin` (row, column): values (ROWS * VECTOR,) of x's dtype, 0
    outside of x.

    `place`: (group of rows, first column in the tile).
    """
    word, column = place
    m0, k = origin[0], origin[1] + column
    M, K = x.shape[2], x.shape[3]
    if whole_tile(x, origin):
        first = vector_at(x, at, m0 + row_of_tile(word, 0, key_order), k)
        for i in range_constexpr(ROWS):
            load_whole(further(first, x, row_of_tile(0, i, key_order)), values, i * VECTOR)
    else:
        clear(values)
        for i in range_constexpr(ROWS):
            row = m0 + row_of_tile(word, i, key_order)
            if row < M:
                if k + VECTOR <= K:
                    load_whole(vector_at(x, at, row, k), values, i * VECTOR)
                else:
                    load_part(address(x, at, row, k), values, i * VECTOR, K - k)


def clear(elements: cute.Tensor) -> None:
    """All elements 0."""
    words = cute.recast_tensor(elements, Int32)
    words.fill(0)


def _grouped(elements: cute.Tensor, shape: tuple, stride: tuple) -> cute.Tensor:
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
    """The largest finite magnitude of each of a thread's columns of a tile: pairs of x's dtype as Int32
    (VECTOR / 2,), or float32 (VECTOR,)."""
    if elements.element_type is Float32:
        amax = cute.make_rmem_tensor(VECTOR, Float32)
        largest_finite(_grouped(elements, (VECTOR, ROWS), (1, VECTOR)), amax)
        return amax
    words, found = cute.recast_tensor(elements, Int32), cute.make_rmem_tensor(VECTOR // 2, Int32)
    largest_finite_pairs(_grouped(words, (VECTOR // 2, ROWS), (1, VECTOR // 2)), found, elements.element_type)
    return found


def larger_pairs(most: cute.Tensor, found: cute.Tensor, dtype) -> None:
    """most = the larger of both; of what `pairs_of_columns` gives."""
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


def divisor(size: Int32) -> cute.FastDivmodDivisorV2:
    """What divides by `size`, made by the host. A division otherwise takes some 30 instructions, one after
    the other, before a thread has its first address."""
    return cute.fast_divmod_create_divisor_v2(Int32(size))


def tile_divisors(x: cute.Tensor) -> tuple:
    """For `tile_place`: tiles along K and M, matrices of the second mode."""
    sizes = (cute.ceil_div(x.shape[3], TILE), cute.ceil_div(x.shape[2], TILE), x.shape[1])
    return tuple(divisor(size) for size in sizes)


def tile_place(number: Int32, divisors: tuple) -> tuple:
    """(matrix, origin) of tile `number` of all."""
    along_k, along_m, inner = divisors
    band, n = divmod(number, along_k)
    matrix, m = divmod(band, along_m)
    return divmod(matrix, inner), (m * TILE, n * TILE)


def memory_at(address: Int64, dtype) -> cute.Pointer:
    """What a launch gets as a number, at a multiple of 16 bytes of global memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)


def one_scale(address: Int64) -> cute.Tensor:
    """The scale of all that is there, as a tensor of four modes."""
    layout = cute.make_layout((1, 1, 1, 1))
    return cute.make_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4), layout)


def scale_of_all(address: Int64, spec) -> tuple:
    """`one_scale` for x and for its transpose; None where the spec has no such output."""
    return tuple(None if kind is None else one_scale(address) for kind in (spec.plain, spec.turned))


def maxima_at(workspace: cute.Pointer, first: Int64, shape: tuple, pad: bool = True) -> tuple:
    """(a tensor of this shape that begins at element `first` of the workspace, where it ends).

    Rows begin at multiples of 16 bytes; without `pad`, where `first` is 0, only what follows does.
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
    """The number in global memory becomes the larger of both, which are not negative; NaN counts as 0."""
    bits = cute.arch.fmax(value, Float32(0.0)).bitcast(Int32)
    target = cute.recast_ptr(maximum, dtype=Int32)
    cute.arch.red(target, bits, op="max", dtype="s32", sem="relaxed", scope="gpu")
