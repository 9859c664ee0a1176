"""Quantisation by maxima that are made first, of all of x, matrices or lines: two launches, or three."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_dsl.config.quantize import FEW_PARTS, TileQuantization

from .amax import amax_parts
from .tile import launch_tiles
from .views import four_modes, maxima_at, memory_at, outputs_of


def quantize_by_maxima(
    x: cute.Tensor,
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    workspace: Int64,
    parts: Int32,
    scale: Int64,
    stream,
    spec: cutlass.Constexpr[TileQuantization],
    many: cutlass.Constexpr[bool],
):
    """Launch `amax_parts` and `launch_tiles` of the same x, by `spec`; the tensors are theirs. Lines of both
    outputs are for `quantize_grid`.

    workspace: the address of float32, of `config.quantize.maxima_elements`, written. parts: maxima of each
    matrix, or of each of its columns. With `many`, a second `amax_parts` makes fewer maxima of them. scale:
    as in `quantize_grid`.
    """
    outputs = outputs_of(values, scales, turned_values, turned_scales, scale, spec)
    columns = "lines" in (spec.plain, spec.turned)
    whole = four_modes(x)
    matrices = whole.shape[0] * whole.shape[1]
    shape = (matrices, parts, whole.shape[3]) if columns else (matrices, parts)
    memory = memory_at(workspace, Float32)
    maxima, end = maxima_at(memory, Int64(0), shape, columns or many)
    amax_parts(x, maxima, stream, columns, spec.early)
    if many:
        fewer, _ = maxima_at(memory, end, (1, FEW_PARTS))
        amax_parts(maxima, fewer, stream, False, spec.early)
        maxima = fewer
    launch_tiles(x, outputs, maxima, stream, spec)
