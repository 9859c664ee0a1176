"""One query tile of the SM80-class forward pass: copies, both products, the softmax between them, the output.

Shared memory holds Q, two buffers of K and two of V; the output is staged over Q. A step starts the copies
of the next blocks, then reads its own by ldmatrix, see `forward_sm80` for the timeline. With `config.overlap`
the output of a block is summed a step later, and V is copied a step later than K.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.kv_blocks import Visit, block_at, visit_tile
from kernels_dsl.blocks.attention.pages import PagedRowsLoader, first_visible, paged_loader
from kernels_dsl.blocks.attention.query_tiles import QueryTile
from kernels_dsl.blocks.attention.score_tile import ScoreBlock, Tile, change_and_mask, to_operand
from kernels_dsl.blocks.attention.seqlen import V_STEP, SeqInfo, padded_start
from kernels_dsl.blocks.attention.softmax_steps import (
    convert_output_units,
    descaled,
    enter_block,
    exponentiate,
    fetch_descales,
    fetch_first_descales,
    finish_rows,
    in_block_units,
    start_rows,
)
from kernels_dsl.blocks.attention.work import Operands, Work, kv_head
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
    RowsTile,
    reader_a,
    reader_b,
    reader_b_transposed,
    rows_loader,
    store_rows,
)

from .forward_sm80_spec import ForwardSpec, Spec


class Fragments(NamedTuple):
    """A thread's part of its warp's rows; the last four are `softmax_steps.Rows`."""

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
    """(4,) where fp8 operands have factors a block of keys."""


class Memory(NamedTuple):
    """Copies of this thread to shared memory, and its reads from there."""

    base: Int32
    """Address of the CTA's shared memory: Q, two buffers of K, two of V."""
    load_k: RowsLoader | PagedRowsLoader
    load_v: RowsLoader | PagedRowsLoader
    read_q: MatrixReader
    read_k: MatrixReader
    read_v: MatrixReader
    v_dim: Int32
    """Rows of V's transpose, where fp8 operands have it."""


class KeyBlock(NamedTuple):
    """A block of keys that a tile visits."""

    number: Int32
    """In its sequence."""
    position: Int32
    """In the visit, which decides between the two buffers."""


