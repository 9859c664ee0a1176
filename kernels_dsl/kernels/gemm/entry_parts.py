"""Host function of the second kernel of a GEMM that reduces its result, as the op calls it."""

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.mainloop.operand_views import partials_view
from kernels_dsl.kernels.gemm.reduce_parts import reduce_parts


def reduce_parts_entry(
    partials: cute.Tensor, reduced: cute.Tensor, stream, reduction: cutlass.Constexpr[str]
):
    """Combines partial results (L, parts, lines) to `reduced` (L, fewer parts, lines), float32."""
    reduce_parts(partials_view(partials), partials_view(reduced), stream, reduction)
