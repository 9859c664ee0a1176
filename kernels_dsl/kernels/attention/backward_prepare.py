"""First kernel of an attention backward: the sums of dO * O along rows, and clean sums of dQ.

A CTA has a query tile of one head: eight threads a row. It leaves the log-sum-exp in base 2, with +inf where
a row has no key or does not exist, so that the probabilities there become 0 without a mask.
"""

import math
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.seqlen import SeqExtent, seq_info
from kernels_dsl.blocks.attention.softmax import LOG2_E
from kernels_dsl.blocks.attention.work import LAYOUTS, rows_first
from kernels_dsl.blocks.hw.dsl import choose, entry_name

from .backward_work import TURN_WORDS, VECTOR, RowTiles, Sums, query_grid

THREADS = 128
LANES = 8
"""Threads of one row."""
ELEMENTS = 8
"""Elements that a thread loads at a time: 16 bytes."""


class Rows(NamedTuple):
    """Results of the forward pass and their gradients: (rows, Dv, heads, B); (B, H, Sq) or packed (H, T)."""

    o: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor
    d_lse: cute.Tensor | None


@cute.jit
def prepare_backward(
    o: cute.Tensor,
    do: cute.Tensor,
    lse: cute.Tensor,
    d_lse: cute.Tensor | None,
    lse_2: cute.Tensor,  # float32 (rows), see `Sums`
    row_sums: cute.Tensor,
    dq_sums: cute.Tensor | None,
    turns: cute.Tensor | None,
    cu_q: cute.Tensor | None,
    max_q: Int32,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    tile: cutlass.Constexpr,  # (rows of a query tile, columns of dQ)
):
    """Launches the kernel. o, do: contiguous head dimensions, 16-byte aligned base and strides."""
    mO, mdO = rows_first(o, LAYOUTS[layout]), rows_first(do, LAYOUTS[layout])
    grid = query_grid(mO, cu_q, max_q, tile[0])
    rows, sums = Rows(mO, mdO, lse, d_lse), Sums(lse_2, row_sums, dq_sums, turns)
    kernel = prepare_kernel(rows, sums, grid.extent, grid.tiles, tile)
    kernel.launch(grid=grid.shape, block=(THREADS, 1, 1), stream=stream, preferred_smem_carveout=0)


@entry_name("attention_backward_prepare")
@cute.kernel
def prepare_kernel(rows: Rows, sums: Sums, extent: SeqExtent, tiles: RowTiles, tile: cutlass.Constexpr):
    """One query tile of one head."""
    block, head, batch = cute.arch.block_idx()
    varlen = cutlass.const_expr(extent.cu_q is not None)
    seq = seq_info(extent, batch)
    if cutlass.const_expr(not varlen) or block * tile[0] < seq.q_len:
        number = tiles.number(tile[0], varlen, seq, batch, head, block)
        image = Int32(0) if varlen else batch
        mO = cute.domain_offset((seq.q_start, 0), rows.o[None, None, head, image])
        mdO = cute.domain_offset((seq.q_start, 0), rows.do[None, None, head, image])
        thread = cute.arch.thread_idx()[0]
        for first in cutlass.range_constexpr(0, tile[0], THREADS // LANES):
            r = first + thread // LANES
            row = block * tile[0] + r
            total, lse = Float32(0.0), Float32(math.inf)
            if row < seq.q_len:
                total = partial_dot(mO, mdO, row, thread % LANES)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=LANES)
            if thread % LANES == 0:
                if row < seq.q_len:
                    found = row_value(rows.lse, varlen, batch, head, seq.q_start + row)
                    lse = choose(found == Float32(-math.inf), Float32(math.inf), found * LOG2_E)
                    if cutlass.const_expr(rows.d_lse is not None):
                        total = total - row_value(rows.d_lse, varlen, batch, head, seq.q_start + row)
                sums.lse[number * tile[0] + r] = lse
                sums.row_sums[number * tile[0] + r] = total
        if cutlass.const_expr(sums.dq is not None):
            clear_sums(sums.dq, number, tile, thread)
        if cutlass.const_expr(sums.turns is not None):
            if thread < 2 * TURN_WORDS:
                sums.turns[number * 2 * TURN_WORDS + thread] = Int32(0)


def row_value(values: cute.Tensor, varlen: bool, batch: Int32, head: Int32, row: Int32) -> Float32:
    """One number of (B, H, Sq), or packed (H, T)."""
    return values[head, row] if varlen else values[batch, head, row]


@cute.jit
def partial_dot(mO: cute.Tensor, mdO: cute.Tensor, row: Int32, lane: Int32) -> Float32:
    """Sum of o * do over every LANES-th vector of a row."""
    total = Float32(0.0)
    vectors = mO.shape[1] // ELEMENTS
    for vector in cutlass.range(lane, vectors, LANES, unroll=1):
        a, b = load_vector(mO, row, vector * ELEMENTS), load_vector(mdO, row, vector * ELEMENTS)
        for i in cutlass.range_constexpr(ELEMENTS):
            total = total + a[i].to(Float32) * b[i].to(Float32)
    return total


def load_vector(mX: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    """ELEMENTS neighbours of a row, in registers."""
    found = cute.make_rmem_tensor(ELEMENTS, mX.element_type)
    start = mX.iterator + cute.crd2idx((row, column), mX.layout)
    cute.autovec_copy(cute.make_tensor(start.align(16), cute.make_layout(ELEMENTS)), found)
    return found


def clear_sums(dq: cute.Tensor, number: Int32, tile: tuple[int, int], thread: Int32) -> None:
    """Sets a tile's sums of dQ to 0."""
    size = tile[0] * tile[1]
    zero = cute.make_rmem_tensor(VECTOR, Float32)
    zero.fill(0.0)
    start = dq.iterator + cutlass.Int64(number) * size + thread * VECTOR
    for i in range(size // (VECTOR * THREADS)):
        vector = (start + i * VECTOR * THREADS).align(16)
        cute.autovec_copy(zero, cute.make_tensor(vector, cute.make_layout(VECTOR)))
