"""Transposing role of the SM90 attention with fp8 operands: V's blocks, from one ring of stages to another.

fp8 WGMMA reads V along the keys. Three warps beside the one that issues TMA take a block of V as it is in
memory, (N, Dv), transpose it through registers and write it to where WGMMA reads it, (Dv, N), the keys of
every sixteen in the order of `blocks.score_tile.to_operand`. A lane takes four columns of sixteen keys at a
time: a warp reads whole rows of 128 bytes, and writes sixteen bytes a column.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention import tile_queue
from kernels_dsl.blocks.attention.seqlen import V_STEP
from kernels_dsl.blocks.hw.dsl import transposed
from kernels_dsl.blocks.hw.layouts import SWIZZLES
from kernels_dsl.blocks.hw.pipeline import consumer_state, producer_state
from kernels_dsl.blocks.hw.swizzled_rows import shared_pointer

from .forward_sm90_tiles import first_tile, next_tile, tile_at

WARPS = 3
"""Of the producer's warpgroup: all but the one that loads."""
THREADS = WARPS * 32
COLUMNS = 4
"""Of one lane at a time: a word."""


@cute.jit
def turn_values(spec: cutlass.Constexpr, rings: tuple, tiles: tuple, todo: tuple):
    """Every block of V that this CTA's work tiles visit, from one ring to the other.

    rings, tiles: of V as it is loaded, and as it is multiplied. `todo` as for `sm90_mma.consume`.
    """
    work, queue = todo
    queue_state = consumer_state(tile_queue.STAGES)
    raw_ring, v_ring = rings
    raw, values = (tile.iterator.toint() for tile in tiles)
    raw_state, v_state = consumer_state(spec.raw_stages), producer_state(spec.stages)
    thread = cute.arch.thread_idx()[0] - (spec.threads - THREADS)
    number, end = first_tile(work, queue, queue_state)
    while number < end:
        _, visit = tile_at(spec, work, number, queue, queue_state)
        if cutlass.const_expr(queue is not None):
            queue_state.advance()
        for _ in cutlass.range(visit.count, unroll=1):
            raw_ring.consumer_wait(raw_state)
            v_ring.sync_object_empty.wait(v_state.index, v_state.phase)
            source = raw + raw_state.index * spec.v_bytes
            target = values + v_state.index * spec.v_bytes
            turn_block((spec.tile_n, spec.dim_v), source, target, thread, THREADS)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            raw_ring.consumer_release(raw_state)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(v_ring.producer_get_barrier(v_state))
            raw_state.advance()
            v_state.advance()
        number = next_tile(number, queue, queue_state)


@cute.jit
def turn_block(
    shape: cutlass.Constexpr, source: Int32, target: Int32, thread: Int32, threads: cutlass.Constexpr
):
    """One thread's share of a block, `shape` keys and columns, between addresses in shared memory."""
    keys, columns = shape
    quads = cutlass.const_expr(columns // COLUMNS)
    for unit in cutlass.range(thread, quads * keys // V_STEP, threads, unroll=1):
        turn_unit(shape, source, target, unit % quads, unit // quads)


def turn_unit(shape: tuple[int, int], source: Int32, target: Int32, quad: Int32, group: Int32) -> None:
    """Columns 4 `quad` … 4 `quad` + 3 of keys 16 `group` … 16 `group` + 15."""
    keys, columns = shape
    first, span = place((keys, columns), group * V_STEP, quad * COLUMNS)
    words = []
    for key in range(V_STEP):
        address = source + (first ^ flip(span, key)) + key * span
        words.append(cute.make_tensor(shared_pointer(Int32, address, 4), cute.make_layout(1))[0])
    turned = [transposed([words[2 * c + n] for n in (0, 1, 8, 9)]) for c in range(4)]
    first, span = place((columns, keys), quad * COLUMNS, group * V_STEP)
    vector = cute.make_rmem_tensor(4, Int32)
    for column in range(COLUMNS):
        for c in range(4):
            vector[c] = turned[c][column]
        address = target + (first ^ flip(span, column)) + column * span
        cute.autovec_copy(vector, cute.make_tensor(shared_pointer(Int32, address, 16), cute.make_layout(4)))


def place(shape: tuple[int, int], row: Int32, column: Int32) -> tuple[Int32, int]:
    """Byte offset in a tile of bytes (rows, contiguous) of `staged_smem_layout`, and its swizzle's span.

    Row `row` + r, with `row` a multiple of a power of two above r, is at (offset ^ flip(span, r)) + r * span.
    """
    rows, width = shape
    span = next(span for span, _, _ in SWIZZLES if width % span == 0)
    offset = (column // span * rows + row) * span + column % span
    return offset ^ flip(span, row), span


def flip(span: int, row):
    """What the place in a row is exclusive-ored with."""
    return (row * span >> 3) & (span - 16)
