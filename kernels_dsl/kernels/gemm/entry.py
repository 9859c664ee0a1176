"""Host functions of the dense GEMM as the op calls them: PyTorch's orientation in, a launch out.

Each one makes the kernel's views of the caller's tensors while tracing and calls the host function
of the kernel family, so a call from Python passes the tensors as they are.

    a (M, K) or (L, M, K), b (K, N) or (L, K, N), d (M, N) or (L, M, N)

With `layout.swap` the kernel computes D^T = B^T A^T: that makes the contiguous mode of a
column-major D the kernel's N. With `config.split_k` > 1, `d` is the float32 workspace of partial
sums, (L * split_k, rows, columns) in the kernel's own orientation, swapped or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.operand_views import batch_extent, batch_first_view, epilogue_operand_view
from kernels_dsl.config.gemm import EntryLayout, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.kernels.gemm.sm80 import gemm_sm80
from kernels_dsl.kernels.gemm.sm90 import gemm_sm90
from kernels_dsl.kernels.gemm.splitk_reduce import splitk_reduce


@dataclass(frozen=True)
class _Views:
    a: cute.Tensor
    b: cute.Tensor
    d: cute.Tensor
    operands: tuple


def _views(a, b, d, operands, layout: EntryLayout, split_k: int) -> _Views:
    if split_k > 1:
        batch = batch_extent(a, b)
        mD = batch_first_view(d, 1, swap=False)  # (M, N, L * split_k), as the kernel sees it
    else:
        batch = batch_extent(d, a, b)
        mD = batch_first_view(d, batch, swap=layout.swap)  # (M, N, L)
    if layout.swap:
        mA = batch_first_view(b, batch, swap=True)  # (K, N) seen as the kernel's (M, K, L)
        mB = batch_first_view(a, batch, swap=False)  # (M, K) seen as the kernel's (N, K, L)
    else:
        mA = batch_first_view(a, batch, swap=False)  # (M, K, L)
        mB = batch_first_view(b, batch, swap=True)  # (N, K, L)
    shape = (mD.shape[0], mD.shape[1], batch)
    return _Views(mA, mB, mD, _operand_views(operands, shape, layout))


def _operand_views(operands, shape, layout: EntryLayout) -> tuple:
    if len(operands) != len(layout.operand_modes):
        raise ValueError(f"{len(operands)} epilogue operands, {len(layout.operand_modes)} descriptions")
    return tuple(
        epilogue_operand_view(operand, modes, shape, layout.swap)
        for operand, modes in zip(operands, layout.operand_modes, strict=True)
    )


def gemm_sm90_entry(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    operands: tuple,
    max_ctas: cutlass.Int32,
    stream,
    config: cutlass.Constexpr[Sm90GemmConfig],
    epilogue: cutlass.Constexpr,
    layout: cutlass.Constexpr[EntryLayout],
):
    """Launch the TMA + WGMMA family on tensors in PyTorch's orientation."""
    views = _views(a, b, d, operands, layout, config.split_k)
    gemm_sm90(views.a, views.b, views.d, views.operands, max_ctas, stream, config, epilogue)


def gemm_sm80_entry(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    operands: tuple,
    max_ctas: cutlass.Int32,
    stream,
    config: cutlass.Constexpr[Sm80GemmConfig],
    epilogue: cutlass.Constexpr,
    layout: cutlass.Constexpr[EntryLayout],
):
    """Launch the cp.async + mma.sync family on tensors in PyTorch's orientation."""
    views = _views(a, b, d, operands, layout, config.split_k)
    gemm_sm80(views.a, views.b, views.d, views.operands, max_ctas, stream, config, epilogue)


def splitk_reduce_entry(
    workspace: cute.Tensor,
    d: cute.Tensor,
    operands: tuple,
    stream,
    split_k: cutlass.Constexpr[int],
    epilogue: cutlass.Constexpr,
    layout: cutlass.Constexpr[EntryLayout],
):
    """Sum the partial results of a split-K GEMM in a fixed order and apply the epilogue.

    `workspace` (L * split_k, rows, columns) float32 in the kernel's orientation, `d` in PyTorch's.
    """
    mW = batch_first_view(workspace, 1, swap=False)  # (M, N, L * split_k)
    mD = batch_first_view(d, 1, swap=layout.swap)  # (M, N, L)
    views = _operand_views(operands, mD.shape, layout)
    splitk_reduce(mW, mD, views, stream, split_k, epilogue)
