"""Scales of whole tensors, matrices and columns: maxima of parts, and a kernel that makes scales of them.

Parts are written once and read once, so there is nothing to clear before, and no atomics.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr

from kernels_dsl.blocks.entry_name import entry_name
from kernels_dsl.blocks.fp8 import block_max, group_scale, largest_finite
from kernels_dsl.config.quantize import COLUMN_TILES, THREADS, TILE, VECTOR

from .views import LANES, ROWS, by_columns, four_modes, load_tile, maximum

WARPS = THREADS // 32


def amax_parts(x: cute.Tensor, parts: cute.Tensor, stream, columns: cutlass.Constexpr[bool]):
    """Launch maxima of finite magnitudes of x (…, M, K), up to four modes, L matrices, K contiguous.

    parts, float32: (L, P), any P, a part of each matrix; with `columns` (L, ceil(M / 512), K), a part of each
    column.
    """
    x = four_modes(x)
    tiles_k = cute.ceil_div(x.shape[3], TILE) if columns else 1
    amax_parts_kernel(x, parts, columns).launch(
        grid=[parts.shape[1] * tiles_k * parts.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@entry_name("quantize_amax")
@cute.kernel
def amax_parts_kernel(x: cute.Tensor, parts: cute.Tensor, columns: cutlass.Constexpr):
    """Device side of `amax_parts`: a CTA computes a part of a matrix, or of 128 columns of it."""
    thread = cute.arch.thread_idx()[0]
    number = cute.arch.block_idx()[0]
    word, lane = thread // LANES, thread % LANES
    maxima = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((TILE, WARPS)), 16)
    elements = cute.make_rmem_tensor(ROWS * VECTOR, Float32)
    part, rest = number % parts.shape[1], number // parts.shape[1]
    if const_expr(columns):
        tiles_k = cute.ceil_div(x.shape[3], TILE)
        matrix, k0 = rest // tiles_k, rest % tiles_k * TILE
        at = (matrix // x.shape[1], matrix % x.shape[1])
        largest, found = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        largest.fill(0.0)
        for t in cutlass.range(COLUMN_TILES, unroll=1):
            m0 = (part * COLUMN_TILES + t) * TILE
            if m0 < x.shape[2]:
                load_tile(x, at, (m0, k0), (word, lane * VECTOR), elements, False)
                largest_finite(by_columns(elements), found)
                for v in range_constexpr(VECTOR):
                    largest[v] = cute.arch.fmax(largest[v], found[v])
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
        at = (rest // x.shape[1], rest % x.shape[1])
        tiles_k = cute.ceil_div(x.shape[3], TILE)
        tiles = cute.ceil_div(x.shape[2], TILE) * tiles_k
        amax = Float32(0.0)
        for tile in cutlass.range(part, tiles, parts.shape[1], unroll=1):
            origin = (tile // tiles_k * TILE, tile % tiles_k * TILE)
            load_tile(x, at, origin, (word, lane * VECTOR), elements, False)
            amax = cute.arch.fmax(amax, maximum(elements))
        amax = block_max(amax, maxima[None, 0], thread, WARPS)
        if thread == 0:
            parts[rest, part] = amax


def scales_of_parts(parts: cute.Tensor, scales: cute.Tensor, stream, format: cutlass.Constexpr[str]):
    """Launch scales from maxima, float32: parts (L, P) to scales (L,), or (L, P, N) to (L, N)."""
    grid = parts.shape[0]
    if cute.rank(parts) == 3:
        grid = grid * cute.ceil_div(parts.shape[2], THREADS)
    scales_of_parts_kernel(parts, scales, format).launch(
        grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@entry_name("quantize_scales")
@cute.kernel
def scales_of_parts_kernel(parts: cute.Tensor, scales: cute.Tensor, format: cutlass.Constexpr):
    """Device side of `scales_of_parts`: a CTA makes one scale, or a thread makes one."""
    thread = cute.arch.thread_idx()[0]
    number = cute.arch.block_idx()[0]
    amax = Float32(0.0)
    if const_expr(cute.rank(parts) == 3):
        bands = cute.ceil_div(parts.shape[2], THREADS)
        matrix, n = number // bands, number % bands * THREADS + thread
        if n < parts.shape[2]:
            for p in cutlass.range(parts.shape[1]):
                amax = cute.arch.fmax(amax, parts[matrix, p, n])
            scales[matrix, n] = group_scale(amax, format)
    else:
        for p in cutlass.range(thread, parts.shape[1], THREADS):
            amax = cute.arch.fmax(amax, parts[number, p])
        scratch = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), 16)
        amax = block_max(amax, scratch, thread, WARPS)
        if thread == 0:
            scales[number] = group_scale(amax, format)
