"""Host function of the block-sparse GEMM for the SM90 family as the op calls it; see `entry_views`."""

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.reduce.partial_sums import SumMemory
from kernels_dsl.config.bsr import BsrLayout, Sm90BsrConfig
from kernels_dsl.kernels.bsr.entry_views import scales_view, views_of
from kernels_dsl.kernels.bsr.sm90 import bsr_sm90


def _swapped(tensor):
    """(M, N, L) as (N, M, L); a scalar as it is."""
    if not isinstance(tensor, cute.Tensor):
        return tensor
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0, 2]))


def bsr_sm90_entry(
    values: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    lists: cute.Tensor,
    counter: cute.Tensor,
    workspace: cute.Tensor | None,
    operands: Operands | None,
    max_ctas: cutlass.Int32,
    stream,
    config: cutlass.Constexpr[Sm90BsrConfig],
    epilogue: cutlass.Constexpr,
    layout: cutlass.Constexpr[BsrLayout],
):
    """Launches the TMA + WGMMA kernel. `lists`: int32, see `block_lists.unpack_lists`; `counter`:
    int32 (1,), 0, see `item_queue`; with `config.split` more counters follow it, and `workspace` is that of
    `partial_sums`; with `layout.nans` the word NAN_WORD follows. With `layout.scaled` the first of the
    operands is float32 (blocks) or (L, blocks), or (blocks, 1, 1) or (L, blocks, 1, 1): the factor of each
    kept block.
    """
    scales = None
    if layout.scaled:
        scales, operands = operands[0], operands[1:]
    views = views_of(values, b, d, operands, layout)
    mD, extra = views.d, views.operands
    if config.sparse_on_m == layout.dense_left:  # the blocked mode is D's other one
        mD, extra = _swapped(mD), tuple(_swapped(x) for x in extra)
    bsr_sm90(
        views.s, views.x, mD, views.lists(lists, layout, config.split, config.pairs),
        SumMemory(counter, workspace), extra, max_ctas, stream, config=config, epilogue=epilogue,
        scales=scales_view(scales, mD.shape[2]) if layout.scaled else None, nans=layout.nans,
    )  # fmt: skip
