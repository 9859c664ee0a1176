"""Host function of the dense GEMM for the SM90 family as the op calls it; see `entry_views`."""

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.config.gemm import EntryLayout, Sm90GemmConfig
from kernels_dsl.kernels.gemm.entry_views import views_of
from kernels_dsl.kernels.gemm.sm90 import gemm_sm90


def gemm_sm90_entry(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    operands: Operands | None,
    max_ctas: cutlass.Int32,
    stream,
    config: cutlass.Constexpr[Sm90GemmConfig],
    epilogue: cutlass.Constexpr,
    layout: cutlass.Constexpr[EntryLayout],
):
    """Launches the TMA + WGMMA family on tensors in PyTorch's orientation."""
    views = views_of(a, b, d, operands, layout, config.split_k, config.stream_k)
    gemm_sm90(views, max_ctas, stream, config, epilogue)
