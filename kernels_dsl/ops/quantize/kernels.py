"""The kernels that a `quantize` call launches, and their arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import lowering
from kernels_dsl.config.quantize import (
    CTAS_PER_SM,
    LEAST_TILES,
    MANY_PARTS,
    PITCH,
    TILE,
    MatrixQuantization,
    RowQuantization,
    TileQuantization,
    grid_elements,
    line_elements,
    line_quantization,
    matrix_quantization,
    maxima_elements,
    one_launch,
    row_quantization,
)
from kernels_dsl.ops.launch import Launch, address_of
from kernels_dsl.ops.quantize.buffers import Made
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import addresses
from lowering.records import NamedTuple

_FOLDER = "kernels_dsl.kernels.quantize"
FUNCTIONS = {
    "tile": lowering.jit(f"{_FOLDER}.tile:quantize_tile", name="quantize_tile"),
    "rows": lowering.jit(f"{_FOLDER}.rows:quantize_rows", name="quantize_rows"),
    "grid": lowering.jit(f"{_FOLDER}.grid:quantize_grid", name="quantize_grid"),
    "lines": lowering.jit(f"{_FOLDER}.lines:quantize_lines", name="quantize_lines"),
    "matrices": lowering.jit(f"{_FOLDER}.matrices:quantize_matrices", name="quantize_matrices"),
    "three": lowering.jit(f"{_FOLDER}.matrices:quantize_three", name="quantize_three"),
    "maxima": lowering.jit(f"{_FOLDER}.maxima:quantize_by_maxima", name="quantize_by_maxima"),
}
SMALL = 1 << 17
"""Elements that one cluster takes through its registers, where all have one scale."""

Send = Callable[[torch.Tensor, "torch.Tensor | None", "Made | None"], Made]
"""Launches on (x, given scale, buffers, None: new ones) and returns the buffers."""
Make = Callable[[], Made]
"""Makes the buffers that kernels write."""
Place = tuple[int, int | None] | None
"""Positions among the buffers of an output's values and scales; None for a scale of all, which goes to the
kernel as an address."""
BufferOrder = tuple[int | None, ...]
"""The buffers that a kernel takes behind what it reads; None for none."""
Last = tuple[Any, ...] | Callable[[], tuple[Any, ...]]
"""The arguments after them."""


class Sending(NamedTuple):
    """A launch and its arguments: x, buffers in this order, the last ones."""

    launch: Launch
    order: BufferOrder
    last: Last


class Kernels:
    """The kernels for tensors like `read`."""

    def __init__(self, format: str, target: Target, read: torch.Tensor) -> None:
        self.format = format
        self.target = target
        self.early = target.device.capability >= (9, 0)
        self.matrices = read.shape[:-2].numel()
        self.rows, self.columns = read.shape[-2:]
        self.tiles = (-(-self.rows // TILE), -(-self.columns // TILE))
        self.bytes_each = read.element_size()
        self.small = self._one_row(read)
        steps = [step for step, size in zip(read.stride()[:-1], read.shape) if size > 1]
        self.aligned = all(n * self.bytes_each % 16 == 0 for n in steps) and read.data_ptr() % 16 == 0
        self.resident = CTAS_PER_SM[self.bytes_each] * target.device.sm_count

    def _one_row(self, read: torch.Tensor) -> RowQuantization | None:
        """The specification with which all of it fits registers as one row, read once; None where it does
        not."""
        if not read.is_contiguous() or self.columns % PITCH or read.numel() > SMALL:
            return None
        spec = row_quantization(self.format, read.numel(), self.early, self.bytes_each)
        return replace(spec, whole=True) if spec.vectors else None

    def sends(self, scaling: str, has_scale: bool, places: tuple[Place, ...], make: Make) -> Send:
        """The function that launches the kernels of a call.
        places: of x, of its transpose."""
        by_address = scaling == "tensor"
        if by_address:
            places = tuple(place and (place[0], None) for place in places)
        return _sending(self._launches(scaling, has_scale, *places), make, by_address)

    def _launches(self, scaling: str, has_scale: bool, plain: Place, turned: Place) -> Sending:
        if scaling == "row":
            return self._rows(plain, turned)
        if scaling == "tensor" and not has_scale and turned is None and self.small is not None:
            return Sending(self._kernel("rows", spec=self.small), (0, None), ())
        if scaling == "matrix" or (scaling == "tensor" and not has_scale):
            return self._from_maxima("matrix" if scaling == "matrix" else "whole", plain, turned)
        kind = {"tensor": "given", "1x128": "group", "128x128": "block"}[scaling]
        spec = self._tile_spec(kind if plain else None, kind if turned else None)
        last = _no_scale((spec.plain, spec.turned))
        return Sending(self._kernel("tile", spec=spec), _order(plain, turned), last)

    def _kernel(self, name: str, **constants: Any) -> Launch:
        """Kernel `name`, of which a plan has one form."""
        return Launch(FUNCTIONS[name], self.target, constants)

    def _tile_spec(self, plain: str | None, turned: str | None) -> TileQuantization:
        return TileQuantization(self.format, plain, turned, early=self.early)

    def _by_maxima(self, plain: Place, turned: Place, parts: int, spec: TileQuantization) -> Sending:
        """With scales made of maxima of so many parts."""
        many = "whole" in (spec.plain, spec.turned) and self.matrices * parts > MANY_PARTS
        kernel = self._kernel("maxima", spec=spec, many=many)
        kinds = (spec.plain, spec.turned)
        elements = maxima_elements(self.matrices, self.columns, parts, kinds)
        last = self._workspace(elements, parts, *_no_scale(kinds))
        return Sending(kernel, _order(plain, turned), last)

    def _in_one_launch(self, plain: Place, turned: Place, spec: TileQuantization) -> Sending | None:
        """The same in one launch; None where that is not better."""
        kinds = (spec.plain, spec.turned)
        device = self.target.device
        facts = (device.sm_count, device.smem_bytes, self.early)
        found = one_launch(kinds, self.matrices, self.tiles, facts, self.bytes_each)
        if found is None:
            return None
        kernel = self._kernel("grid", spec=replace(spec, grid=found[0]))
        last = (*found[1], *_no_scale(kinds))
        elements = grid_elements(self.matrices, self.rows, self.columns, kinds)
        index = self.target.index

        return Sending(kernel, _order(plain, turned), lambda: (*addresses(index, elements), *last))

    def _from_maxima(self, kind: str, plain: Place, turned: Place) -> Sending:
        """With scales of matrices or of all."""
        if kind == "matrix" and turned is None:
            found = self.matrices_in_one_read(self.matrices)
            if found is not None:
                return Sending(self._kernel("matrices", spec=found[0]), (0, 1), found[1])
        spec = self._tile_spec(kind if plain else None, kind if turned else None)
        parts = max(1, min(self.tiles[0] * self.tiles[1], self.resident // self.matrices))
        return self._in_one_launch(plain, turned, spec) or self._by_maxima(plain, turned, parts, spec)

    def _rows(self, plain: Place, turned: Place) -> Sending:
        """With scales of rows: of x alone in one kernel, of its columns, or of both, from maxima of parts."""
        if turned is None:
            spec = row_quantization(self.format, self.columns, self.early, self.bytes_each)
            return Sending(self._kernel("rows", spec=spec), (0, 1), (0,))
        by_rows = None if plain is None else self._rows_and_columns(plain, turned)
        if by_rows is not None:
            return by_rows
        lines = self._tile_spec("lines" if plain else None, "lines")
        parts = max(1, min(self.tiles[0], self.resident // (self.tiles[1] * self.matrices)))
        return self._in_one_launch(plain, turned, lines) or self._by_maxima(plain, turned, parts, lines)

    def _rows_and_columns(self, plain: Place, turned: Place) -> Sending | None:
        """With scales of rows of both outputs; None where `_in_one_launch` is better."""
        shape, device = (self.matrices, self.rows, self.columns), (self.target.device.sm_count, self.early)
        found = line_quantization(self.format, shape, device, self.bytes_each)
        if found is None:
            return None
        spec, rows_each = found
        last = self._workspace(line_elements(self.matrices, self.columns), rows_each)
        return Sending(self._kernel("lines", spec=spec), _order(plain, turned), last)

    def _workspace(self, elements: int, *last: int) -> Callable[[], tuple[Any, ...]]:
        """The maker of the last arguments, which begin with a workspace."""
        index = self.target.index
        return lambda: (addresses(index, elements, 0)[0], *last)

    def matrices_in_one_read(
        self, matrices: int, least: tuple[int, int] = LEAST_TILES
    ) -> tuple[MatrixQuantization, Callable[[], tuple[Any, ...]]] | None:
        """The kernel that reads so many such matrices once, and its arguments after the buffers; None where
        other kernels are better. `least`: as `matrix_quantization` has it."""
        if not self.aligned:
            return None
        device = self.target.device
        facts = (device.sm_count, device.smem_bytes, self.early)
        shape = (matrices, self.rows, self.columns)
        found = matrix_quantization(self.format, shape, facts, self.bytes_each, least)
        if found is None:
            return None
        spec, ctas = found
        elements, index = matrices * spec.items(self.rows, self.columns), self.target.index
        return spec, lambda: (*addresses(index, elements), ctas)


def three_matrices(kernels: Sequence[Kernels]) -> Callable[..., None] | None:
    """A launch for three tensors of the same matrices, with scales of matrices, and all their buffers;
    None where that takes several launches."""
    first = kernels[0]
    found = first.matrices_in_one_read(sum(each.matrices for each in kernels), least=(0, 0))
    if found is None or not all(each.aligned for each in kernels):
        return None
    spec, last = found
    launch = Launch(FUNCTIONS["three"], first.target, {"spec": spec})
    return lambda q, k, v, made: launch(q, k, v, made, *last())


def _order(plain: Place, turned: Place) -> BufferOrder:
    """Values and scales of x, of its transpose."""
    return (*(plain or (None, None)), *(turned or (None, None)))


def _no_scale(kinds: tuple[str | None, str | None]) -> tuple[int, ...]:
    """The argument in place of the address of a scale of all."""
    return () if {"whole", "given"} & {*kinds} else (0,)


def _sending(sending: Sending, make: Make, by_address: bool) -> Send:
    """by_address: the scale of all, the caller's or the last buffer, goes to the kernel after all others."""
    kernel: Callable[..., Any] | None = None  # the bare launch, once there is one
    launch, order, last_arguments = sending
    address = address_of(launch.target)
    pick = operator.itemgetter(*[-1 if n is None else n for n in order])
    as_they_are = order == tuple(range(len(order)))
    make_last = last_arguments if callable(last_arguments) else None
    fixed = () if callable(last_arguments) else last_arguments

    def send(x: torch.Tensor, scale: torch.Tensor | None, made: Made | None) -> Made:
        nonlocal kernel
        if made is None:
            made = make()
        buffers = made
        if not as_they_are:
            buffers = pick((*buffers, None))
        last = fixed if make_last is None else make_last()
        if by_address:
            last = (*last, address(made[-1] if scale is None else scale))
        if kernel is not None:
            kernel(x, *buffers, *last)
        else:
            launch(x, *buffers, *last)
            kernel = launch.direct()
        return made

    return send
