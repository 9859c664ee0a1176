"""Quantisation with scales of all, of matrices or of lines, which must be known first: two passes in one
launch.

All CTAs run at the same time. They take the maxima of their tiles, wait for each other, and convert the same
tiles in the opposite order: the last one is still in registers, those before it are in L2. CTAs of one
cluster meet at its barrier, others at a counter.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.fp8 import block_max, group_scale, halves
from kernels_dsl.blocks.hw.grid_barrier import arrive, leave, wait
from kernels_dsl.config.quantize import THREADS, TILE, VECTOR, WARPS, TileQuantization

from .tile import LineMaxima, Scratch, convert_tile
from .views import (
    LANES,
    ROWS,
    MatrixIndex,
    Outputs,
    Site,
    clear,
    empty_columns,
    four_modes,
    larger_pairs,
    load_tile,
    maxima_at,
    maxima_of_rows,
    maximum,
    maximum_of_row,
    memory_at,
    outputs_of,
    pairs_of_columns,
    raise_to,
    row_of_tile,
)


class Division(NamedTuple):
    """CTAs among which the tiles of a matrix are dealt."""

    along_m: Int32
    along_k: Int32


class GridMaxima(NamedTuple):
    """Maxima in global memory, float32."""

    workspace: cute.Tensor  # all of them, or one for each scale
    columns: cute.Tensor | None  # (matrices, 1, K), of "lines"
    rows: cute.Tensor | None  # (matrices, 1, M), of "lines" of x


def quantize_grid(
    x: cute.Tensor,
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    workspace: Int64,
    counter: Int64,
    ctas: Int32,
    along_m: Int32,
    along_k: Int32,
    scale: Int64,
    stream,
    spec: cutlass.Constexpr[TileQuantization],
):
    """Launch on x (…, M, K), up to four modes, K contiguous; the outputs are those of `launch_tiles`.

    spec: of kinds "whole", "matrix" or "lines". workspace: the address of float32, at least
    `config.quantize.grid_elements`, written. counter: the address of an int32, 0 before and after; not used
    by a cluster. ctas, along_m, along_k: `config.quantize.division_of`; the GPU must be able to run all CTAs
    at the same time. scale: the address of the one scale of "whole", with which scales and turned_scales are
    None; otherwise 0.
    """
    x = four_modes(x)
    outputs = outputs_of(values, scales, turned_values, turned_scales, scale, spec).with_four_modes()
    memory = memory_at(workspace, Float32)
    counted = None
    if not spec.grid.cluster:
        counted = cute.make_tensor(memory_at(counter, Int32), cute.make_layout(1))
    matrices = x.shape[0] * x.shape[1]
    columns, rows = None, None
    used = Int64(1) if "whole" in (spec.plain, spec.turned) else Int64(matrices)
    if "lines" in (spec.plain, spec.turned):
        columns, used = maxima_at(memory, Int64(0), (matrices, 1, x.shape[3]))
        if spec.plain == "lines":
            rows, used = maxima_at(memory, used, (matrices, 1, x.shape[2]))
    cleared = cute.make_tensor(memory, cute.make_layout(Int32(used)))
    maxima, along = GridMaxima(cleared, columns, rows), Division(along_m, along_k)
    quantize_grid_kernel(x, outputs, maxima, counted, along, spec).launch(
        grid=[ctas, 1, 1],
        block=[THREADS, 1, 1],
        cluster=[ctas, 1, 1] if spec.grid.cluster else None,
        min_blocks_per_mp=spec.grid.per_sm,
        preferred_smem_carveout=100,  # in percent; without it the compiler asks a GPU, and there may be none
        stream=stream,
        use_pdl=spec.early,
        cooperative=not spec.grid.cluster,
    )


@entry_name("quantize_grid")
@cute.kernel
def quantize_grid_kernel(
    x: cute.Tensor,
    outputs: Outputs,
    maxima: GridMaxima,
    counter: cute.Tensor | None,
    along: Division,
    spec: cutlass.Constexpr[TileQuantization],
):
    """Device side of `quantize_grid`; counter: None for a cluster.

    The CTAs of a matrix walk over its tiles side by side, down the columns. Matrices beyond those that fit
    the grid follow in further rounds.
    """
    workspace, columns, rows = maxima
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    ctas = cute.arch.grid_dim()[0]
    word, lane = thread // LANES, thread % LANES
    if const_expr(spec.early):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # they begin when all CTAs of this launch run
    for i in cutlass.range(cta * THREADS + thread, cute.size(workspace), ctas * THREADS, unroll=1):
        workspace[i] = Float32(0.0)
    arrive_at(counter, thread)

    allocator = cutlass.memory.SmemAllocator()
    own_maxima = allocator.allocate_tensor(Float32, cute.make_layout((WARPS, TILE), stride=(TILE, 1)), 16)
    tile = None
    if const_expr(spec.turned is not None):
        tile = allocator.allocate_tensor(Int32, cute.make_layout(TILE * TILE // 4), 16)
    scratch = Scratch(own_maxima, tile)
    elements = cute.make_rmem_tensor(ROWS * VECTOR, x.element_type)
    kept = None
    if const_expr(spec.grid.kept > 0):
        kept = allocator.allocate_tensor(x.element_type, kept_layout(spec.grid.kept), 16)
    tiles_m, tiles_k = cute.ceil_div(x.shape[2], TILE), cute.ceil_div(x.shape[3], TILE)
    rounds = Int32(1)
    if const_expr(spec.grid.rounds):
        rounds = (x.shape[0] * x.shape[1] * along.along_m * along.along_k - cta + ctas - 1) // ctas
    most = empty_columns(x.element_type)

    for round in cutlass.range(rounds, unroll=1):
        matrix, i, j = part_of(cta + round * ctas, along)
        index = MatrixIndex(matrix // x.shape[1], matrix % x.shape[1])
        steps = steps_to(i, along.along_m, tiles_m) * steps_to(j, along.along_k, tiles_k)
        amax, m, k = Float32(0.0), i, j
        for n in cutlass.range(steps, unroll=1):
            load_tile(x, Site(index, m * TILE, k * TILE, word, lane), elements, False)
            if const_expr(spec.grid.kept > 0):
                if (round == 0) & (n < spec.grid.kept):
                    copy_vectors(elements, kept[None, None, thread, n])
            if const_expr(columns is None):
                amax = cute.arch.fmax(amax, maximum(elements))
            else:
                if (n == 0) & (round == 0):
                    wait_for_all(counter, ctas, Int32(1), thread)
                larger_pairs(most, pairs_of_columns(elements), x.element_type)
                if const_expr(rows is not None):
                    own = maximum_of_row(maxima_of_rows(elements), lane)
                    row = m * TILE + row_of_tile(word, lane // 2, False)
                    if (lane % 2 == 0) & (row < x.shape[2]):
                        raise_to(rows[matrix, 0, None].iterator + row, own)
                if m + along.along_m >= tiles_m:
                    band = Band(matrix, k * TILE, x.shape[3])
                    publish_columns(columns, band, most, own_maxima, thread, x.element_type)
                    clear(most)
            m += along.along_m
            if m >= tiles_m:
                m, k = i, k + along.along_k
        if const_expr(columns is None):
            amax = block_max(amax, own_maxima[0, None], thread, WARPS)
            if round == 0:
                wait_for_all(counter, ctas, Int32(1), thread)
            cute.arch.sync_threads()
            if thread == 0:
                raise_to(workspace.iterator + number_of_scale(spec, matrix), amax)

    arrive_at(counter, thread)
    wait_for_all(counter, ctas, Int32(2), thread)
    if const_expr(counter is not None):
        leave(counter, ctas, Int32(2), thread)

    for back in cutlass.range(rounds, unroll=1):
        matrix, i, j = part_of(cta + (rounds - 1 - back) * ctas, along)
        index = MatrixIndex(matrix // x.shape[1], matrix % x.shape[1])
        scale = Float32(0.0)
        if const_expr(columns is None):
            scale = group_scale(workspace[number_of_scale(spec, matrix)], spec.format)
        steps_m, steps_k = steps_to(i, along.along_m, tiles_m), steps_to(j, along.along_k, tiles_k)
        last_m = i + (steps_m - 1) * along.along_m
        steps, m, k = steps_m * steps_k, last_m, j + (steps_k - 1) * along.along_k
        first_round = back == rounds - 1
        for forth in cutlass.range(steps, unroll=1):
            site = Site(index, m * TILE, k * TILE, word, lane)
            if (back > 0) | (forth > 0):
                take_tile(spec, x, site, elements, kept, first_round, steps - 1 - forth)
                cute.arch.sync_threads()  # shared memory is used again
            convert_tile(spec, x, outputs, elements, scale, scratch, LineMaxima(columns, rows), site)
            m -= along.along_m
            if m < 0:
                m, k = last_m, k - along.along_k


@cute.jit
def arrive_at(counter: cute.Tensor | None, thread: Int32):
    """Publishes this CTA's writes to global memory to those that wait. counter: None for a cluster."""
    if const_expr(counter is None):
        cute.arch.cluster_arrive()
    else:
        arrive(counter, thread)


