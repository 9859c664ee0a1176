"""Quantisation with scales that must be known before, of all, matrices or lines: its kernels together."""

import cutlass
import cutlass.cute as cute

from .amax import amax_parts
from .tile import quantize_tile


def quantize_by_maxima(
    x: cute.Tensor,
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    maxima: cute.Tensor,
    row_maxima: cute.Tensor | None,
    fewer: cute.Tensor | None,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch `amax_parts` and `quantize_tile` of the same x, by `spec`; the tensors are theirs.

    maxima and row_maxima: `amax_parts`'s, written. fewer: None, or where there are many maxima, maxima of
    those, which `quantize_tile` reads in their place: (1, P) float32, or (L, P, M) of row_maxima.
    """
    columns = "lines" in (spec.plain, spec.turned)
    amax_parts(x, maxima, row_maxima, stream, columns, spec.early)
    if cutlass.const_expr(row_maxima is not None):
        amax_parts(row_maxima, fewer, None, stream, True, spec.early)
        row_maxima = fewer
    elif cutlass.const_expr(fewer is not None):
        amax_parts(maxima, fewer, None, stream, False, spec.early)
        maxima = fewer
    quantize_tile(
        x, values, scales, turned_values, turned_scales, maxima, row_maxima, stream=stream, spec=spec
    )
