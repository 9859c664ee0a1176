"""Last kernel of an attention backward: dQ from its float32 sums, scaled and in order."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.seqlen import SeqExtent, seq_info
from kernels_dsl.blocks.attention.work import LAYOUTS, rows_first
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.vectors import PAIRS, eight_columns, vector_at

from .backward_work import (
    SHARE_THREADS,
    TURN_WORDS,
    VECTOR,
    RowTiles,
    first_element,
    query_grid,
    vector_pointer,
)


@cute.jit
def finish_dq(
    dq_sums: cute.Tensor,  # float32, see `SumsOfTile`
    turns: cute.Tensor | None,  # None where sums were cleared before
    dq: cute.Tensor,
    scale: Float32,
    cu_q: cute.Tensor | None,
    max_q: Int32,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    tile: cutlass.Constexpr,  # (rows of a query tile, columns of dQ)
    order: cutlass.Constexpr,
):
    """Launches the kernel. dq: 16 bits an element, rows on 16 bytes, contiguous head dimension."""
    mdQ = rows_first(dq, LAYOUTS[layout])
    grid = query_grid(mdQ, cu_q, max_q, tile[0])
    kernel = finish_kernel(dq_sums, turns, mdQ, scale, grid.extent, grid.tiles, tile, order)
    threads = tile[0] * tile[1] // order.size * SHARE_THREADS
    kernel.launch(grid=grid.shape, block=(threads, 1, 1), stream=stream, preferred_smem_carveout=0)


@entry_name("attention_backward_finish")
@cute.kernel
def finish_kernel(
    sums: cute.Tensor,
    turns: cute.Tensor | None,
    mdQ: cute.Tensor,  # (rows, D, heads, B)
    scale: Float32,
    extent: SeqExtent,
    tiles: RowTiles,
    tile: cutlass.Constexpr,
    order: cutlass.Constexpr,
):
    """One query tile of one head."""
    block, head, batch = cute.arch.block_idx()
    varlen = cutlass.const_expr(extent.cu_q is not None)
    seq = seq_info(extent, batch)
    if cutlass.const_expr(not varlen) or block * tile[0] < seq.q_len:
        number = tiles.number(tile[0], varlen, seq, batch, head, block)
        image = Int32(0) if varlen else batch
        target = cute.domain_offset((seq.q_start, 0), mdQ[None, None, head, image])
        thread = cute.arch.thread_idx()[0]
        share = thread // SHARE_THREADS
        thread = thread % SHARE_THREADS
        row, column = first_element(order, share, thread)
        row = row + block * tile[0]
        shares = tile[0] * tile[1] // order.size
        start = vector_pointer(order, sums, number * shares + share, thread)
        found = cute.make_rmem_tensor(VECTOR * order.vectors, Float32)
        if cutlass.const_expr(turns is not None):
            visits = turns[number * 2 * TURN_WORDS]
        # All loads come before the first store, which they could not pass.
        for i in cutlass.range_constexpr(0, VECTOR * order.vectors, order.vector):
            vector = (start + i * SHARE_THREADS).align(4 * order.vector)
            side_by_side = cute.make_layout(order.vector)
            cute.autovec_copy(
                cute.make_tensor(vector, side_by_side), cute.make_tensor(found.iterator + i, side_by_side)
            )
        if cutlass.const_expr(turns is not None):
            if visits == 0:  # nobody has stored anything
                found.fill(0.0)
        kept = target.element_type
        for first in cutlass.range_constexpr(0, order.vectors, PAIRS):
            at_column = column + 8 * (first + thread % PAIRS)
            for r in cutlass.range_constexpr(2):
                pairs = cute.make_rmem_tensor(2 * PAIRS, kept)
                for i in cutlass.range_constexpr(2 * PAIRS):
                    value = found[VECTOR * (first + i // 2) + 2 * r + i % 2]
                    pairs[i] = (value * scale).to(kept)
                words = cute.recast_tensor(pairs, Int32)
                moved = eight_columns([words[i] for i in range(PAIRS)], thread)
                for i in cutlass.range_constexpr(PAIRS):
                    words[i] = moved[i]
                if row + 8 * r < seq.q_len and at_column < mdQ.shape[1]:
                    cute.autovec_copy(pairs, vector_at(target, (row + 8 * r, at_column), 2 * PAIRS))
