"""Tiles of rows of 16-bit elements in shared memory: cp.async writes them, ldmatrix reads them.

A tile is cut into column blocks of 64 elements (128 bytes), or of 32 where the number of columns asks for it.
Each has its rows one after another. The 16-byte chunks of a row are permuted by the row's number, so that the
eight rows of a matrix lie in eight different groups of banks. 8-bit elements are taken two at a time, as
half as many columns (`in_pairs`).

Addresses are computed by hand. The permutation is an exclusive or of the chunk's number with bits of the
row's, so a lane's address is (base ^ constant) + constant, with one base for the whole tile: static offsets
end up in the instructions, where a swizzled layout takes three integer instructions for each access.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import warp
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.cp_async import cp_async
from kernels_dsl.blocks.hw.dsl import inline_ptx

VECTOR = 8
"""Elements of a chunk of 16 bytes."""
PAIR = cutlass.Float16
"""Type that stands for two 8-bit elements where they are only moved."""
ALIGN = 1024
"""Bytes to which a tile in shared memory is aligned: the period of the permutation."""


@dataclass(frozen=True)
class RowsTile:
    """Geometry of one tile: `rows` a multiple of 16, `columns` a multiple of 32."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows % 16 or self.rows <= 0:
            raise ValueError(f"rows is {self.rows}, must be a multiple of 16")
        if self.columns % 32 or self.columns <= 0:
            raise ValueError(f"columns is {self.columns}, must be a multiple of 32")

    @property
    def width(self) -> int:
        """Columns of a column block."""
        return 32 if self.columns % 64 else 64

    @property
    def blocks(self) -> int:
        """Column blocks."""
        return self.columns // self.width

    @property
    def chunks(self) -> int:
        """16-byte chunks of a row of a column block."""
        return self.width // VECTOR

    @property
    def bytes(self) -> int:
        """Bytes of the tile, a multiple of `ALIGN`."""
        return self.rows * self.columns * 2

    def phase(self, row: Any) -> Any:
        """Bits that the chunks of a row are permuted by; rows 8 apart have the same."""
        return row & 7 if self.chunks == 8 else (row >> 1) & 3

    def chunk_offset(self, row: Any, chunk: Any) -> Any:
        """Byte offset of a chunk of column block 0."""
        return row * (2 * self.width) + (chunk ^ self.phase(row)) * 16

    def row_offset(self, row: int, column: int) -> int:
        """Byte offset of a row that is a multiple of 8 in the column block of `column`."""
        return (column // self.width * self.rows + row) * 2 * self.width

    def flip(self, column: int) -> int:
        """Bits that the address of chunk 0 of a row is exclusive-ored with to get the chunk of `column`."""
        return column % self.width // VECTOR * 16

    def check_threads(self, threads: int) -> int:
        """Rows that `threads` threads copy at a time. ValueError where they cannot share the tile."""
        step = threads // self.chunks
        if threads % self.chunks or step % 8 or self.rows % step:
            raise ValueError(
                f"{threads} threads copy {step} rows at a time, must be a multiple of 8 that divides the "
                f"{self.rows} rows of a tile with {self.columns} columns"
            )
        return step


def shared_pointer(dtype: type[cutlass.Numeric], address: Int32, align: int) -> cute.Pointer:
    """A pointer into shared memory from its address."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align)


@dsl_user_op
def opaque(value: Int32 | Int64, *, loc=None, ip=None) -> Any:
    """The same value, with its origin hidden from the compiler.

    Otherwise the compiler keeps a loop's many addresses in registers and increments each of them, where one
    add derives each from another.
    """
    if isinstance(value, Int32):
        return inline_ptx(Int32, (value,), "mov.b32 $0, $1;", "=r,r", effects=False, loc=loc, ip=ip)
    return inline_ptx(Int64, (value,), "mov.b64 $0, $1;", "=l,l", effects=False, loc=loc, ip=ip)


@dataclass(frozen=True)
class RowsLoader:
    """One thread's share of the copies of tiles of a matrix (rows, columns) in global memory.

    Its columns are contiguous and rows start on 16 bytes. Elements outside of it are filled with zeros and
    not read, so nothing there can reach a product. It has columns in the last column block of the tile.
    """

    tile: RowsTile
    threads: int
    dtype: type[cutlass.Numeric]
    source: Int64
    """Address of this thread's first vector in the tile from row 0 on."""
    pitch: Int64
    """Bytes from row to row."""
    columns: Int32
    """Columns of the matrix."""
    row: Int32
    """First row of this thread in a tile."""
    chunk: Int32
    """This thread's chunk of every column block."""
    offset: Int32
    """Byte offset of this thread's first vector in a tile."""

    def start(self, first_row: Int32, end_row: Int32, address: Int32, guard_rows: bool) -> None:
        """Starts the copy of the tile from `first_row` on to shared memory at `address`.

        Rows from `end_row` on are zeros; without `guard_rows` there must be none.
        """
        tile, space = self.tile, cute.AddressSpace.gmem
        step = tile.check_threads(self.threads)
        source = opaque(self.source + Int64(first_row) * self.pitch)
        target = address + self.offset
        for step_row in range(0, tile.rows, step):
            if step_row:
                source = opaque(source + self.pitch * step)
            for block in range(tile.blocks):
                valid = Boolean(True)
                if guard_rows:
                    valid = first_row + self.row + step_row < end_row
                if block == tile.blocks - 1:
                    valid = valid & (self.chunk * VECTOR + block * tile.width < self.columns)
                vector = cute.make_ptr(self.dtype, source + block * tile.width * 2, space, assumed_align=16)
                staged = shared_pointer(
                    self.dtype, target + tile.row_offset(step_row, block * tile.width), 16
                )
                cp_async(staged, vector, 16, _bytes_if(valid))


def _bytes_if(valid: Boolean) -> Int32:
    return Int32(cutlass.select_(Boolean(valid), Int32(16).ir_value(), Int32(0).ir_value()))


def copy_row(
    tile: RowsTile,
    dtype: type[cutlass.Numeric],
    columns: Int32,
    source: Int64,  # address of the row
    chunk: Int32,
    target: Int32,
    valid: Boolean,
) -> None:
    """Starts the copies of this thread's chunks of a row; zeros where not `valid` and past the columns."""
    for block in range(tile.blocks):
        column = chunk * VECTOR + block * tile.width
        inside = valid if block < tile.blocks - 1 else valid & (column < columns)
        count = Int32(cutlass.select_(Boolean(inside), Int32(16).ir_value(), Int32(0).ir_value()))
        vector = cute.make_ptr(dtype, source + Int64(column) * 2, cute.AddressSpace.gmem, assumed_align=16)
        staged = shared_pointer(dtype, target + tile.row_offset(0, block * tile.width), 16)
        cp_async(staged, vector, 16, count)


def rows_loader(tile: RowsTile, tensor: cute.Tensor, threads: int, thread: Int32) -> RowsLoader:
    """The share of thread `thread` of `threads` of the copies from `tensor` (rows, columns)."""
    row, chunk = thread // tile.chunks, thread % tile.chunks
    pitch = Int64(tensor.stride[0]) * 2
    source = tensor.iterator.toint() + Int64(row) * pitch + Int64(chunk * (2 * VECTOR))
    columns = Int32(tensor.shape[1])
    return RowsLoader(
        tile, threads, tensor.element_type, source, pitch, columns,
        row=row, chunk=chunk, offset=tile.chunk_offset(row, chunk),
    )  # fmt: skip


@dataclass(frozen=True)
class MatrixReader:
    """ldmatrix of 16 x 16 elements at a time, as four 8 x 8 matrices in the order of the lanes' offsets."""

    tile: RowsTile
    dtype: type[cutlass.Numeric]
    transposed: bool
    offset: Int32
    """Byte offset of this lane's row in the first 16 x 16 elements of the tile."""

    def read(self, address: Int32, row: int, column: int, into: cute.Tensor) -> None:
        """16 x 16 elements from (row, column), both multiples of 16, of the tile at `address`: 8 a lane."""
        if into.element_type is not self.dtype:
            into = cute.recast_tensor(into, self.dtype)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(self.transposed, 4), self.dtype)
        lane = ((address + self.offset) ^ self.tile.flip(column)) + self.tile.row_offset(row, column)
        source = cute.make_tensor(shared_pointer(self.dtype, lane, 16), cute.make_layout((VECTOR, 1)))
        cute.copy(atom, source, cute.make_tensor(into.iterator, cute.make_layout((VECTOR, 1))))


