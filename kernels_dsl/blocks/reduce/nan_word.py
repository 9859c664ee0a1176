"""A word in global memory that tells a launch behind this one whether a sum here was NaN."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.config.bsr import NAN_WORD

CHAINS = 8
"""Additions that do not wait for each other; they divide a thread's sums."""


@cute.jit
def tell(acc: cute.Tensor, words: cute.Tensor):
    """Sets words[NAN_WORD] where one of this thread's float32 sums is NaN or infinite."""
    zeros = cute.make_rmem_tensor(CHAINS, Float32)  # NaN by what is not finite
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(acc) // CHAINS):
        for chain in cutlass.range_constexpr(CHAINS):
            zeros[chain] = zeros[chain] + acc[i * CHAINS + chain] * Float32(0.0)
    for chain in cutlass.range_constexpr(1, CHAINS):
        zeros[0] = zeros[0] + zeros[chain]
    if not zeros[0] == Float32(0.0):
        cute.arch.atomic_or(words.iterator + NAN_WORD, Int32(1), sem="relaxed", scope="gpu")


@cute.jit
def tile_to_redo(words: cute.Tensor, tile: Int32) -> Int32:
    """The tile, or -1 where the launch before found no sum that is NaN or infinite."""
    if words[NAN_WORD] == 0:
        tile = Int32(-1)
    return tile
