"""Which kernels a `quantize` call launches, and on what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import lowering
from kernels_dsl.config.quantize import (
    CTAS_PER_SM,
    MANY_PARTS,
    PITCH,
    TILE,
    RowQuantization,
    TileQuantization,
    grid_elements,
    maxima_elements,
    one_launch,
    row_quantization,
)
from kernels_dsl.ops import fresh
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import counter_and_workspace

_FOLDER = "kernels_dsl.kernels.quantize"
FUNCTIONS = {
    "tile": lowering.jit(f"{_FOLDER}.tile:quantize_tile", name="quantize_tile"),
    "rows": lowering.jit(f"{_FOLDER}.rows:quantize_rows", name="quantize_rows"),
    "grid": lowering.jit(f"{_FOLDER}.grid:quantize_grid", name="quantize_grid"),
    "maxima": lowering.jit(f"{_FOLDER}.maxima:quantize_by_maxima", name="quantize_by_maxima"),
}
SMALL = 1 << 17
"""Elements that one cluster takes through its registers, where all have one scale."""

Made = tuple[torch.Tensor, ...]
Plan = Callable[[torch.Tensor, "torch.Tensor | None"], Made]
"""Serves calls (x, given scale): what the caller gets."""
Sequence = Callable[[torch.Tensor, Made, "torch.Tensor | None"], None]
"""Launches on (what the kernels read, the buffers to be written, given scale)."""
Place = tuple[int, int] | None
"""Where among the buffers an output's values and scales are."""


class Kernels:
    """The kernels for tensors like `read`."""

    def __init__(self, format: str, target: Target, read: torch.Tensor) -> None:
        self.format = format
        self.target = target
        self.device = read.device
        self.early = target.device.capability >= (9, 0)
        self.matrices = read.shape[:-2].numel()
        self.rows, self.columns = read.shape[-2:]
        self.tiles = (-(-self.rows // TILE), -(-self.columns // TILE))
        self.bytes_each = read.element_size()
        self.small = self._one_row(read)
        self.resident = CTAS_PER_SM[self.bytes_each] * target.device.sm_count

    def _one_row(self, read: torch.Tensor) -> RowQuantization | None:
        """How all of it fits registers as one row: one launch and one read; None where it does not."""
        if not read.is_contiguous() or self.columns % PITCH or read.numel() > SMALL:
            return None
        spec = row_quantization(self.format, read.numel(), self.early, self.bytes_each)
        return replace(spec, whole=True) if spec.vectors else None

    def sequence(self, scaling: str, given: bool, plain: Place, turned: Place) -> Sequence:
        """What launches the kernels of a call."""
        if scaling == "row":
            return self._rows(plain, turned)
        if scaling == "tensor" and not given and turned is None and self.small is not None:
            rows = self._kernel("rows", spec=self.small)
            return lambda x, made, _: rows(x, made[0], made[1])
        if scaling == "matrix" or (scaling == "tensor" and not given):
            return self._from_maxima("matrix" if scaling == "matrix" else "whole", plain, turned)
        if scaling == "tensor":
            return self._given(plain, turned)
        kind = "group" if scaling == "1x128" else "block"
        tile = self._tile(kind if plain else None, kind if turned else None)
        if turned is None:
            return lambda x, made, _: tile(x, made[0], made[1], None, None, None)
        if plain is None:
            return lambda x, made, _: tile(x, None, None, made[0], made[1], None)
        order = (*plain, *turned)
        return lambda x, made, _: tile(x, *[made[n] for n in order], None)

    def _kernel(self, name: str, **constants: Any) -> Launch:
        """Kernel `name`, of which a plan has one form."""
        return Launch(FUNCTIONS[name], self.target, constants)

    def _tile_spec(self, plain: str | None, turned: str | None) -> TileQuantization:
        return TileQuantization(self.format, plain, turned, early=self.early)

    def _tile(self, plain: str | None, turned: str | None) -> Callable[..., Any]:
        return self._kernel("tile", spec=self._tile_spec(plain, turned))

    def _given(self, plain: Place, turned: Place) -> Sequence:
        """With a scale of all that is there."""
        tile = self._tile("given" if plain else None, "given" if turned else None)

        def run(x: torch.Tensor, made: Made, scale: torch.Tensor | None) -> None:
            assert scale is not None
            one = fresh.with_a_mode(scale)
            first = (made[plain[0]], one) if plain else (None, None)
            second = (made[turned[0]], one) if turned else (None, None)
            tile(x, *first, *second, None)

        return run

    def _by_maxima(self, plain: Place, turned: Place, parts: int, spec: TileQuantization) -> Sequence:
        """With scales made of maxima of so many parts."""
        many = "whole" in (spec.plain, spec.turned) and self.matrices * parts > MANY_PARTS
        kernel = self._kernel("maxima", spec=spec, many=many)
        kinds = (spec.plain, spec.turned)
        elements = maxima_elements(self.matrices, self.columns, parts, kinds)
        workspace = fresh.maker((elements,), torch.float32, self.device)

        def run(x: torch.Tensor, made: Made, _scale: torch.Tensor | None) -> None:
            first = (made[plain[0]], made[plain[1]]) if plain else (None, None)
            second = (made[turned[0]], made[turned[1]]) if turned else (None, None)
            kernel(x, *first, *second, workspace(), parts)

        return run

    def _in_one_launch(self, plain: Place, turned: Place, spec: TileQuantization) -> Sequence | None:
        """The same in one launch; None where that is not better."""
        kinds = (spec.plain, spec.turned)
        device = self.target.device
        found = one_launch(
            kinds, self.matrices, self.tiles, (device.sm_count, device.smem_bytes), self.bytes_each
        )
        if found is None:
            return None
        kernel = self._kernel("grid", spec=replace(spec, grid=found[0]))
        division = found[1]
        elements = grid_elements(self.matrices, self.rows, self.columns, kinds)
        index = self.target.index
        (v, s), (tv, ts) = plain or (None, None), turned or (None, None)

        def run(x: torch.Tensor, made: Made, _scale: torch.Tensor | None) -> None:
            counter, workspace = counter_and_workspace(index, elements)
            (kernel.direct() or kernel)(
                x,
                None if v is None else made[v],
                None if s is None else made[s],
                None if tv is None else made[tv],
                None if ts is None else made[ts],
                workspace,
                counter,
                division,
            )

        return run

    def _from_maxima(self, kind: str, plain: Place, turned: Place) -> Sequence:
        """With scales of matrices or of all."""
        spec = self._tile_spec(kind if plain else None, kind if turned else None)
        parts = max(1, min(self.tiles[0] * self.tiles[1], self.resident // self.matrices))
        return self._in_one_launch(plain, turned, spec) or self._by_maxima(plain, turned, parts, spec)

    def _rows(self, plain: Place, turned: Place) -> Sequence:
        """With scales of rows: of x alone in one kernel, of its columns, or of both, from maxima of parts."""
        if turned is None:
            spec = row_quantization(self.format, self.columns, self.early, self.bytes_each)
            rows = self._kernel("rows", spec=spec)
            return lambda x, made, _: rows(x, made[0], made[1])
        lines = self._tile_spec("lines" if plain else None, "lines")
        parts = max(1, min(self.tiles[0], self.resident // (self.tiles[1] * self.matrices)))
        return self._in_one_launch(plain, turned, lines) or self._by_maxima(plain, turned, parts, lines)
