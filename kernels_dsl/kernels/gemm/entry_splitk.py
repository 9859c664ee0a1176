"""Host function of the dense GEMM for the second kernel of split-K as the op calls it; see `entry_views`."""

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.mainloop.operand_views import batch_first_view
from kernels_dsl.config.gemm import EntryLayout
from kernels_dsl.kernels.gemm.entry_views import operand_views, product_shape
from kernels_dsl.kernels.gemm.splitk_reduce import splitk_reduce


def splitk_reduce_entry(
    workspace: cute.Tensor,
    d: cute.Tensor,
    operands: Operands | None,
    stream,
    split_k: cutlass.Constexpr[int],
    epilogue: cutlass.Constexpr,
    layout: cutlass.Constexpr[EntryLayout],
    early: cutlass.Constexpr[bool],
):
    """Sum the partial results of a split-K GEMM in a fixed order and apply the epilogue.

    `workspace` (L * split_k, rows, columns) float32 in the kernel's orientation, `d` in PyTorch's.
    `early` launches it while the GEMM before it still runs, on SM90 and later.
    """
    mW = batch_first_view(workspace, 1, swap=False)  # (M, N, L * split_k)
    mD = batch_first_view(d, 1, swap=layout.swap)  # (M, N, L)
    views = operand_views(operands, product_shape(mD.shape, layout), layout)
    splitk_reduce(mW, mD, views, stream, split_k, epilogue, early)