@cute.jit
def wait_for_all(counter: cute.Tensor | None, ctas: Int32, point: Int32, thread: Int32):
    """Waits until all CTAs have arrived `point` times."""
    if const_expr(counter is None):
        cute.arch.cluster_wait()
    else:
        wait(counter, ctas, point, thread)


@cute.jit
def take_tile(
    spec: cutlass.Constexpr[TileQuantization],
    x: cute.Tensor,
    site: Site,
    elements: cute.Tensor,
    kept: cute.Tensor | None,
    first_round: cutlass.Boolean,
    number: Int32,
):
    """Loads a tile again; the first ones of the first round from shared memory."""
    if const_expr(spec.grid.kept > 0):
        if first_round & (number < spec.grid.kept):
            copy_vectors(kept[None, None, site.thread, number], elements)
        else:
            load_tile(x, site, elements, False)
    else:
        load_tile(x, site, elements, False)


def kept_layout(tiles: int) -> cute.Layout:
    """(VECTOR, ROWS, THREADS, tiles): neighbouring threads have neighbouring vectors."""
    strides = (1, THREADS * VECTOR, VECTOR, TILE * TILE)
    return cute.make_layout((VECTOR, ROWS, THREADS, tiles), stride=strides)


def copy_vectors(source: cute.Tensor, target: cute.Tensor) -> None:
    """Copies a thread's elements of a tile from registers to shared memory, or back."""
    for i in range(ROWS):
        pair = [
            cute.make_tensor((t.iterator + offset).align(16), cute.make_layout(VECTOR))
            for t, offset in ((source, _offset(source, i)), (target, _offset(target, i)))
        ]
        cute.autovec_copy(*pair)


