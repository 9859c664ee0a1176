"""A word in global memory that tells a launch behind this one whether a sum here was NaN."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.config.bsr import NAN_WORD


@cute.jit
def tell(acc: cute.Tensor, words: cute.Tensor):
    """Sets words[NAN_WORD] where one of this thread's float32 sums is NaN or infinite."""
    zero = Float32(0.0)  # NaN by what is not finite
    for i in cutlass.range_constexpr(cute.size(acc)):
        zero += acc[i] * Float32(0.0)
    if not zero == Float32(0.0):
        cute.arch.atomic_or(words.iterator + NAN_WORD, Int32(1), sem="relaxed", scope="gpu")


@cute.jit
def tile_to_redo(words: cute.Tensor, tile: Int32) -> Int32:
    """The tile, or -1 where the launch before found no sum that is NaN or infinite."""
    if words[NAN_WORD] == 0:
        tile = Int32(-1)
    return tile
