"""Operands of an epilogue, gathered at the coordinates of a thread's output elements.

A kernel passes the coordinate fragment of a piece of its accumulator and gets values of the piece's shape, so
that an epilogue function works on both alike. The piece may be spread over threads in any way: registers of
an MMA, or rows of a staged tile, MMA- or copy-partitioned.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr, range_constexpr

from kernels_dsl.blocks.epilogue.functions import run_epilogue
from kernels_dsl.blocks.reduce.maximum import Coord, RunningMaximum

MAX_VECTOR_BYTES = 16
Operand: TypeAlias = cute.Tensor | Float32 | cute.Pointer | RunningMaximum
"""A tensor (M, N, L), a scalar, or a maximum: its address, or its record while a tile is at work."""
Operands: TypeAlias = tuple[Operand, ...]
"""Operands of an epilogue, in the order of its parameters after the accumulator."""


@dataclass(frozen=True)
class CoordMode:
    """One flat mode of a coordinate fragment: `size` steps of `step` along coordinate `axis`."""

    size: int
    axis: int
    step: int


def coord_modes(tCcD: cute.Tensor) -> tuple[CoordMode, ...]:
    """The flat modes of a coordinate fragment, in the order of its elements.

    ValueError for a mode of dynamic extent, or one that moves along more than one coordinate.
    """
    modes = []
    for size, stride in zip(cute.flatten_to_tuple(tCcD.shape), cute.flatten_to_tuple(tCcD.stride)):
        if not isinstance(size, int):
            raise ValueError(f"tCcD has shape {tCcD.shape}; a fragment's shape must be static")
        if isinstance(stride, cute.ScaledBasis):
            axis = stride.mode if isinstance(stride.mode, int) else stride.mode[0]
            modes.append(CoordMode(size, axis, int(stride.value)))
        elif size == 1 or stride == 0:
            modes.append(CoordMode(size, 0, 0))
        else:
            raise ValueError(f"tCcD has stride {tCcD.stride}; it must be a fragment of an identity tensor")
    return tuple(modes)


def _divisor(x: Any) -> int:
    """A number known to divide x; 0 for the constant 0, which all numbers divide."""
    return x if isinstance(x, int) else cute.get_divisibility(x)


@dataclass(frozen=True)
class GatherPlan:
    """A thread's loads of one operand: the modes with distinct elements, and the elements of one load."""

    distinct: tuple[CoordMode, ...]
    vector: int

    @property
    def offsets(self) -> list[tuple[int, int, int]]:
        """(m, n, l) of every distinct element relative to the fragment's first, in the fragment's order."""
        steps = [range(mode.size) for mode in reversed(self.distinct)]
        result = []
        for index in itertools.product(*steps):
            offset = [0, 0, 0]
            for i, mode in zip(reversed(index), self.distinct):
                offset[mode.axis] += i * mode.step
            result.append((offset[0], offset[1], offset[2]))
        return result


def gather_plan(mC: cute.Tensor, tCcD: cute.Tensor) -> GatherPlan:
    """Plans the loads of operand mC (M, N, L) at the coordinates tCcD.

    Modes along which mC has the static stride 0 are read once. A load takes several elements if the
    fragment's first distinct mode runs along mC's contiguous mode, and pointer, strides and the thread's
    first coordinate are all known to be aligned to it.
    """
    distinct = tuple(
        m for m in coord_modes(tCcD) if m.size > 1 and m.step != 0 and not is_broadcast(mC.stride[m.axis])
    )
    return GatherPlan(distinct, _vector_width(mC, distinct, tCcD[0]))


def is_broadcast(stride: Any) -> bool:
    """True for the stride of a mode that holds one element."""
    return isinstance(stride, int) and stride == 0


