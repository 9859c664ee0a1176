"""Second kernel of a GEMM that reduces its result: combines each line's partial results in a fixed order."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.reduce.lines import WARP, combined, neutral
from kernels_dsl.config.reductions import CHUNK

ROWS = 16
"""Threads that share a line's parts."""


def reduce_parts(mP: cute.Tensor, mR: cute.Tensor, stream, reduction: cutlass.Constexpr[str]) -> None:
    """Launch mR[j, :, :] = the parts j * CHUNK to (j + 1) * CHUNK of mP, combined.

    mP (parts, lines, L) and mR (parts / CHUNK, lines, L) float32 of any strides.
    """
    tiles = cute.ceil_div(mP.shape[1], WARP)
    reduce_parts_kernel(mP, mR, tiles, reduction).launch(
        grid=[tiles * mR.shape[0] * mR.shape[2], 1, 1], block=[WARP * ROWS, 1, 1], stream=stream
    )


@entry_name("reduce_parts")
@cute.kernel
def reduce_parts_kernel(mP: cute.Tensor, mR: cute.Tensor, tiles: Int32, reduction: cutlass.Constexpr[str]):
    """Device side of `reduce_parts`: a CTA has CHUNK parts of 32 lines, a thread every 16th."""
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    column, row = tidx % WARP, tidx // WARP
    tile, chunk, l = bidx % tiles, bidx // tiles % mR.shape[0], bidx // tiles // mR.shape[0]
    line = tile * WARP + column
    shared = cutlass.memory.SmemAllocator().allocate_tensor(
        Float32, cute.make_layout((ROWS, WARP), stride=(WARP, 1)), byte_alignment=16
    )
    total = neutral(reduction)
    if line < mP.shape[1]:
        end = cutlass.min((chunk + 1) * CHUNK, mP.shape[0])
        for part in cutlass.range(chunk * CHUNK + row, end, ROWS, unroll=4):
            total = combined(reduction, total, mP[part, line, l])
    shared[row, column] = total
    cute.arch.sync_threads()
    if (row == 0) & (line < mP.shape[1]):
        for i in range_constexpr(1, ROWS):
            total = combined(reduction, total, shared[i, column])
        mR[chunk, line, l] = total
