"""Where a sequence of a batch lies: the same everywhere (dense), or by prefix sums (packed, 'varlen')."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

V_STEP = 16
"""Keys whose values an 8-bit operand holds in an order of its own: where transposed values may begin."""


class SeqInfo(NamedTuple):
    """Rows before a sequence in the packed tensors, and its lengths."""

    q_start: Int32
    k_start: Int32
    q_len: Int32
    k_len: Int32


class SeqExtent(NamedTuple):
    """What the lengths of all sequences follow from.

    `q_len` and `k_len` are those of a dense batch. `cu` is None or (cu_q, cu_k), int32 of batch + 1
    prefix sums; `used_k` is None or int32 (batch,), the keys of each sequence that count.
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


@cute.jit
def seq_info(extent: SeqExtent, batch: Int32) -> SeqInfo:
    """Place and lengths of sequence `batch`."""
    q_start, k_start, q_len, k_len = Int32(0), Int32(0), extent.q_len, extent.k_len
    if cutlass.const_expr(extent.cu is not None):
        q_start, k_start = extent.cu[0][batch], extent.cu[1][batch]
        q_len, k_len = extent.cu[0][batch + 1] - q_start, extent.cu[1][batch + 1] - k_start
    if cutlass.const_expr(extent.used_k is not None):
        k_len = cutlass.min(extent.used_k[batch], k_len)
    return SeqInfo(q_start, k_start, q_len, k_len)
