"""Quantisation with scales that must be known before, of all, matrices or lines: its kernels together."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_dsl.config.quantize import FEW_PARTS, MAXIMA_ALIGN

from .amax import amax_parts
from .tile import quantize_tile
from .views import four_modes


def quantize_by_maxima(
    x: cute.Tensor,
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    workspace: cute.Tensor,
    parts: Int32,
    stream,
    spec: cutlass.Constexpr,
    many: cutlass.Constexpr[bool],
):
    """Launch `amax_parts` and `quantize_tile` of the same x, by `spec`; the tensors are theirs. Lines of both
    outputs are for `quantize_grid`.

    workspace: float32, of `config.quantize.maxima_elements`, written. parts: maxima of each matrix, or of
    each of its columns. With `many` there are so many that `quantize_tile` reads maxima of those.
    """
    columns = "lines" in (spec.plain, spec.turned)
    whole = four_modes(x)
    matrices = whole.shape[0] * whole.shape[1]
    shape = (matrices, parts, whole.shape[3]) if columns else (matrices, parts)
    maxima, rest = _leading(workspace, shape, columns or many)
    amax_parts(x, maxima, stream, columns, spec.early)
    if many:
        fewer, _ = _leading(rest, (1, FEW_PARTS), True)
        amax_parts(maxima, fewer, stream, False, spec.early)
        maxima = fewer
    quantize_tile(x, values, scales, turned_values, turned_scales, maxima, stream=stream, spec=spec)


def _leading(workspace: cute.Tensor, shape: tuple, pad: bool) -> tuple:
    """(a tensor of this shape, its rows padded to whole 16 bytes where `pad`, what lies behind it)."""
    pitch = cute.ceil_div(shape[-1], MAXIMA_ALIGN) * MAXIMA_ALIGN if pad else shape[-1]
    strides, step = [1], pitch
    for size in reversed(shape[1:-1]):
        strides.append(step)
        step = step * size
    strides.append(Int64(step))  # the only one that may reach beyond 32 bits
    layout = cute.make_layout(tuple(shape), stride=tuple(reversed(strides)))
    count = cute.ceil_div(Int64(step) * shape[0], MAXIMA_ALIGN) * MAXIMA_ALIGN
    behind = (workspace.iterator + count).align(4 * MAXIMA_ALIGN)
    return cute.make_tensor(workspace.iterator, layout), cute.make_tensor(behind, cute.make_layout(1))
