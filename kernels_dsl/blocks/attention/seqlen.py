"""Position and length of each sequence of a batch: the same for all (dense), or by prefix sums (packed)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

V_STEP = 16
"""Keys whose values an 8-bit operand holds in an order of its own: transposed values begin at multiples."""


class SeqLens(NamedTuple):
    """Packed sequences as a caller describes them, int32."""

    cu_q: cute.Tensor
    """(batch + 1,) prefix sums of query lengths."""
    cu_k: cute.Tensor | None
    """(batch + 1,) prefix sums of key lengths; None where keys lie in pages."""
    used_k: cute.Tensor | None
    """(batch,) keys of each sequence that count; None: all."""


class SeqInfo(NamedTuple):
    """Rows before a sequence in the packed tensors, and its lengths, which are not negative."""

    q_start: Int32
    k_start: Int32
    q_len: Int32
    k_len: Int32


class SeqExtent(NamedTuple):
    """Lengths of all sequences: `q_len` and `k_len` of a dense batch, or the rows of packed tensors.

    The tensors are those of `SeqLens`, None for a dense batch.
    """

    q_len: Int32
    k_len: Int32
    cu_q: cute.Tensor | None
    cu_k: cute.Tensor | None
    used_k: cute.Tensor | None


class Span(NamedTuple):
    """Rows of a packed tensor."""

    start: Int32
    length: Int32


def padded_start(start: Int32, sequence: Int32) -> Int32:
    """First row of a packed sequence in a tensor whose sequences begin at multiples of V_STEP.

    There is room for each, rounded up to V_STEP.
    """
    return start // V_STEP * V_STEP + sequence * V_STEP


def row_within(row: Int32, rows: Int32) -> Int32:
    """`row`, or the nearest number from 0 to `rows`."""
    return cutlass.max(cutlass.min(row, rows), 0)


def span_of(starts: cute.Tensor, sequence: Int32, rows: Int32) -> Span:
    """Rows of a sequence by prefix sums, within a tensor of `rows` rows whatever the sums are: sums that fall
    or lie outside give wrong results, but reach no memory outside the tensor."""
    first = row_within(starts[sequence], rows)
    return Span(first, cutlass.max(row_within(starts[sequence + 1], rows) - first, 0))


@cute.jit
def seq_info(extent: SeqExtent, batch: Int32) -> SeqInfo:
    """Position and lengths of sequence `batch`."""
    q_start, k_start, q_len, k_len = Int32(0), Int32(0), extent.q_len, extent.k_len
    if cutlass.const_expr(extent.cu_q is not None):
        q_start, q_len = span_of(extent.cu_q, batch, extent.q_len)
    if cutlass.const_expr(extent.cu_k is not None):
        k_start, k_len = span_of(extent.cu_k, batch, extent.k_len)
    if cutlass.const_expr(extent.used_k is not None):
        k_len = row_within(extent.used_k[batch], k_len)
    return SeqInfo(q_start, k_start, q_len, k_len)