def reader_a(tile: RowsTile, dtype: type[cutlass.Numeric], lane: Int32, first_row: Int32) -> MatrixReader:
    """Operand A (M, K) of mma.sync with the tile's rows as M from `first_row` on, a multiple of 8."""
    return MatrixReader(tile, dtype, False, tile.chunk_offset(first_row + lane % 16, lane // 16))


def reader_b(tile: RowsTile, dtype: type[cutlass.Numeric], lane: Int32) -> MatrixReader:
    """Operand B (N, K) with the tile's rows as N."""
    return MatrixReader(tile, dtype, False, tile.chunk_offset(lane % 8 + lane // 16 * 8, lane // 8 % 2))


def reader_b_transposed(
    tile: RowsTile, dtype: type[cutlass.Numeric], lane: Int32, first_column: Int32 | int = 0
) -> MatrixReader:
    """Operand B (N, K) with the tile's rows as K and its columns as N from `first_column` on, a multiple of
    16 within the first column block.
    """
    return MatrixReader(tile, dtype, True, tile.chunk_offset(lane % 16, lane // 16 + first_column // VECTOR))


def reader_a_transposed(
    tile: RowsTile, dtype: type[cutlass.Numeric], lane: Int32, first_column: Int32
) -> MatrixReader:
    """Operand A (M, K) with the tile's rows as K and its columns as M from `first_column` on, as above."""
    chunk = lane // 8 % 2 + first_column // VECTOR
    return MatrixReader(tile, dtype, True, tile.chunk_offset(lane % 8 + lane // 16 * 8, chunk))


def in_pairs(tensor: cute.Tensor) -> cute.Tensor:
    """An 8-bit tensor (rows, columns, ...), its columns contiguous and even, as one of pairs of 16 bits."""
    (rows, columns, *sizes), (row, _, *steps) = tensor.shape, tensor.stride
    layout = cute.make_layout(
        (rows, columns // 2, *sizes), stride=(row // 2, 1, *(step // 2 for step in steps))
    )
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=PAIR), layout)


@cute.jit
def store_rows(
    values: cute.Tensor,  # 16-bit accumulator fragment ((2, 2), M, N) of this warp's rows
    tile: cutlass.Constexpr[RowsTile],  # of those rows
    address: Int32,  # of as much shared memory, this warp's own
    target: cute.Tensor,  # (rows, columns) in global memory, columns contiguous, rows on 16 bytes
    first_row: Int32,  # of the warp, in target
    end_row: Int32,  # rows of target from here on are not written
    lane: Int32,
    place: cutlass.Constexpr = None,
):
    """Writes a warp's fragment to global memory in vectors of 16 bytes, by way of shared memory.

    `place`: column in target of a column of the fragment, a multiple of 8; the same one without it.
    """
    dtype = values.element_type
    row = lane // 4
    for m in cutlass.range_constexpr(cute.size(values, mode=[1])):
        for n in cutlass.range_constexpr(cute.size(values, mode=[2])):
            for half in cutlass.range_constexpr(2):
                first = address + tile.chunk_offset(row, Int32(0)) + lane % 4 * 4
                source = (first ^ tile.flip(8 * n)) + tile.row_offset(16 * m + 8 * half, 8 * n)
                pair = cute.make_tensor(shared_pointer(dtype, source, 4), cute.make_layout(2))
                pair.store(values[(None, half), m, n].load())
    cute.arch.sync_warp()
    chunk = lane % tile.chunks
    for step_row in cutlass.range_constexpr(0, tile.rows, 32 // tile.chunks):
        row = step_row + lane // tile.chunks
        for block in cutlass.range_constexpr(tile.blocks):
            column = chunk * VECTOR + block * tile.width
            if cutlass.const_expr(place is not None):
                column = place(column)
            if first_row + row < end_row and column < target.shape[1]:
                staged = address + tile.chunk_offset(row, chunk) + tile.row_offset(0, block * tile.width)
                vector = cute.make_tensor(shared_pointer(dtype, staged, 16), cute.make_layout(VECTOR))
                index = cute.crd2idx((first_row + row, column), target.layout)
                cute.autovec_copy(vector, global_vector(target, index))


def global_vector(tensor: cute.Tensor, index) -> cute.Tensor:
    """The 16 bytes at an element index that is a multiple of 8, as a tensor."""
    address = (tensor.iterator + index).toint()
    pointer = cute.make_ptr(tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))
