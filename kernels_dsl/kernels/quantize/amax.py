"""Maxima of parts of matrices and of columns, from which the pass that converts makes its scales.

Parts are written once and read once, so nothing needs to be cleared, and there are no atomics.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.fp8 import block_max, halves
from kernels_dsl.config.quantize import CTAS_PER_SM, THREADS, TILE, VECTOR, WARPS

from .views import (
    LANES,
    ROWS,
    MatrixIndex,
    Site,
    empty_columns,
    four_modes,
    larger_pairs,
    load_tile,
    maximum,
    pairs_of_columns,
)


def amax_parts(
    x: cute.Tensor,
    parts: cute.Tensor,
    stream,
    columns: cutlass.Constexpr[bool],
    early: cutlass.Constexpr[bool],
):
    """Launch maxima of finite magnitudes of x (…, M, K), up to four modes, L matrices, K contiguous.

    parts, float32: (L, P), any P, for parts of each matrix; with `columns` (L, P, K), for parts of each
    column. A part is every Pth tile. early: as in `TileQuantization`.
    """
    x = four_modes(x)
    tiles_k = cute.ceil_div(x.shape[3], TILE) if columns else 1
    amax_parts_kernel(x, parts, columns, early).launch(
        grid=[parts.shape[1] * tiles_k * parts.shape[0], 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=CTAS_PER_SM[x.element_type.width // 8],
        preferred_smem_carveout=100,  # in percent; without it the compiler asks a GPU, and there may be none
        stream=stream,
        use_pdl=early,
    )


@entry_name("quantize_amax")
@cute.kernel
def amax_parts_kernel(
    x: cute.Tensor,
    parts: cute.Tensor,
    columns: cutlass.Constexpr,
    early: cutlass.Constexpr,
):
    """Device side of `amax_parts`: a CTA computes a part of a matrix, or of 128 columns of it."""
    thread = cute.arch.thread_idx()[0]
    number = cute.arch.block_idx()[0]
    word, lane = thread // LANES, thread % LANES
    maxima = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((TILE, WARPS)), 16)
    elements = cute.make_rmem_tensor(ROWS * VECTOR, x.element_type)
    tiles_m, tiles_k = cute.ceil_div(x.shape[2], TILE), cute.ceil_div(x.shape[3], TILE)
    if const_expr(early):
        # In this order: the kernel after this one may read x as soon as it starts.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    if const_expr(columns):
        # All parts of all columns walk down x together.
        band, item = number % tiles_k, number // tiles_k
        part, matrix = item % parts.shape[1], item // parts.shape[1]
        index, k0 = MatrixIndex(matrix // x.shape[1], matrix % x.shape[1]), band * TILE
        most = empty_columns(x.element_type)
        for m in cutlass.range(part, tiles_m, parts.shape[1], unroll=1):
            load_tile(x, Site(index, m * TILE, k0, word, lane), elements, False)
            larger_pairs(most, pairs_of_columns(elements), x.element_type)
        largest = halves(most, x.element_type) if const_expr(most.element_type is Int32) else most
        for v in range_constexpr(VECTOR):
            other = cute.arch.shuffle_sync_bfly(largest[v], offset=LANES)
            maxima[lane * VECTOR + v, word // 2] = cute.arch.fmax(largest[v], other)
        cute.arch.sync_threads()
        if thread < TILE:
            if k0 + thread < x.shape[3]:
                amax = Float32(0.0)
                for warp in range_constexpr(WARPS):
                    amax = cute.arch.fmax(amax, maxima[thread, warp])
                parts[matrix, part, k0 + thread] = amax
    else:
        part, matrix = number % parts.shape[1], number // parts.shape[1]
        index = MatrixIndex(matrix // x.shape[1], matrix % x.shape[1])
        amax = Float32(0.0)
        for tile in cutlass.range(part, tiles_m * tiles_k, parts.shape[1], unroll=1):
            site = Site(index, tile // tiles_k * TILE, tile % tiles_k * TILE, word, lane)
            load_tile(x, site, elements, False)
            amax = cute.arch.fmax(amax, maximum(elements))
        amax = block_max(amax, maxima[None, 0], thread, WARPS)
        if thread == 0:
            parts[matrix, part] = amax