def _offset(vectors: cute.Tensor, i: int) -> int:
    return i * (VECTOR if cute.rank(vectors) == 1 else THREADS * VECTOR)


class Part(NamedTuple):
    """A CTA's share of a matrix: every so many tiles from its first one on."""

    matrix: Int32
    first_m: Int32
    first_k: Int32


def part_of(item: Int32, along: Division) -> Part:
    """Part `item` of all matrices."""
    across = along.along_m * along.along_k
    within = item % across
    return Part(item // across, within // along.along_k, within % along.along_k)


def steps_to(first: Int32, step: Int32, end: Int32) -> Int32:
    """Count of first, first + step, … before `end`."""
    return (end - 1 - first) // step + 1


def number_of_scale(spec: TileQuantization, matrix: Int32) -> Int32:
    """Number of a matrix's scale."""
    return Int32(0) if const_expr("whole" in (spec.plain, spec.turned)) else matrix


class Band(NamedTuple):
    """The columns of a tile, from `first` on, before `end`."""

    matrix: Int32
    first: Int32
    end: Int32


@cute.jit
def publish_columns(
    columns: cute.Tensor,
    band: Band,
    most: cute.Tensor,
    scratch: cute.Tensor,
    thread: Int32,
    dtype: cutlass.Constexpr,
):
    """Raises columns (matrices, 1, K) to the maxima in all threads' `most`; dtype: x's. Synchronises."""
    word, lane = thread // LANES, thread % LANES
    found = halves(most, dtype) if const_expr(most.element_type is not Float32) else most
    for v in range_constexpr(VECTOR):
        other = cute.arch.shuffle_sync_bfly(found[v], offset=LANES)
        scratch[word // 2, lane * VECTOR + v] = cute.arch.fmax(found[v], other)
    cute.arch.sync_threads()
    if thread < TILE:
        if band.first + thread < band.end:
            amax = scratch[0, thread]
            for warp in range_constexpr(1, WARPS):
                amax = cute.arch.fmax(amax, scratch[warp, thread])
            raise_to(columns[band.matrix, 0, None].iterator + band.first + thread, amax)
    cute.arch.sync_threads()