@cute.jit
def work_tile(
    spec: Spec,
    operands: Operands,
    base: Int32,  # address of the CTA's shared memory
    work: Work,
    at: QueryTile,
    seq: SeqInfo,
):
    """One query tile, from its first copies to its output."""
    work = descaled(work, at)
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    visit = visit_tile(spec.variant, spec.tile, at, seq, work.window, work.lists)
    warp_row = warp * spec.warp_rows
    tile = Tile(at, seq, visit, at.m * spec.tile_m + warp_row + lane // 4, lane % 4 * 2)
    mQ, mK, mV, mO = rows_of_tile(spec, operands, at, seq, work)
    memory = Memory(
        base,
        rows_loader(spec.k_tile, mK, spec.threads, thread)
        if work.pages is None
        else pages_loader(spec, spec.k_tile, mK, work, at, seq),
        values_loader(spec, mV, seq, thread)
        if work.pages is None
        else pages_loader(spec, spec.v_tile, mV, work, at, seq),
        reader_a(spec.q_tile, spec.unit, lane, warp_row),
        reader_b(spec.k_tile, spec.unit, lane),
        reader_b(spec.v_tile, spec.unit, lane)
        if spec.fp8
        else reader_b_transposed(spec.v_tile, spec.unit, lane),
        work.v_dim,
    )
    load_q = rows_loader(spec.q_tile, mQ, spec.threads, thread)
    load_q.start(at.m * spec.tile_m, seq.q_len, base, True)
    fragments = make_fragments(spec)
    attend(spec, memory, fragments, tile, work)
    if cutlass.const_expr(spec.scales_by_block):
        work = in_block_units(work, fragments)
    finish_rows(spec, fragments.out, fragments, tile, work)

    result = cute.make_rmem_tensor_like(fragments.out, mO.element_type)
    result.store(fragments.out.load().to(mO.element_type))
    cute.arch.sync_threads()  # the output is staged in what other warps may still read as Q
    staging = base + warp * spec.o_tile.bytes
    store_rows(result, spec.o_tile, staging, mO, at.m * spec.tile_m + warp_row, seq.q_len, lane)


def rows_of_tile(spec: ForwardSpec, operands: Operands, at: QueryTile, seq: SeqInfo, work: Work) -> Operands:
    """Q, K, V, O (rows, dim) of the tile's head and sequence; K and V in pages (keys of one, dim, pages)."""
    batch = at.batch
    shared = kv_head(at.head, work.heads_per_kv)
    if spec.paged:
        first_query = (seq.q_start, 0, 0, 0)
        mQ = cute.domain_offset(first_query, operands.q)[None, None, at.head, 0]
        mO = cute.domain_offset(first_query, operands.o)[None, None, at.head, 0]
        return Operands(mQ, operands.k[None, None, shared, None], operands.v[None, None, shared, None], mO)
    if spec.varlen:
        first_value = (seq.k_start, 0, 0, 0)
        if spec.fp8:  # pairs of keys
            first_value = (0, padded_start(seq.k_start, batch) // 2, 0, 0)
        batch = Int32(0)
        operands = Operands(
            cute.domain_offset((seq.q_start, 0, 0, 0), operands.q),
            cute.domain_offset((seq.k_start, 0, 0, 0), operands.k),
            cute.domain_offset(first_value, operands.v),
            cute.domain_offset((seq.q_start, 0, 0, 0), operands.o),
        )
    heads = (at.head, shared, shared, at.head)
    return Operands(*(t[None, None, head, batch] for head, t in zip(heads, operands)))


def pages_loader(
    spec: ForwardSpec, tile: RowsTile, tensor: cute.Tensor, work: Work, at: QueryTile, seq: SeqInfo
) -> PagedRowsLoader:
    """The copies of K or V (keys of a page, columns, pages), of none that no query of the tile sees."""
    assert work.pages is not None
    first = first_visible(spec.variant, work.window, at.m * spec.tile_m, seq)
    thread = cute.arch.thread_idx()[0]
    return paged_loader(tile, tensor, spec.threads, thread, work.pages, at.batch, first)


def values_loader(spec: ForwardSpec, mV: cute.Tensor, seq: SeqInfo, thread: Int32) -> RowsLoader:
    """The copies of V (keys, Dv), or of its transpose (Dv, pairs of keys), which ends after whole V_STEP."""
    load = rows_loader(spec.v_tile, mV, spec.threads, thread)
    if spec.fp8:
        return replace(load, columns=(seq.k_len + V_STEP - 1) // V_STEP * (V_STEP // 2))
    return load


def make_fragments(spec: ForwardSpec) -> Fragments:
    """Registers of one warp's rows, not yet filled."""
    rows = spec.warp_rows
    q = warp_operand_a(rows, spec.dim, spec.dtype) if spec.config.q_registers else None
    per_row = cute.make_layout(rows // 8)
    row_max, row_sum, correction = (cute.make_rmem_tensor(per_row, Float32) for _ in range(3))
    return Fragments(
        q,
        warp_operand_a(rows, spec.tile_n, spec.dtype),
        warp_accumulators(rows, spec.dim_v),
        row_max,
        row_sum,
        correction,
        cute.make_rmem_tensor(4, Float32) if spec.scales_by_block else None,
    )


@cute.jit
def attend(spec: Spec, memory: Memory, fragments: Fragments, tile: Tile, work: Work):
    """Unnormalised output, row maxima and sums of one query tile, over the key blocks of its visit."""
    visit = tile.visit
    fragments.out.fill(0.0)
    fragments.row_max.fill(-math.inf)
    fragments.row_sum.fill(0.0)
    if cutlass.const_expr(spec.scales_by_block):
        start_rows(spec, fragments, tile, fetch_first_descales(spec, fragments, tile, work))
    else:
        start_rows(spec, fragments, tile, work)
    first = block_at(spec.variant, visit, tile.at, work.lists, Int32(0))
    start_keys(spec, memory, KeyBlock(first, Int32(0)), visit.k_len, True)
    if cutlass.const_expr(not spec.config.overlap):
        start_values(spec, memory, KeyBlock(first, Int32(0)), visit.k_len, True)
    cute.arch.cp_async_commit_group()
    if cutlass.const_expr(spec.config.q_registers):
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for k in cutlass.range_constexpr(spec.dim_steps):
            read_q(spec, memory, k, fragments.q[None, None, k])

    block, begin = first, Int32(0)
    if cutlass.const_expr(spec.config.overlap):
        block, begin = step(spec, memory, fragments, tile, work, KeyBlock(block, begin), True), Int32(1)
    for position in cutlass.range(begin, visit.count, unroll=1):
        block = step(spec, memory, fragments, tile, work, KeyBlock(block, position), False)
    if cutlass.const_expr(spec.config.overlap):
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        add_output(spec, memory, fragments, visit.count - 1)


def start_keys(spec: ForwardSpec, memory: Memory, block: KeyBlock, k_len: Int32, guard: bool) -> None:
    """Starts the copy of a block of K to its buffer. `guard`: it may reach past the end of the keys."""
    load = memory.load_k
    buffer = memory.base + spec.k_offset + block.position % 2 * load.tile.bytes
    load.start(block.number * spec.tile_n, k_len, buffer, guard)


def start_values(spec: ForwardSpec, memory: Memory, block: KeyBlock, k_len: Int32, guard: bool) -> None:
    """Starts the copy of a block of V; of its transpose the columns of the block, from all rows."""
    load = memory.load_v
    buffer = memory.base + spec.v_offset + block.position % 2 * load.tile.bytes
    if not spec.fp8:
        load.start(block.number * spec.tile_n, k_len, buffer, guard)
        return
    columns = block.number * (spec.tile_n // 2)
    moved = replace(load, source=load.source + Int64(2 * columns), columns=load.columns - columns)
    moved.start(Int32(0), memory.v_dim, buffer, True)


@cute.jit
def step(
    spec: Spec,
    memory: Memory,
    fragments: Fragments,
    tile: Tile,
    work: Work,
    block: KeyBlock,
    first: cutlass.Constexpr[bool],
) -> Int32:
    """Takes one block of keys into the output, with copies of the next in flight. Returns the next block's
    number."""
    position = block.position
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    following = start_next_copies(spec, memory, tile, work, block, first)
    scores = warp_accumulators(spec.warp_rows, spec.tile_n)
    scores.fill(0.0)
    add_scores(spec, memory, fragments, scores, position)
    masked = needs_mask(spec, tile.visit, position)
    if cutlass.const_expr(spec.scales_by_block):
        work = enter_block(spec, fragments, work)
    change_and_mask(spec, scores, ScoreBlock(tile, work, (block.number,)), masked)
    if cutlass.const_expr(spec.config.overlap and not first):
        add_output(spec, memory, fragments, position - 1)
    exponentiate(spec, scores, fragments, work, masked, False)
    if cutlass.const_expr(spec.scales_by_block):
        convert_output_units(fragments)
        fetch_descales(spec, fragments, tile, work, position + 1)
    out = softmax.rows_and_columns(fragments.out)
    if cutlass.const_expr(spec.lazy_rescale):
        softmax.rescale_where_needed(out, fragments.correction)
    else:
        softmax.rescale(out, fragments.correction)
    to_operand(scores, fragments.p)
    if cutlass.const_expr(not spec.config.overlap):
        add_output(spec, memory, fragments, position)
    return following


def needs_mask(spec: ForwardSpec, visit: Visit, position: Int32) -> bool | Boolean:
    """True where the block at `position` lies in a masked segment of the visit; of a range, also the first.

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
    spec: Spec, memory: Memory, tile: Tile, work: Work, block: KeyBlock, first: cutlass.Constexpr[bool]
) -> Int32:
    """Starts the copies that the next step waits for. Returns the number of its block of keys.

    In a range only the first block can reach past the end of the keys; in a list any block.
    """
    visit, listed = tile.visit, spec.variant.lists is not None
    following = block.number
    if cutlass.const_expr(spec.config.overlap):
        start_values(spec, memory, block, visit.k_len, listed or first)
    if block.position + 1 < visit.count:
        following = block_at(spec.variant, visit, tile.at, work.lists, block.position + 1)
        next_block = KeyBlock(following, block.position + 1)
        start_keys(spec, memory, next_block, visit.k_len, listed)
        if cutlass.const_expr(not spec.config.overlap):
            start_values(spec, memory, next_block, visit.k_len, listed)
    cute.arch.cp_async_commit_group()
    return following


def read_q(spec: ForwardSpec, memory: Memory, k: int, into: cute.Tensor) -> None:
    """Q's fragments ((2, 2, 2), M) of one K step, of 16 columns of the tile."""
    for m in range(spec.warp_rows // 16):
        memory.read_q.read(memory.base, 16 * m, 16 * k, into[None, m])


def add_scores(
    spec: ForwardSpec, memory: Memory, fragments: Fragments, scores: cute.Tensor, position: Int32
) -> None:
    """scores += Q K^T for the block in the buffer of `position`."""
    address = memory.base + spec.k_offset + position % 2 * spec.k_tile.bytes
    read: dict[int, cute.Tensor] = {}

    def operand_a(k: int) -> cute.Tensor:
        if fragments.q is not None:
            return fragments.q[None, None, k]
        if k not in read:
            read[k] = warp_operand_a(spec.warp_rows, mma_k(spec.dtype), spec.dtype)[None, None, 0]
            read_q(spec, memory, k, read[k])
        return read[k]

    def read_k(k: int, n: int, into: cute.Tensor) -> None:
        operand_a(k)  # is read before K's fragments of the same step
        memory.read_k.read(address, 16 * n, 16 * k, into)

    steps = (spec.dim_steps, spec.tile_n // 16)
    mma = make_tiled_mma(spec.dtype, 1, 1)
    warp_product(mma, scores, operand_a, read_k, steps, spec.config.ahead, spec.dtype)


def add_output(spec: ForwardSpec, memory: Memory, fragments: Fragments, position: Int32) -> None:
    """out += P V for the block in the buffer of `position`."""
    address = memory.base + spec.v_offset + position % 2 * spec.v_tile.bytes

    def read_v(k: int, n: int, into: cute.Tensor) -> None:
        row, column = (16 * n, 16 * k) if spec.fp8 else (16 * k, 16 * n)
        memory.read_v.read(address, row, column, into)

    steps = (spec.key_steps, spec.dim_v // 16)
    mma = make_tiled_mma(spec.dtype, 1, 1)
    warp_product(
        mma, fragments.out, lambda k: fragments.p[None, None, k], read_v, steps, spec.config.ahead, spec.dtype
    )
