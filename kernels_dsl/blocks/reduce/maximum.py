"""The largest magnitude of what an epilogue makes: one float32 number in global memory.

Magnitudes are compared as the integers that their bits are. Those have the order of the numbers, with NaN
above infinity, so that one NaN makes the maximum NaN; and the order of tiles and threads changes no bit.
The number must be 0 before the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

_MAGNITUDE = 0x7FFFFFFF
"""The bits of a float32 without its sign."""


@dataclass(frozen=True)
class RunningMaximum:
    """The maximum that a thread has seen of its share of a tile; an operand of the epilogue."""

    target: cute.Pointer  # float32 in global memory
    bits: cute.Tensor  # (1) Int32

    def at(self, modes: tuple, first: tuple, limits: tuple) -> SeenPiece:
        """What the epilogue of the elements at these coordinates reports to; as `load_operand` has them."""
        return SeenPiece(self.bits, modes, first, limits)

    @cute.jit
    def publish(self) -> None:
        """Adds a warp's maximum to the number in global memory. All of its lanes take part."""
        largest = cute.arch.warp_redux_sync(self.bits[0], "max")
        if (cute.arch.lane_idx() == 0) & (largest > 0):
            target = cute.recast_ptr(self.target, dtype=Int32)
            cute.arch.atomic_max(target, largest, sem="relaxed", scope="gpu")


@dataclass(frozen=True)
class SeenPiece:
    """The maximum so far, and where a piece of the accumulator lies."""

    bits: cute.Tensor
    modes: tuple  # (m, n, l) of each element of the piece from the first, in the piece's order
    first: tuple  # (m, n, l) of the first
    limits: tuple  # (M, N, L) of the output

    @cute.jit
    def see(self, value: cute.TensorSSA) -> None:
        """Takes account of the piece's values, float32; of those within the output."""
        offsets, first, limits = self.modes, self.first, self.limits
        values = cute.make_rmem_tensor(len(offsets), Float32)
        values.store(value.reshape(len(offsets)))
        words = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Int32), values.layout)
        largest, room = self.bits[0], (limits[0] - first[0], limits[1] - first[1])
        # A select an element: a branch would keep all values of the piece beside the accumulators.
        for i in range_constexpr(len(offsets)):
            inside = (offsets[i][0] < room[0]) & (offsets[i][1] < room[1])
            word = words[i] & _MAGNITUDE
            seen = Int32(cutlass.select_(inside, word.ir_value(), Int32(0).ir_value()))
            largest = cutlass.max(largest, seen)
        self.bits[0] = largest


def running_maxima(operands: tuple) -> tuple:
    """The operands of an epilogue with a fresh maximum in place of each pointer to one."""
    found = []
    for operand in operands:
        if isinstance(operand, cute.Pointer):
            bits = cute.make_rmem_tensor(1, Int32)
            bits[0] = Int32(0)
            operand = RunningMaximum(operand, bits)
        found.append(operand)
    return tuple(found)


def publish_maxima(operands: tuple) -> None:
    """Adds what a tile's maxima saw to the numbers in global memory. All threads of a warp take part."""
    for operand in operands:
        if isinstance(operand, RunningMaximum):
            operand.publish()
