"""The transpose of packed sequences of fp8 values, for the second product of attention."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention.seqlen import padded_start, row_within, span_of
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.config.quantize import CTAS_PER_SM, THREADS, TILE, VECTOR, TileQuantization

from .tile import store_turned
from .views import LANES, ROWS, MatrixIndex, Site, load_tile


class Sequences(NamedTuple):
    """Sequences packed one after the other, int32."""

    starts: cute.Tensor  # (sequences + 1,): first rows
    used: cute.Tensor | None  # (sequences,): rows that count; None: all


def transpose_packed(
    x: cute.Tensor,
    out: cute.Tensor,
    starts: cute.Tensor,
    used: cute.Tensor | None,
    stream,
    spec: cutlass.Constexpr[TileQuantization],
):
    """Launch the transpose of each sequence of x (T, H, D), D contiguous, into out (H, D, P), by itself.

    starts, used: as in `Sequences`. In out, sequences begin at `seqlen.padded_start`. Columns of out from a
    sequence's used rows to the next multiple of 16 are 0; those after them are not written. Whatever starts
    and used hold, nothing outside of x and out is read or written. spec: with `turned` "one".
    """
    sequences = cute.size(starts) - 1
    slots = x.shape[0] // TILE + sequences  # each sequence adds at most one tile that is not whole
    transpose_packed_kernel(x, out, Sequences(starts, used), spec).launch(
        grid=[slots * x.shape[1] * cute.ceil_div(x.shape[2], TILE), 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=CTAS_PER_SM[1],
        preferred_smem_carveout=100,  # in percent; without it the compiler asks a GPU, and there may be none
        stream=stream,
    )


@entry_name("transpose_packed")
@cute.kernel
def transpose_packed_kernel(
    x: cute.Tensor, out: cute.Tensor, sequences: Sequences, spec: cutlass.Constexpr[TileQuantization]
):
    """Device side of `transpose_packed`: a tile of 128 x 128 of one head and sequence."""
    starts, used = sequences
    thread = cute.arch.thread_idx()[0]
    number = cute.arch.block_idx()[0]
    tiles_d = cute.ceil_div(x.shape[2], TILE)
    n, band = number % tiles_d, number // tiles_d
    head, slot = band % x.shape[1], band // x.shape[1]
    sequence = sequence_of_slot(starts, slot, x.shape[0])
    start, length = span_of(starts, sequence, x.shape[0])
    if cutlass.const_expr(used is not None):
        length = row_within(used[sequence], length)
    row = (slot - first_slot(starts, sequence, x.shape[0])) * TILE
    if row >= 0 and row < length:
        shape = (1, x.shape[1], length, x.shape[2])
        rows = _view(x, start * x.stride[0], shape, (0, x.stride[1], x.stride[0], 1))
        shape = (1, x.shape[1], x.shape[2], out.shape[2])
        columns = _view(out, padded_start(start, sequence), shape, (0, out.stride[0], out.stride[1], 1))
        word, lane = thread // LANES, thread % LANES
        elements = cute.make_rmem_tensor(ROWS * VECTOR, x.element_type)
        site = Site(MatrixIndex(Int32(0), head), row, n * TILE, word, lane)
        load_tile(rows, site, elements, spec.key_order)
        tile = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(TILE * TILE // 4), 16)
        store_turned(spec, rows, columns, elements, None, tile, site)


def _view(
    tensor: cute.Tensor, offset: Int32, shape: tuple[Int32, ...], stride: tuple[Int32, ...]
) -> cute.Tensor:
    """A view that begins `offset` elements further on, with the tensor's alignment."""
    pointer = tensor.iterator
    moved = cute.make_ptr(
        tensor.element_type, (pointer + offset).toint(), pointer.memspace, assumed_align=pointer.alignment
    )
    return cute.make_tensor(moved, cute.make_layout(shape, stride=stride))


def first_slot(starts: cute.Tensor, sequence: Int32, rows: Int32) -> Int32:
    """The first of a sequence's slots: tiles in the grid, at least as many as it needs."""
    return row_within(starts[sequence], rows) // TILE + sequence


@cute.jit
def sequence_of_slot(starts: cute.Tensor, slot: Int32, rows: Int32) -> Int32:
    """The sequence that `slot` belongs to, of `rows` packed rows in all."""
    low, high = Int32(0), cute.size(starts) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if first_slot(starts, middle, rows) <= slot:
            low = middle
        else:
            high = middle
    return low
