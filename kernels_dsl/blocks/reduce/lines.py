"""Reductions of an epilogue's values over rows or columns, in an order that never changes.

Every part of a line (a row, or a column) that one warp or CTA has is reduced to a float32 number in global
memory, (parts, lines, L); `kernels/gemm/reduce_parts.py` combines the parts. Which elements make a part, and
in which order they are combined, depends on the configuration alone, so that a call gives the same bits each
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.blocks.hw.mma_sync import MMA_M
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.blocks.reduce.maximum import Coord
from kernels_dsl.blocks.reduce.reductions import REDUCTIONS, ReducedEpilogue

WARP = 32
_QUAD = 4
"""Lanes that have one row of a WGMMA accumulator."""


@dsl_user_op
def larger(x: Float32, y: Float32, *, loc=None, ip=None) -> Float32:
    """The larger of two numbers; NaN where one is."""
    return inline_ptx(Float32, (x, y), "max.NaN.f32 $0, $1, $2;", "=f,f,f", effects=False, loc=loc, ip=ip)


def combined(reduction: str, x: Float32, y: Float32) -> Float32:
    """Two partial results as one. It does not matter which comes first."""
    return x + y if REDUCTIONS[reduction].summed else larger(x, y)


def element(reduction: str, x: Float32) -> Float32:
    """The number that an element adds to a reduction."""
    if reduction == "sum_squares":
        return x * x
    return larger(x, -x) if reduction == "abs_max" else x


def neutral(reduction: str) -> Float32:
    """The partial result of no elements."""
    identity = REDUCTIONS[reduction].identity
    return Float32(float("-inf") if identity is None else identity)


def _chosen(condition: Boolean, x: Float32, y: Float32) -> Float32:
    return Float32(cutlass.select_(condition, x.ir_value(), y.ir_value()))


class Written(NamedTuple):
    """The operands that an epilogue reads, and the partial results that it writes; None without."""

    read: tuple[Any, ...]
    partials: cute.Tensor | None


def without_partials(epilogue: Any, operands: tuple[Any, ...]) -> Written:
    """The operands of an epilogue, by what is done with them."""
    if not isinstance(epilogue, ReducedEpilogue):
        return Written(operands, None)
    *read, partials = operands
    return Written(tuple(read), partials)


def inner_of(epilogue: Any) -> Any:
    """The function whose values are reduced; the epilogue itself where none are."""
    return epilogue.inner if isinstance(epilogue, ReducedEpilogue) else epilogue


@cute.jit
def put(partials: cute.Tensor, part: Int32, line: Int32, l: Int32, writes: Boolean, value: Float32) -> None:
    """Writes a partial result where this thread is to, and both part and line exist."""
    if writes & (part < partials.shape[0]) & (line < partials.shape[1]):
        partials[part, line, l] = value


@dataclass(frozen=True)
class WarpgroupReduction:
    """Of a warpgroup's tile from WGMMA accumulators, subtile by subtile.

    Four lanes have a row, so a warp reduces rows over the columns of a tile: a part is a tile. Eight lanes
    have a column, so it reduces columns over the 16 rows that it has of a subtile: that is a part.
    """

    epilogue: ReducedEpilogue
    partials: cute.Tensor  # (parts, lines, L)
    origin: Coord
    extent: Coord
    tile: tuple[int, int]  # rows and columns of the warpgroup's tile
    thread: Int32  # within the warpgroup
    rows: cute.Tensor  # the thread's rows so far, two of every 64

    @staticmethod
    def of_tile(
        epilogue: ReducedEpilogue,
        partials: cute.Tensor,
        region: Any,  # `epilogue.prefetch.Region`
        tile: tuple[int, int],
        thread: Int32,
    ) -> WarpgroupReduction:
        """The reduction of a tile, of nothing yet."""
        rows = cute.make_rmem_tensor(2 * tile[0] // WGMMA_M, Float32)
        rows.fill(neutral(epilogue.reduction))
        return WarpgroupReduction(epilogue, partials, region.origin, region.extent, tile, thread, rows)

    def see(
        self,
        value: cute.TensorSSA,
        offsets: Sequence[tuple[int, int, int]],
        first: Coord,
        corner: tuple[int, int],
    ) -> None:
        """Takes a subtile's float32 values into account, which lie `offsets` from `first`.

        `corner`: rows and columns of the tile before the subtile. All lanes of a warp take part.
        """
        registers = cute.make_rmem_tensor(len(offsets), Float32)
        registers.store(value.reshape(len(offsets)))
        values = [element(self.epilogue.reduction, registers[i]) for i in range(len(offsets))]
        if self.epilogue.over == "n":
            self._see_rows(values, offsets, first, corner[0])
        else:
            self._see_columns(values, offsets, first, corner[0])

    def _see_rows(
        self, values: list[Float32], offsets: Sequence[tuple[int, int, int]], first: Coord, row: int
    ) -> None:
        name, room = self.epilogue.reduction, self.extent[1] - first[1]
        for value, (half, column, _) in zip(values, offsets):
            slot = row // WGMMA_M * 2 + half // 8
            inside = column < room
            self.rows[slot] = combined(name, self.rows[slot], _chosen(inside, value, neutral(name)))

    def _see_columns(
        self, values: list[Float32], offsets: Sequence[tuple[int, int, int]], first: Coord, row: int
    ) -> None:
        name, room, lane = self.epilogue.reduction, self.extent[0] - first[0], self.thread % WARP
        columns: dict[int, Float32] = {}
        for value, (half, column, _) in zip(values, offsets):
            kept = _chosen(half < room, value, neutral(name))
            columns[column] = kept if column not in columns else combined(name, columns[column], kept)
        left, index, writes = _across_rows(name, [columns[c] for c in sorted(columns)], lane)
        part = (self.origin[0] + row) // MMA_M + self.thread // WARP
        for i, value in enumerate(left):
            number = index + i  # of the thread's columns: two neighbours of every eight
            column = first[1] + number // 2 * 8 + number % 2
            put(self.partials, part, column, self.origin[2], writes, value)

    def finish(self) -> None:
        """Writes the rows. All lanes of a warp take part."""
        if self.epilogue.over != "n":
            return
        name, lane = self.epilogue.reduction, self.thread % WARP
        part = self.origin[1] // self.tile[1]
        for slot in range(cute.size(self.rows)):
            value = self.rows[slot]
            for step in (1, 2):
                value = combined(name, value, cute.arch.shuffle_sync_bfly(value, offset=step))
            row = self.origin[0] + slot // 2 * WGMMA_M + self.thread // WARP * MMA_M + lane // _QUAD
            put(self.partials, part, row + slot % 2 * 8, self.origin[2], lane % _QUAD == 0, value)


class Across(NamedTuple):
    """Columns that a lane is left with, the number of the first one, and whether it is to write them."""

    values: list[Float32]
    index: Int32
    writes: Boolean


def _across_rows(reduction: str, values: list[Float32], lane: Int32) -> Across:
    """Combines columns over the eight lanes of a warp that have them; each lane gets a share of the columns.

    Of each pair of lanes one keeps the first half and gets the other's values of it: half the shuffles of all
    columns in all lanes.
    """
    index, writes = Int32(0), Boolean(True)
    for step in (16, 8, 4):
        upper = (lane & step) != 0
        if len(values) == 1:
            values = [combined(reduction, values[0], cute.arch.shuffle_sync_bfly(values[0], offset=step))]
            writes = writes & ((lane & step) == 0)
            continue
        half = len(values) // 2
        kept = [_chosen(upper, values[half + i], values[i]) for i in range(half)]
        others = [_chosen(upper, values[i], values[half + i]) for i in range(half)]
        values = [
            combined(reduction, x, cute.arch.shuffle_sync_bfly(y, offset=step)) for x, y in zip(kept, others)
        ]
        index = index + (lane & step) // step * half
    return Across(values, index, writes)


class Staged(NamedTuple):
    """A tile's values in shared memory, (rows, columns) float32, where it begins, and D's extent."""

    values: cute.Tensor
    origin: Coord
    extent: Coord


@cute.jit
def reduce_staged(
    epilogue: cutlass.Constexpr[ReducedEpilogue],
    partials: cute.Tensor,
    staged: Staged,
    part: Int32,
    threads: cutlass.Constexpr[int],
    tidx: Int32,
):
    """Reduces values that all threads of a CTA have written before the last barrier."""
    name = const_expr(epilogue.reduction)
    values, (m, n, l), extent = staged
    rows, columns = cute.size(values, mode=[0]), cute.size(values, mode=[1])
    if const_expr(epilogue.over == "n"):
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        for row in cutlass.range(warp, rows, threads // WARP, unroll=1):
            of_row = neutral(name)
            for first in range_constexpr(0, columns, WARP):
                column = first + lane
                if (column < columns) & (n + column < extent[1]):
                    of_row = combined(name, of_row, element(name, values[row, column]))
            for step in range_constexpr(5):
                of_row = combined(name, of_row, cute.arch.shuffle_sync_bfly(of_row, offset=16 >> step))
            put(partials, part, m + row, l, lane == 0, of_row)
    else:
        for column in cutlass.range(tidx, columns, threads, unroll=1):
            of_column = neutral(name)
            for row in cutlass.range(0, cutlass.min(rows, extent[0] - m), 1, unroll=4):
                of_column = combined(name, of_column, element(name, values[row, column]))
            put(partials, part, n + column, l, Boolean(True), of_column)
