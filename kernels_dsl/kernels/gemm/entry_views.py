"""Views for the host functions that the op calls: PyTorch's orientation in, the kernel's out.

There is one such function a family, each in its own module, so that an edit of one family's kernel leaves
the compiled kernels of the other valid. It makes the kernel's views of the caller's tensors while tracing
and calls the kernel's host function, so a call from Python passes the tensors as they are.

    a (M, K) or (L, M, K), b (K, N) or (L, K, N), d (M, N) or (L, M, N)

With `layout.swap` the kernel computes D^T = B^T A^T: that makes the contiguous mode of a
column-major D the kernel's N. With `config.split_k` > 1, `d` is the float32 workspace of partial
sums, (L * split_k, rows, columns) in the kernel's own orientation, swapped or not.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.mainloop.operand_views import batch_extent, batch_first_view, epilogue_operand_view
from kernels_dsl.blocks.mainloop.scale_ring import Scales
from kernels_dsl.config.gemm import EntryLayout
from kernels_dsl.config.promotion import Promotion


class StreamK(NamedTuple):
    """Tiles that are cut along K: `partial_sums.SumMemory`, cut tiles, K tiles of a cluster's share."""

    counters: cute.Tensor
    workspace: cute.Tensor
    tiles: Int32
    share: Int32


@dataclass(frozen=True)
class Views:
    """A (M, K, L), B (N, K, L), D (M, N, L) and the epilogue's operands (M, N, L), in the kernel's sense.

    `scales`: of 128 elements of K each, (groups of M, groups of K, L) and (groups of N, groups of K, L); None
    where `promotion`, also in the kernel's sense, has none. `offsets`: the ends of groups of rows of A and D,
    each with a matrix of B, L groups; None where there are none.
    """

    a: cute.Tensor
    b: cute.Tensor
    d: cute.Tensor
    operands: Operands
    scales: Scales | None
    promotion: Promotion | None
    columns: Int32 | int
    """N of the product: D's, or twice that where D is gated."""
    offsets: cute.Tensor | None = None
    stream_k: StreamK | None = None


def views_of(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    operands: Operands | None,
    layout: EntryLayout,
    split_k: int,
    stream_k: bool = False,
) -> Views:
    """The kernel's views of a call's tensors."""
    offsets = cut = None
    left: list[Any] = list(operands or ())
    if stream_k:
        counters, workspace, tiles, share, *left = left
        cut = StreamK(counters, workspace, tiles, share)
    if layout.grouped:
        offsets, *left = left
        batch = offsets.shape[0]
        mD = batch_first_view(d, batch, swap=False)
    elif split_k > 1:
        batch = batch_extent(a, b)
        mD = batch_first_view(d, 1, swap=False)  # (M, N, L * split_k), as the kernel sees it
    else:
        batch = batch_extent(d, a, b)
        mD = batch_first_view(d, batch, swap=layout.swap)  # (M, N, L)
    scales, promotion = None, layout.promotion
    if promotion is not None and promotion.scaled:
        scale_a, scale_b, *left = left
        # (M, groups of K) and (groups of K, groups of N), as a and b lie themselves.
        scales = Scales(
            batch_first_view(scale_a, batch, swap=False), batch_first_view(scale_b, batch, swap=True)
        )
    if layout.swap:
        promotion = None if promotion is None else promotion.swapped()
        scales = None if scales is None else Scales(scales.b, scales.a)
        mA = batch_first_view(b, batch, swap=True)  # (K, N) seen as the kernel's (M, K, L)
        mB = batch_first_view(a, batch, swap=False)  # (M, K) seen as the kernel's (N, K, L)
    else:
        mA = batch_first_view(a, batch, swap=False)  # (M, K, L)
        mB = batch_first_view(b, batch, swap=True)  # (N, K, L)
    shape = product_shape((mD.shape[0], mD.shape[1], batch), layout)
    views = operand_views(tuple(left), shape, layout)
    return Views(mA, mB, mD, views, scales, promotion, shape[1], offsets, cut)


def product_shape(shape: cute.Shape, layout: EntryLayout) -> cute.Shape:
    """(M, N, L) of the product whose result has `shape`."""
    return (shape[0], 2 * shape[1], shape[2]) if layout.gated else shape


def operand_views(operands: Operands | None, shape: cute.Shape, layout: EntryLayout) -> Operands:
    """The epilogue's operands as tensors of `shape`, in the kernel's orientation; scalars as they are.

    `operands` is None where there are none: the DSL has no argument type for an empty tuple.
    """
    operands = operands or ()
    if len(operands) != len(layout.operand_modes):
        raise ValueError(f"{len(operands)} epilogue operands, {len(layout.operand_modes)} descriptions")
    return tuple(
        epilogue_operand_view(operand, modes, shape, layout.swap)
        for operand, modes in zip(operands, layout.operand_modes, strict=True)
    )
