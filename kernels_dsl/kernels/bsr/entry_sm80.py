"""Host function of the block-sparse GEMM for the SM80 family as the op calls it; see `entry_views`."""

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.config.bsr import BsrLayout
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.kernels.bsr.entry_views import scales_view, views_of
from kernels_dsl.kernels.bsr.sm80 import bsr_sm80


def bsr_sm80_entry(
    values: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    lists: cute.Tensor,
    counter: None,
    workspace: None,
    operands: Operands | None,
    max_ctas: cutlass.Int32,
    stream,
    config: cutlass.Constexpr[Sm80GemmConfig],
    epilogue: cutlass.Constexpr,
    layout: cutlass.Constexpr[BsrLayout],
):
    """Launch the cp.async + mma.sync kernel. `lists`: int32, see `block_lists.unpack_lists`.

    With `layout.scaled` the first operand is the scales, as in `bsr_sm90_entry`. `counter`, `workspace` and
    `max_ctas` are the SM90 family's.
    """
    scales = None
    if layout.scaled:
        scales, operands = operands[0], operands[1:]
    views = views_of(values, b, d, operands, layout)
    if scales is not None:
        scales = scales_view(scales, views.d.shape[2])
    bsr_sm80(views, views.lists(lists, layout), scales, stream, config, epilogue, layout.dense_left)
