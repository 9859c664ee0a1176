"""The largest magnitude among the values of an epilogue: one float32 number in global memory.

Magnitudes are compared as integers, by their bits. These have the order of the numbers, with NaN above
infinity, so that one NaN makes the maximum NaN, and the order of tiles and threads changes no bit. The number
must be 0 before the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

_MAGNITUDE = 0x7FFFFFFF
"""The bits of a float32 without its sign."""
Coord = tuple[Int32, Int32, Int32]
"""(m, n, l) of an element, or an extent (M, N, L)."""


@dataclass(frozen=True)
class RunningMaximum:
    """The maximum of what a thread has seen of its tile; an operand of the epilogue."""

    target: cute.Pointer  # float32 in global memory
    bits: cute.Tensor  # (1) Int32

    def at(self, offsets: tuple[tuple[int, int, int], ...], first: Coord, limits: Coord) -> SeenPiece:
        """The record to which an epilogue reports the elements at these coordinates."""
        return SeenPiece(self.bits, offsets, first, limits)

    @cute.jit
    def publish(self) -> None:
        """Raises the number in global memory to the warp's maximum. All lanes take part."""
        largest = cute.arch.warp_redux_sync(self.bits[0], "max")
        if (cute.arch.lane_idx() == 0) & (largest > 0):
            target = cute.recast_ptr(self.target, dtype=Int32)
            cute.arch.atomic_max(target, largest, sem="relaxed", scope="gpu")


@dataclass(frozen=True)
class SeenPiece:
    """A piece of the accumulator, and the maximum so far."""

    bits: cute.Tensor  # (1) Int32
    offsets: tuple[tuple[int, int, int], ...]
    """(m, n, l) of each element relative to the first, in the piece's order."""
    first: Coord
    limits: Coord  # (M, N, L) of the output

    @cute.jit
    def see(self, value: cute.TensorSSA) -> None:
        """Takes those of the piece's float32 values into account that lie within the output."""
        offsets, first, limits = self.offsets, self.first, self.limits
        values = cute.make_rmem_tensor(len(offsets), Float32)
        values.store(value.reshape(len(offsets)))
        words = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Int32), values.layout)
        largest, room = self.bits[0], (limits[0] - first[0], limits[1] - first[1])
        # A select an element: a branch would keep all values of the piece beside the accumulators.
        for i in range_constexpr(len(offsets)):
            inside = (offsets[i][0] < room[0]) & (offsets[i][1] < room[1])
            word = words[i] & _MAGNITUDE
            magnitude = Int32(cutlass.select_(inside, word.ir_value(), Int32(0).ir_value()))
            largest = cutlass.max(largest, magnitude)
        self.bits[0] = largest


def running_maxima(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """An epilogue's operands, with a new `RunningMaximum` in place of each pointer."""
    found = []
    for operand in operands:
        if isinstance(operand, cute.Pointer):
            bits = cute.make_rmem_tensor(1, Int32)
            bits[0] = Int32(0)
            operand = RunningMaximum(operand, bits)
        found.append(operand)
    return tuple(found)


def publish_maxima(operands: tuple[Any, ...]) -> None:
    """Raises the numbers in global memory to a tile's maxima. All threads of a warp take part."""
    for operand in operands:
        if isinstance(operand, RunningMaximum):
            operand.publish()
