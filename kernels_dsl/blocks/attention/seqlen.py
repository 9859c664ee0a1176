"""Where a sequence of a batch lies: the same everywhere (dense), or by prefix sums (packed, 'varlen')."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

V_STEP = 16
"""Keys whose values an 8-bit operand holds in an order of its own: where transposed values may begin."""


class SeqInfo(NamedTuple):
    """Rows before a sequence in the packed tensors, and its lengths, which are not negative."""

    q_start: Int32
    k_start: Int32
    q_len: Int32
    k_len: Int32


class SeqExtent(NamedTuple):
    """What the lengths of all sequences follow from.

    `q_len` and `k_len` are those of a dense batch, or the rows of packed tensors. `cu` is None or
    (cu_q, cu_k), int32 of batch + 1 prefix sums; `used_k` is None or int32 (batch,), the keys of each
    sequence that count.
    """

    q_len: Int32
    k_len: Int32
    cu: tuple | None
    used_k: cute.Tensor | None


def padded_start(start: Int32, sequence: Int32) -> Int32:
    """Where a packed sequence begins in a tensor whose sequences begin at multiples of V_STEP.

    There is room for each, rounded up to V_STEP.
    """
    return start // V_STEP * V_STEP + sequence * V_STEP


class Span(NamedTuple):
    """Rows of a packed tensor."""

    start: Int32
    length: Int32


def row_within(row: Int32, rows: Int32) -> Int32:
    """`row`, or the nearest number from 0 to `rows`."""
    return cutlass.max(cutlass.min(row, rows), 0)


def span_of(starts: cute.Tensor, sequence: Int32, rows: Int32) -> Span:
    """Rows of a sequence by prefix sums, within a tensor of `rows` rows whatever the sums are: sums that fall
    or lie outside give wrong results, but reach no memory beside the tensor."""
    first = row_within(starts[sequence], rows)
    return Span(first, cutlass.max(row_within(starts[sequence + 1], rows) - first, 0))


@cute.jit
def seq_info(extent: SeqExtent, batch: Int32) -> SeqInfo:
    """Place and lengths of sequence `batch`."""
    q_start, k_start, q_len, k_len = Int32(0), Int32(0), extent.q_len, extent.k_len
    if cutlass.const_expr(extent.cu is not None):
        q_start, q_len = span_of(extent.cu[0], batch, extent.q_len)
        k_start, k_len = span_of(extent.cu[1], batch, extent.k_len)
    if cutlass.const_expr(extent.used_k is not None):
        k_len = row_within(extent.used_k[batch], k_len)
    return SeqInfo(q_start, k_start, q_len, k_len)
