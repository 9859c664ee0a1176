"""Operands of an epilogue that are loaded before the main loop, so that nobody waits for them after it.

They are those that vary along rows or columns only: a few registers hold what the threads of a warp need of
its warpgroup's tile. Of rows each thread keeps its own values. Of columns each lane keeps those of a few, two
neighbours of every 64, and takes others from the lanes that keep them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.epilogue.operands import (
    Operands,
    fragment_layout,
    gather_plan,
    is_broadcast,
    load_guarded,
)
from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.blocks.reduce.maximum import Coord

LANE_COLUMNS = 64
"""Columns that the lanes of a warp keep in two registers each."""


class Region(NamedTuple):
    """A warpgroup's tile of D: where it begins, and the extent of D, outside of which nothing is read."""

    origin: Coord
    extent: Coord


class Along(enum.Enum):
    """Modes of a tile along which an operand has more than one element."""

    ROWS = 0
    COLUMNS = 1
    NOWHERE = 2


@dataclass(frozen=True)
class EarlyOperand:
    """An operand, and what this thread has loaded of its warpgroup's tile."""

    operand: cute.Tensor  # (M, N, L)
    along: Along
    values: cute.Tensor  # registers

    def piece(self, corner: tuple[int, int], tCcD: cute.Tensor) -> cute.Tensor:
        """As `load_operand` of the subtile that begins `corner` rows and columns into the tile.

        All lanes of a warp take part.
        """
        layout, registers = fragment_layout(self.operand, tCcD)
        values = cute.make_rmem_tensor(cute.make_layout(registers), Float32)
        for i, (row, column, _) in enumerate(gather_plan(self.operand, tCcD).offsets):
            values[i] = self._value(corner[0] + row, corner[1] + column)
        return cute.make_tensor(values.iterator, layout)

    def _value(self, row: int, column: int) -> Float32:
        """The element `row` rows and `column` columns after the thread's first."""
        lane = cute.arch.lane_idx()
        if self.along is Along.NOWHERE:
            return self.values[0]
        if self.along is Along.ROWS:
            return from_lane(self.values[row // WGMMA_M * 2 + row % WGMMA_M // 8], lane)
        # The thread's first column is 2 * (lane % 4); eight columns on, the keepers are the next four lanes.
        kept, keeper = column // LANE_COLUMNS * 2 + column % 8, column % LANE_COLUMNS // 8 * 4
        return from_lane(self.values[kept], keeper + lane % 4)


@dsl_user_op
def from_lane(value: Float32, lane: Int32, *, loc=None, ip=None) -> Float32:
    """`value` of another lane or one's own, taken here and not before.

    A plain register would be used for all subtiles at once, before everything else, and the main loop's last
    stage would be released that much later.
    """
    text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return inline_ptx(Float32, (value, lane), text, "=f,f,r", effects=True, loc=loc, ip=ip)


def along(operand: Any) -> Along | None:
    """None for what is no tensor, or varies along rows and columns."""
    if not isinstance(operand, cute.Tensor):
        return None
    varies = [mode for mode in (Along.ROWS, Along.COLUMNS) if not is_broadcast(operand.stride[mode.value])]
    if len(varies) > 1:
        return None
    return varies[0] if varies else Along.NOWHERE


def offsets_kept(mode: Along, tile: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Offsets of the elements that a thread keeps, from its first one of a (rows, columns) tile."""
    if mode is Along.NOWHERE:
        return [(0, 0, 0)]
    if mode is Along.ROWS:
        return [(row + half, 0, 0) for row in range(0, tile[0], WGMMA_M) for half in (0, 8)]
    return [(0, column + v, 0) for column in range(0, tile[1], LANE_COLUMNS) for v in (0, 1)]


def early_registers(operands: Operands, tile: tuple[int, int], modes: tuple[Along, ...]) -> int:
    """Registers that `load_early` takes."""
    return sum(len(offsets_kept(mode, tile)) for mode in map(along, operands) if mode in modes)


def load_early(
    operands: Operands,
    tile: tuple[int, int],  # rows and columns of the warpgroup's tile
    modes: tuple[Along, ...],
    region: Region,
    tiled_mma_epi: cute.TiledMma,
    thread: Int32,  # within the warpgroup
) -> Operands:
    """`EarlyOperand`s of those operands that vary along one of `modes`; the others as they are."""
    (m, n, batch), extent = region
    first = tiled_mma_epi.get_slice(thread).partition_C(
        cute.domain_offset((m, n, batch), cute.make_identity_tensor((WGMMA_M, 8, 1)))[None, None, 0]
    )[0]
    loaded: list[Any] = []
    for operand in operands:
        mode = along(operand)
        if mode not in modes:
            loaded.append(operand)
            continue
        column = n + 2 * cute.arch.lane_idx() if mode is Along.COLUMNS else first[1]
        offsets = offsets_kept(mode, tile)
        values = cute.make_rmem_tensor(cute.make_layout(len(offsets)), Float32)
        for i, offset in enumerate(offsets):
            load_guarded(operand, (first[0], column, batch), offset, extent, values, i)
        loaded.append(EarlyOperand(operand, mode, values))
    return tuple(loaded)


def at_piece(loaded: Operands, corner: tuple[int, int], tCcD: cute.Tensor) -> Operands:
    """The operands as `load_operands` returned them, with the piece at `corner` of every `EarlyOperand`."""
    return tuple(x.piece(corner, tCcD) if isinstance(x, EarlyOperand) else x for x in loaded)
