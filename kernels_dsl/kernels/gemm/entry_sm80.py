"""Host function of the dense GEMM for the SM80 family as the op calls it; see `entry_views`."""

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.config.gemm import EntryLayout, Sm80GemmConfig
from kernels_dsl.kernels.gemm.entry_views import views_of
from kernels_dsl.kernels.gemm.sm80 import gemm_sm80


def gemm_sm80_entry(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    operands: Operands | None,
    max_ctas: cutlass.Int32,
    stream,
    config: cutlass.Constexpr[Sm80GemmConfig],
    epilogue: cutlass.Constexpr,
    layout: cutlass.Constexpr[EntryLayout],
):
    """Launch the cp.async + mma.sync family on tensors in PyTorch's orientation.

    `max_ctas` has no effect: there is a CTA for each tile.
    """
    gemm_sm80(views_of(a, b, d, operands, layout, config.split_k), stream, config, epilogue)
