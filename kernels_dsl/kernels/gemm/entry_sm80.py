"""Host function of the dense GEMM for the SM80 family as the op calls it; see `entry_views`."""

import cutlass
import cutlass.cute as cute

from kernels_dsl.config.gemm import EntryLayout, Sm80GemmConfig
from kernels_dsl.kernels.gemm.entry_views import views_of
from kernels_dsl.kernels.gemm.sm80 import gemm_sm80, scaled_gemm_sm80


def gemm_sm80_entry(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    operands: tuple | None,
    max_ctas: cutlass.Int32,
    stream,
    config: cutlass.Constexpr[Sm80GemmConfig],
    epilogue: cutlass.Constexpr,
    layout: cutlass.Constexpr[EntryLayout],
):
    """Launch the cp.async + mma.sync family on tensors in PyTorch's orientation."""
    views = views_of(a, b, d, operands, layout, config.split_k)
    if views.promotion is None and views.offsets is None:
        gemm_sm80(views.a, views.b, views.d, views.operands, max_ctas, stream, config, epilogue)
        return
    tensors = views.a, views.b, views.d, views.scales, views.operands
    how = {"config": config, "epilogue": epilogue, "promotion": views.promotion, "offsets": views.offsets}
    scaled_gemm_sm80(*tensors, max_ctas, stream, **how)
