"""One query tile of the SM80-class attention: copies, both products, the softmax between them, the output."""

import math
from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.kv_blocks import Visit, block_at, visit_tile
from kernels_dsl.blocks.attention.query_tiles import QueryTile
from kernels_dsl.blocks.attention.score_tile import (
    Tile,
    change_and_mask,
    descaled,
    enter_block,
    exponentiate,
    fetch_descales,
    finish_rows,
    of_block,
    start_rows,
    take_values,
    to_operand,
)
from kernels_dsl.blocks.attention.seqlen import V_STEP, SeqInfo, padded_start
from kernels_dsl.blocks.attention.work import Work, kv_head
from kernels_dsl.blocks.hw.mma_sync import (
    make_tiled_mma,
    mma_k,
    warp_accumulators,
    warp_operand_a,
    warp_product,
)
from kernels_dsl.blocks.hw.swizzled_rows import (
    MatrixReader,
    RowsLoader,
    reader_a,
    reader_b,
    reader_b_transposed,
    rows_loader,
    store_rows,
)


class Registers(NamedTuple):
    """A thread's part of its warp's rows."""

    q: cute.Tensor | None
    """((2, 2, 2), M, K) of Q where it stays in registers."""
    p: cute.Tensor
    """((2, 2, 2), M, K) of the probabilities, of the operands' type."""
    out: cute.Tensor
    """((2, 2), M, N) float32 accumulators of the output."""
    row_max: cute.Tensor
    row_sum: cute.Tensor
    correction: cute.Tensor
    scales: cute.Tensor | None
    """(4,) where fp8 operands have factors a block of keys, see `score_tile.Rows`."""


class Memory(NamedTuple):
    """Where this thread copies to and reads from."""

    base: Int32
    """Address of the CTA's shared memory: Q, two buffers of K, two of V."""
    load_k: RowsLoader
    load_v: RowsLoader
    read_q: MatrixReader
    read_k: MatrixReader
    read_v: MatrixReader
    v_dim: Int32
    """Rows of V's transpose, where fp8 operands have it."""


