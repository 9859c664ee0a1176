"""Quantisation with scales that must be known before, of all, matrices or columns: its kernels together."""

import cutlass
import cutlass.cute as cute

from .amax import amax_parts
from .rows import quantize_rows
from .tile import quantize_tile


def quantize_by_maxima(
    x: cute.Tensor,
    values: cute.Tensor | None,
    scales: cute.Tensor | None,
    turned_values: cute.Tensor | None,
    turned_scales: cute.Tensor | None,
    maxima: cute.Tensor,
    fewer: cute.Tensor | None,
    stream,
    spec: cutlass.Constexpr,
    row_spec: cutlass.Constexpr,
):
    """Launch `amax_parts` and `quantize_tile` of the same x, by `spec`; the tensors are theirs.

    maxima: `amax_parts`'s, written. fewer: (1, P) float32, maxima of those, which `quantize_tile` reads in
    their place; None where there are not so many. row_spec: a `RowQuantization` where values and scales are
    `quantize_rows`'s, else None.
    """
    columns = spec.turned == "lines"
    if cutlass.const_expr(row_spec is not None):
        quantize_rows(x, values, scales, stream, row_spec)
        values, scales = None, None
    amax_parts(x, maxima, stream, columns, spec.early)
    if cutlass.const_expr(fewer is not None):
        amax_parts(maxima, fewer, stream, False, spec.early)
        maxima = fewer
    quantize_tile(x, values, scales, turned_values, turned_scales, maxima, stream, spec)
