"""The gradient of an additive mask: P (dP - row sum) of every query and key, stored once for each head.

A warp stores eight neighbouring keys of a query at a time: 32 bytes of float32, a whole sector.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from kernels_dsl.blocks.attention.mask import KEY_ROWS, ScoreOrigin
from kernels_dsl.blocks.attention.probabilities import ELEMENTS, ScoreStep, part_of


@cute.jit
def store_mask_gradient(
    target: cute.Tensor,  # (B, H, Sq, Sk), contiguous
    at: ScoreStep,
    slopes: cute.Tensor,
    probs: cute.Tensor | None,
    columns: cute.Tensor | None,
):
    """Stores a thread's `slopes`, accumulators (keys, queries), to the gradient of the mask.

    Where given, `columns` of its queries are subtracted first, and `probs`, in the same order, multiply the
    differences.
    """
    head = head_of(target, at.origin)
    last_query = cutlass.min(at.seq.q_len, target.shape[2])
    last_key = cutlass.min(at.seq.k_len, target.shape[3])
    for n in cutlass.range_constexpr(cute.size(slopes) // ELEMENTS):
        part = part_of(slopes, at.origin, n)
        for c in cutlass.range_constexpr(cute.size(part.values, mode=[1])):
            i = part.origin.row + KEY_ROWS.query(c)
            for r in cutlass.range_constexpr(cute.size(part.values, mode=[0])):
                j = part.origin.column + KEY_ROWS.key(r)
                value = part.values[r, c]
                if cutlass.const_expr(columns is not None):
                    value = value - columns[part.first_query + c]
                if cutlass.const_expr(probs is not None):
                    factors = cute.make_tensor(probs.iterator + ELEMENTS * n, part.values.layout)
                    value = factors[r, c].to(Float32) * value
                if i < last_query and j < last_key:
                    head[i, j] = value.to(target.element_type)


def head_of(target: cute.Tensor, origin: ScoreOrigin) -> cute.Tensor:
    """Queries and keys (Sq, Sk) of the head of a step. A tensor may have 2³¹ elements and more."""
    heads, rows, keys = target.shape[1], target.shape[2], target.shape[3]
    first = (Int64(origin.batch) * heads + origin.head) * rows * keys
    return cute.make_tensor(target.iterator + first, cute.make_layout((rows, keys), stride=(Int64(keys), 1)))