@cute.jit
def work_tile(
    spec: cutlass.Constexpr,
    tensors: tuple,  # Q, K, V, O (rows, dim, head, batch)
    base: Int32,
    place: tuple,  # (work, coordinates of the tile, sequence)
):
    """One query tile, from its first copies to its output."""
    work, at, seq = place
    work = descaled(work, at)
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    visit = visit_tile(spec.variant, spec.tile, at, seq, work.window, work.lists)
    warp_row = warp * spec.warp_rows
    tile = Tile(at, seq, visit, at.m * spec.tile_m + warp_row + lane // 4, lane % 4 * 2)
    mQ, mK, mV, mO = rows_of_tile(spec, tensors, at, seq, work)
    memory = Memory(
        base,
        rows_loader(spec.k_tile, mK, spec.threads, thread),
        values_loader(spec, mV, seq, thread),
        reader_a(spec.q_tile, spec.unit, lane, warp_row),
        reader_b(spec.k_tile, spec.unit, lane),
        reader_b(spec.v_tile, spec.unit, lane)
        if spec.fp8
        else reader_b_transposed(spec.v_tile, spec.unit, lane),
        work.v_dim,
    )
    load_q = rows_loader(spec.q_tile, mQ, spec.threads, thread)
    load_q.start(at.m * spec.tile_m, seq.q_len, base, True)
    registers = make_registers(spec)
    attend(spec, memory, registers, tile, work)
    if cutlass.const_expr(spec.scales_blocks):
        work = of_block(work, registers)
    finish_rows(spec, registers.out, registers, tile, work)

    result = cute.make_rmem_tensor_like(registers.out, mO.element_type)
    result.store(registers.out.load().to(mO.element_type))
    cute.arch.sync_threads()  # the output is staged in what other warps may still read as Q
    staging = base + warp * spec.o_tile.bytes
    store_rows(result, spec.o_tile, staging, mO, (at.m * spec.tile_m + warp_row, seq.q_len), lane)


def rows_of_tile(spec, tensors: tuple, at: QueryTile, seq: SeqInfo, work: Work) -> tuple:
    """Q, K, V, O (rows, dim) of the tile's head and sequence."""
    batch = at.batch
    starts = (seq.q_start, seq.k_start, seq.k_start, seq.q_start)
    if spec.varlen:
        places = [(start, 0, 0, 0) for start in starts]
        if spec.fp8:  # pairs of keys
            places[2] = (0, padded_start(seq.k_start, batch) // 2, 0, 0)
        batch = Int32(0)
        tensors = tuple(cute.domain_offset(place, t) for place, t in zip(places, tensors))
    shared = kv_head(at.head, work.heads_per_kv)
    heads = (at.head, shared, shared, at.head)
    return tuple(t[None, None, head, batch] for head, t in zip(heads, tensors))


def values_loader(spec, mV: cute.Tensor, seq: SeqInfo, thread: Int32) -> RowsLoader:
    """The copies of V (keys, Dv), or of its transpose (Dv, pairs of keys), which ends after whole V_STEP."""
    load = rows_loader(spec.v_tile, mV, spec.threads, thread)
    if spec.fp8:
        return replace(load, columns=(seq.k_len + V_STEP - 1) // V_STEP * (V_STEP // 2))
    return load


def make_registers(spec) -> Registers:
    """Registers of one warp's rows, not yet filled."""
    rows = spec.warp_rows
    q = warp_operand_a(rows, spec.dim, spec.dtype) if spec.config.q_registers else None
    per_row = cute.make_layout(rows // 8)
    row_max, row_sum, correction = (cute.make_rmem_tensor(per_row, Float32) for _ in range(3))
    return Registers(
        q,
        warp_operand_a(rows, spec.tile_n, spec.dtype),
        warp_accumulators(rows, spec.dim_v),
        row_max,
        row_sum,
        correction,
        cute.make_rmem_tensor(4, Float32) if spec.scales_blocks else None,
    )


@cute.jit
def attend(spec: cutlass.Constexpr, memory: Memory, registers: Registers, tile: Tile, work: Work):
    """Unnormalised output, row maxima and sums of one query tile, over the key blocks of its visit."""
    visit = tile.visit
    registers.out.fill(0.0)
    registers.row_max.fill(-math.inf)
    registers.row_sum.fill(0.0)
    if cutlass.const_expr(spec.scales_blocks):
        fetch_descales(spec, registers, tile, work, Int32(0))
        registers.scales[0], registers.scales[1] = registers.scales[2], registers.scales[3]
        start_rows(spec, registers, tile, of_block(work, registers))
    else:
        start_rows(spec, registers, tile, work)
    first = block_at(spec.variant, visit, tile.at, work.lists, Int32(0))
    start_copy(spec, memory.load_k, memory.base + spec.k_place, (first, Int32(0)), visit.k_len, True)
    if cutlass.const_expr(not spec.config.overlap):
        start_values(spec, memory, (first, Int32(0)), visit.k_len, True)
    cute.arch.cp_async_commit_group()
    if cutlass.const_expr(spec.config.q_registers):
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for k in cutlass.range_constexpr(spec.dim_steps):
            read_q(spec, memory, k, registers.q[None, None, k])

    block, begin = first, Int32(0)
    if cutlass.const_expr(spec.config.overlap):
        block, begin = step(spec, memory, registers, (tile, work, block, begin), True), Int32(1)
    for position in cutlass.range(begin, visit.count, unroll=1):
        block = step(spec, memory, registers, (tile, work, block, position), False)
    if cutlass.const_expr(spec.config.overlap):
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        add_output(spec, memory, registers, visit.count - 1)


def start_copy(spec, load: RowsLoader, ring: Int32, place: tuple, k_len: Int32, guard: bool) -> None:
    """Starts the copy of key block place[0] to the buffer of position place[1]."""
    block, position = place
    load.start(block * spec.tile_n, k_len, ring + position % 2 * load.tile.bytes, guard)


def start_values(spec, memory: Memory, place: tuple, k_len: Int32, guard: bool) -> None:
    """`start_copy` of V; of its transpose the columns of the key block, from all rows."""
    ring = memory.base + spec.v_place
    if not spec.fp8:
        start_copy(spec, memory.load_v, ring, place, k_len, guard)
        return
    block, position = place
    load = memory.load_v
    columns = block * (spec.tile_n // 2)
    moved = replace(load, source=load.source + Int64(2 * columns), columns=load.columns - columns)
    moved.start(Int32(0), memory.v_dim, ring + position % 2 * load.tile.bytes, True)


@cute.jit
def step(
    spec: cutlass.Constexpr,
    memory: Memory,
    registers: Registers,
    place: tuple,  # (tile, work, key block, its position)
    first: cutlass.Constexpr,
) -> Int32:
    """Takes one key block into the output, with copies of the next on their way. Returns the next block."""
    tile, work, block, position = place
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    following = start_next_copies(spec, memory, place, first)
    scores = warp_accumulators(spec.warp_rows, spec.tile_n)
    scores.fill(0.0)
    add_scores(spec, memory, registers, scores, position)
    masked = needs_mask(spec, tile.visit, position)
    if cutlass.const_expr(spec.scales_blocks):
        work = enter_block(spec, registers, work)
    change_and_mask(spec, scores, (tile, work, block), masked)
    if cutlass.const_expr(spec.config.overlap and not first):
        add_output(spec, memory, registers, position - 1)
    exponentiate(spec, scores, registers, work, masked, False)
    if cutlass.const_expr(spec.scales_blocks):
        take_values(registers)
        fetch_descales(spec, registers, tile, work, position + 1)
    out = softmax.rows_and_columns(registers.out)
    if cutlass.const_expr(spec.lazy_rescale):
        softmax.rescale_where_needed(out, registers.correction)
    else:
        softmax.rescale(out, registers.correction)
    to_operand(spec, scores, registers.p)
    if cutlass.const_expr(not spec.config.overlap):
        add_output(spec, memory, registers, position)
    return following


def needs_mask(spec, visit: Visit, position: Int32):
    """Whether the block at `position` lies in a masked segment of the visit; of a range, also the first.

    Whole blocks of a list are not masked, whatever the variant.
    """
    if spec.variant.masks_everywhere and spec.variant.lists is None:
        return True
    masked = position < visit.right
    if spec.variant.lists is None:
        masked = masked | (position == 0)
    if spec.variant.left:
        masked = masked | (position >= visit.right + visit.whole)
    return masked


@cute.jit
def start_next_copies(
    spec: cutlass.Constexpr, memory: Memory, place: tuple, first: cutlass.Constexpr
) -> Int32:
    """Starts the copies that the next step waits for. Returns the key block of the next position.

    In a range only the first block can reach past the end of the keys; in a list any block.
    """
    tile, work, block, position = place
    k_ring = memory.base + spec.k_place
    visit = tile.visit
    listed = spec.variant.lists is not None
    following = block
    if cutlass.const_expr(spec.config.overlap):
        start_values(spec, memory, (block, position), visit.k_len, listed or first)
    if position + 1 < visit.count:
        following = block_at(spec.variant, visit, tile.at, work.lists, position + 1)
        start_copy(spec, memory.load_k, k_ring, (following, position + 1), visit.k_len, listed)
        if cutlass.const_expr(not spec.config.overlap):
            start_values(spec, memory, (following, position + 1), visit.k_len, listed)
    cute.arch.cp_async_commit_group()
    return following


def read_q(spec, memory: Memory, k: int, into: cute.Tensor) -> None:
    """Q's fragments ((2, 2, 2), M) of one K step, of 16 columns of the tile."""
    for m in range(spec.warp_rows // 16):
        memory.read_q.read(memory.base, 16 * m, 16 * k, into[None, m])


def add_scores(spec, memory: Memory, registers: Registers, scores: cute.Tensor, position: Int32) -> None:
    """scores += Q K^T for the block in the buffer of `position`."""
    address = memory.base + spec.k_place + position % 2 * spec.k_tile.bytes
    fragments: dict[int, cute.Tensor] = {}

    def operand_a(k: int) -> cute.Tensor:
        if registers.q is not None:
            return registers.q[None, None, k]
        if k not in fragments:
            fragments[k] = warp_operand_a(spec.warp_rows, mma_k(spec.dtype), spec.dtype)[None, None, 0]
            read_q(spec, memory, k, fragments[k])
        return fragments[k]

    def read_k(k: int, n: int, into: cute.Tensor) -> None:
        operand_a(k)  # is read before K's fragments of the same step
        memory.read_k.read(address, 16 * n, 16 * k, into)

    steps = (spec.dim_steps, spec.tile_n // 16)
    mma = make_tiled_mma(spec.dtype, 1, 1)
    warp_product(mma, scores, operand_a, read_k, steps, spec.config.ahead, spec.dtype)


def add_output(spec, memory: Memory, registers: Registers, position: Int32) -> None:
    """out += P V for the block in the buffer of `position`."""
    address = memory.base + spec.v_place + position % 2 * spec.v_tile.bytes

    def read_v(k: int, n: int, into: cute.Tensor) -> None:
        row, column = (16 * n, 16 * k) if spec.fp8 else (16 * k, 16 * n)
        memory.read_v.read(address, row, column, into)

    steps = (spec.key_steps, spec.dim_v // 16)
    mma = make_tiled_mma(spec.dtype, 1, 1)
    warp_product(
        mma, registers.out, lambda k: registers.p[None, None, k], read_v, steps, spec.config.ahead, spec.dtype
    )