def _vector_width(mC: cute.Tensor, distinct: tuple[CoordMode, ...], first: Coord) -> int:
    if not distinct or distinct[0].step != 1 or not isinstance(mC.stride[distinct[0].axis], int):
        return 1
    lead, *outer = distinct
    if mC.stride[lead.axis] != 1:
        return 1
    width_bytes = mC.element_type.width // 8
    factors = [MAX_VECTOR_BYTES // width_bytes, mC.iterator.alignment // width_bytes, lead.size]
    factors.append(_divisor(first[lead.axis]))
    factors.extend(mode.step for mode in outer if mode.axis == lead.axis)
    factors.extend(_divisor(mC.stride[axis]) for axis in range(3) if axis != lead.axis)
    return math.gcd(*factors)


def fragment_layout(mC: cute.Tensor, tCcD: cute.Tensor) -> tuple[cute.Layout, int]:
    """(register layout of the operand in the fragment's shape, registers that it takes)."""
    strides, registers = [], 1
    for mode in coord_modes(tCcD):
        if mode.size == 1 or mode.step == 0 or is_broadcast(mC.stride[mode.axis]):
            strides.append(0)
        else:
            strides.append(registers)
            registers *= mode.size
    return cute.make_layout(tCcD.shape, stride=cute.unflatten(tuple(strides), tCcD.shape)), registers


@cute.jit
def load_operand(mC: cute.Tensor, tCcD: cute.Tensor, limits: Coord) -> cute.Tensor:
    """Values of mC (M, N, L) at the coordinates tCcD: a float32 register fragment of tCcD's shape.

    `limits`: (M, N, L) of the output; an element outside along a mode that mC varies in is 0 and not read. A
    thread whose elements are all inside, the common case, reads vectors without predicates, with many loads
    in flight. Any other thread reads element by element.
    """
    plan = gather_plan(mC, tCcD)
    layout, registers = fragment_layout(mC, tCcD)
    values = cute.make_rmem_tensor(cute.make_layout(registers), Float32)
    first = tCcD[0]
    offsets = plan.offsets
    inside = Boolean(True)
    for axis in range_constexpr(3):
        if const_expr(not is_broadcast(mC.stride[axis])):
            inside = inside & (first[axis] + max(o[axis] for o in offsets) < limits[axis])
    if inside:
        for i in range_constexpr(0, registers, plan.vector):
            _load_vector(mC, first, offsets[i], values, i, plan.vector)
    else:
        for i in range_constexpr(registers):
            load_guarded(mC, first, offsets[i], limits, values, i)
    return cute.make_tensor(values.iterator, layout)


def _element(mC: cute.Tensor, first: Coord, offset: tuple[int, int, int]) -> cute.Pointer:
    """Address of mC at the coordinate first + offset."""
    ptr = mC.iterator
    for axis in range(3):
        if not is_broadcast(mC.stride[axis]):
            ptr = ptr + (first[axis] + offset[axis]) * mC.stride[axis]
    return ptr


def _load_vector(
    mC: cute.Tensor, first: Coord, offset: tuple[int, int, int], values: cute.Tensor, i: int, vector: int
) -> None:
    ptr = _element(mC, first, offset).align(vector * mC.element_type.width // 8)
    loaded = cute.make_tensor(ptr, cute.make_layout(vector)).load().to(Float32)
    for v in range(vector):
        values[i + v] = loaded[v]


@cute.jit
def load_guarded(
    mC: cute.Tensor,
    first: Coord,
    offset: tuple[int, int, int],
    limits: Coord,
    values: cute.Tensor,
    i: int,
) -> None:
    """Loads values[i] from mC at first + offset; 0 beyond `limits` along a mode that mC varies in."""
    valid = Boolean(True)
    for axis in range_constexpr(3):
        if const_expr(not is_broadcast(mC.stride[axis])):
            valid = valid & (first[axis] + offset[axis] < limits[axis])
    values[i] = Float32(0.0)
    if valid:
        element = cute.make_tensor(_element(mC, first, offset), cute.make_layout(1))
        values[i] = element[0].to(Float32)


def operand_registers(operands: Operands, tCcD: cute.Tensor) -> int:
    """Registers that the tensors among `operands` take at the coordinates of one piece."""
    return sum(fragment_layout(op, tCcD)[1] for op in operands if isinstance(op, cute.Tensor))


def load_operands(operands: Operands, tCcD: cute.Tensor, limits: Coord) -> tuple[Any, ...]:
    """An epilogue's operands at the coordinates tCcD (m, n, l) of one piece of the accumulator.

    Broadcast modes of a tensor have the static stride 0. tCcD: fragment of an identity tensor over (M, N, L),
    of the piece's shape. Beyond limits (M, N, L) nothing is read.
    Returns float32 register fragments of tCcD's shape for tensors, scalars as they are, and for maxima a
    `SeenPiece` to which the piece's values are reported.
    """
    return tuple(_at_piece(op, tCcD, limits) for op in operands)


def _at_piece(operand: Operand, tCcD: cute.Tensor, limits: Coord) -> Any:
    if isinstance(operand, RunningMaximum):
        modes = tuple(mode for mode in coord_modes(tCcD) if mode.size > 1)
        return operand.at(tuple(GatherPlan(modes, 1).offsets), tCcD[0], limits)
    return load_operand(operand, tCcD, limits) if isinstance(operand, cute.Tensor) else operand


def apply_epilogue(epilogue: Any, acc: cute.TensorSSA, operands: tuple[Any, ...]) -> cute.TensorSSA:
    """Calls epilogue(acc, *operands) with `operands` as `load_operands` returned them."""
    values = tuple([op.load() if isinstance(op, cute.Tensor) else op for op in operands])
    return run_epilogue(epilogue, acc, values)
