"""Caches of e4m3 in decoding attention: both products take fp16, which holds every e4m3 exactly.

K and V lie in shared memory as pairs of elements, in tiles of half as many columns, and become fp16 in
registers after ldmatrix: one cvt for two elements, where bf16 would take four instructions.

    S = Q K^T   a register of ldmatrix has d = 4c .. 4c + 3 of 16, c = lane % 4. The product sums over d in
                any order, so Q's registers have these columns in place of 2c, 2c + 1, 2c + 8, 2c + 9.
    O = P V     transposed, it has d = 2u, 2u + 1, u = lane / 4, of keys 2c and 2c + 1. The two d go to
                different instructions, so a thread's outputs are d = 4c .. 4c + 3 of 16.

bf16 queries have a wider range than fp16. Each row is multiplied by a power of 2 that takes its largest
element to 2^14, and its scores by the inverse: only elements below 2^-28 of the largest lose digits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int16, Int32

from kernels_dsl.blocks.hw.dsl import permuted
from kernels_dsl.blocks.hw.fp8 import e4m3_pair, magnitude
from kernels_dsl.blocks.hw.swizzled_rows import (
    PAIR,
    VECTOR,
    MatrixReader,
    reader_b,
    reader_b_transposed,
    shared_pointer,
)

from .decode_spec import DecodeSpec, Spec

EVEN_FIRST = 0x3120
"""Order of bytes: 0, 2, 1, 3."""
TOP = 14
"""Exponent of a row's largest element of Q."""


def widen(word: Int32, low: cute.Tensor, high: cute.Tensor) -> None:
    """Four e4m3 of a register as fp16: the lower two and the upper two."""
    cute.recast_tensor(low, Int32)[0] = e4m3_pair(Int16(word))
    cute.recast_tensor(high, Int32)[0] = e4m3_pair(Int16(word >> 16))


class Fp8Reader:
    """Reads 16 x 16 operands B of fp16 from tiles of e4m3: of each 16 x 32 two, one after the other."""

    def __init__(self, reader: MatrixReader, transposed: bool) -> None:
        self.reader = reader
        self.transposed = transposed
        self.words: dict[tuple[int, int], cute.Tensor] = {}

    def read(self, address: Int32, k: int, n: int, into: cute.Tensor) -> None:
        """Step (k, n) of 16 x 16 into registers ((2, 2), 2)."""
        number, place = (n, (k, n // 2)) if self.transposed else (k, (k // 2, n))
        if place not in self.words:
            words = cute.make_rmem_tensor(VECTOR, PAIR)
            row, column = (16 * k, 16 * (n // 2)) if self.transposed else (16 * n, 16 * (k // 2))
            self.reader.read(address, row, column, words)
            self.words[place] = cute.recast_tensor(words, Int32)
        words = self.words[place]
        for half in range(2):
            if self.transposed:  # words 2h, 2h + 1: keys 0-7 and 8-15
                word = permuted(words[2 * (number % 2) + half], Int32(0), EVEN_FIRST)
                widen(word, into[(None, half), 0], into[(None, half), 1])
            else:  # words h, h + 2: keys 0-7 and 8-15
                widen(words[number % 2 + 2 * half], into[(None, 0), half], into[(None, 1), half])


def k_reader(spec: DecodeSpec, lane: Int32) -> Fp8Reader:
    """Reads operands of S = Q K^T."""
    return Fp8Reader(reader_b(spec.kv_tile, PAIR, lane), False)


def v_reader(spec: DecodeSpec, lane: Int32) -> Fp8Reader:
    """Reads operands of O = P V."""
    return Fp8Reader(reader_b_transposed(spec.kv_tile, PAIR, lane), True)


def read_queries(spec: DecodeSpec, base: Int32, row: Int32, lane: Int32, k: int, into: cute.Tensor) -> None:
    """Columns 16 k .. 16 k + 15 of rows `row` and `row` + 8 of Q, in the order of K's registers: into
    (2, 2, 2)."""
    tile, flat = spec.q_tile, cute.make_tensor(into.iterator, cute.make_layout(VECTOR))
    first = base + tile.chunk_offset(row, lane % 4 // 2)
    address = (first ^ tile.flip(16 * k)) + lane % 2 * 8
    for r in range(2):
        place = address + tile.row_offset(8 * r, 16 * k)
        found = cute.make_tensor(shared_pointer(Float16, place, 8), cute.make_layout(4))
        four = cute.make_rmem_tensor(4, Float16)
        cute.autovec_copy(found, four)
        for half in range(2):
            for e in range(2):
                flat[e + 2 * r + 4 * half] = four[2 * half + e]


@cute.jit
def queries_to_fp16(spec: Spec, base: Int32, factors: cute.Tensor, thread: Int32):
    """Makes Q in shared memory fp16, each row times a power of 2; factors (rows,): receives the inverses. By
    the threads that compute.

    Infinities and NaN stay what they are.
    """
    tile = spec.q_tile
    chunks = tile.columns // VECTOR
    group = cutlass.const_expr(next(size for size in (8, 16, 32) if chunks <= size))
    rows_at_once = spec.config.computing_threads // group
    column, of_pass = thread % group, thread // group
    for first in cutlass.range_constexpr(0, tile.rows, rows_at_once):
        row = of_pass + first
        block = column // tile.chunks
        place = base + tile.chunk_offset(row, column % tile.chunks) + block * (tile.rows * 2 * tile.width)
        values = cute.make_rmem_tensor(VECTOR, Float32)
        values.fill(0.0)
        inside = (column < chunks) & (row < tile.rows)
        if inside:
            source = cute.make_tensor(shared_pointer(BFloat16, place, 16), cute.make_layout(VECTOR))
            values.store(source.load().to(Float32))
        largest = magnitude(values[0])
        for i in cutlass.range_constexpr(1, VECTOR):
            largest = cute.arch.fmax(largest, magnitude(values[i]))
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=group)
        exponent = largest.bitcast(Int32) >> 23
        power = cutlass.min(cutlass.max(2 * 127 + TOP - exponent, Int32(1)), Int32(253))
        factor = (power << 23).bitcast(Float32)
        if inside:
            for i in cutlass.range_constexpr(VECTOR):
                values[i] = values[i] * factor
            target = cute.make_tensor(shared_pointer(Float16, place, 16), cute.make_layout(VECTOR))
            target.store(values.load().to(Float16))
            if column == 0:
                factors[row] = ((254 - power) << 23).bitcast(Float32)
