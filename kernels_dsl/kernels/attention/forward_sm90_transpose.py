"""Transposing role of the SM90 forward kernel with fp8 operands: V's blocks, from one ring to another.

fp8 WGMMA reads V along the keys. Three warps beside the one that issues TMA take a block of V as it is in
memory, (N, Dv), transpose it through registers and write it where WGMMA reads it, (Dv, N), the keys of
every sixteen in the order of `blocks.attention.score_tile.to_operand`:

    TMA                load raw 0 | load raw 1   | load raw 2   ...
    transposing warps             | transpose 0  | transpose 1  ...
    consumers                                    | P0 V0        | P1 V1 ...

A lane takes four columns of sixteen keys at a time: a warp reads whole rows of 128 bytes, and writes sixteen
bytes a column.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention.seqlen import V_STEP
from kernels_dsl.blocks.attention.tile_queue import ConsumedTiles
from kernels_dsl.blocks.attention.work import Work
from kernels_dsl.blocks.hw.barriers import fence_for_async_readers
from kernels_dsl.blocks.hw.dsl import transposed
from kernels_dsl.blocks.hw.layouts import SWIZZLES
from kernels_dsl.blocks.hw.pipeline import consumer_state, producer_state
from kernels_dsl.blocks.hw.swizzled_rows import shared_pointer
from kernels_dsl.config.attention import TRANSPOSING_WARPS

from .forward_sm90_records import Shared
from .forward_sm90_spec import Spec

THREADS = TRANSPOSING_WARPS * 32
COLUMNS = 4
"""Columns of one lane at a time: a word."""


class BlockShape(NamedTuple):
    """Size of a block of V before it is transposed."""

    keys: int
    columns: int


@cute.jit
def transpose_values(spec: Spec, shared: Shared, work: Work):
    """Moves every block of V that this CTA's work tiles visit from the raw ring to that of the products."""
    raw_ring, v_ring = shared.rings.raw_v, shared.rings.v
    raw, values = shared.tiles.raw_v.iterator.toint(), shared.tiles.v.iterator.toint()
    tiles = ConsumedTiles(spec, work, shared.queue)
    raw_state, v_state = consumer_state(spec.raw_stages), producer_state(spec.stages)
    thread = cute.arch.thread_idx()[0] - (spec.threads - THREADS)
    position, size = tiles.first(), tiles.size()
    while tiles.more(position, size):
        tile, taken = tiles.decode(position)
        for _ in cutlass.range(tile.visit.count, unroll=1):
            raw_ring.consumer_wait(raw_state)
            v_ring.sync_object_empty.wait(v_state.index, v_state.phase)
            source = raw + raw_state.index * spec.v_bytes
            target = values + v_state.index * spec.v_bytes
            transpose_block(BlockShape(spec.tile_n, spec.dim_v), source, target, thread, THREADS)
            fence_for_async_readers()
            cute.arch.sync_warp()
            raw_ring.consumer_release(raw_state)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(v_ring.producer_get_barrier(v_state))
            raw_state.advance()
            v_state.advance()
        position = tiles.next(taken)


@cute.jit
def transpose_block(
    shape: cutlass.Constexpr[BlockShape],
    source: Int32,  # address in shared memory
    target: Int32,  # address in shared memory
    thread: Int32,
    threads: cutlass.Constexpr[int],
):
    """Transposes one thread's share of a block."""
    quads = cutlass.const_expr(shape.columns // COLUMNS)
    for unit in cutlass.range(thread, quads * shape.keys // V_STEP, threads, unroll=1):
        transpose_unit(shape, source, target, unit % quads, unit // quads)


def transpose_unit(shape: BlockShape, source: Int32, target: Int32, quad: Int32, group: Int32) -> None:
    """Transposes columns 4 `quad` … 4 `quad` + 3 of keys 16 `group` … 16 `group` + 15."""
    read = swizzled_rows(shape.keys, shape.columns, group * V_STEP, quad * COLUMNS)
    words = []
    for key in range(V_STEP):
        pointer = shared_pointer(Int32, read.address(source, key), 4)
        words.append(cute.make_tensor(pointer, cute.make_layout(1))[0])
    columns = [transposed([words[2 * c + n] for n in (0, 1, 8, 9)]) for c in range(4)]
    write = swizzled_rows(shape.columns, shape.keys, quad * COLUMNS, group * V_STEP)
    vector = cute.make_rmem_tensor(4, Int32)
    for column in range(COLUMNS):
        for c in range(4):
            vector[c] = columns[c][column]
        pointer = shared_pointer(Int32, write.address(target, column), 16)
        cute.autovec_copy(vector, cute.make_tensor(pointer, cute.make_layout(4)))


class SwizzledRows(NamedTuple):
    """Some rows of a swizzled tile of bytes, at one column."""

    offset: Int32
    """Byte offset of the first row."""
    span: int
    """Bytes of a row: the period of the swizzle's columns."""

    def address(self, base: Int32, row: int) -> Int32:
        """Address of row number `row` of these in a tile at `base`."""
        return base + (self.offset ^ swizzle_bits(self.span, row)) + row * self.span


def swizzled_rows(rows: int, width: int, row: Int32, column: Int32) -> SwizzledRows:
    """Rows from `row` on of a tile (rows, width contiguous) of `staged_smem_layout`.

    `row` is a multiple of a power of two above the number of rows that are used.
    """
    span = next(span for span, _, _ in SWIZZLES if width % span == 0)
    offset = (column // span * rows + row) * span + column % span
    return SwizzledRows(offset ^ swizzle_bits(span, row), span)


def swizzle_bits(span: int, row: Int32 | int) -> Int32 | int:
    """Bits that the offset of a column in its row is exclusive-ored with."""
    return (row * span >> 3) & (span - 16)
