"""PyTorch's orientation in, the block-sparse kernels' out: views made while tracing, as for dense GEMM."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.mainloop.operand_views import batch_extent, batch_first_view, epilogue_operand_view
from kernels_dsl.blocks.schedule.block_lists import BlockLists, unpack_lists
from kernels_dsl.config.bsr import BsrLayout


@dataclass(frozen=True)
class Views:
    """Kept blocks (block_mn, block_k, blocks, L), dense (X, block_k, K / block_k, L), the rest (M, N, L)."""

    s: cute.Tensor
    x: cute.Tensor
    d: cute.Tensor
    operands: Operands

    def lists(
        self, packed: cute.Tensor, layout: BsrLayout, split: bool = False, pairs: bool = False
    ) -> BlockLists:
        """The lists, one for each block along D's blocked mode, perhaps in pieces or pairs."""
        blocked = self.d.shape[1 if layout.dense_left else 0]
        entries = self.s.shape[2] * (2 if pairs else 1)
        return unpack_lists(packed, cute.ceil_div(blocked, self.s.shape[0]), entries, split)


def views_of(
    values: cute.Tensor, b: cute.Tensor, d: cute.Tensor, operands: Operands | None, layout: BsrLayout
) -> Views:
    """The kernel's views of a call's tensors.

    values (blocks, rows, columns) or (L, blocks, rows, columns), contiguous within blocks; b (K, N) or,
    with `dense_left`, (M, K); d (M, N); b and d with a leading L where there are batches.
    """
    batch = batch_extent(d)
    at = cute.rank(values) - 3
    extents, strides = layout.block, (layout.block[1], 1)
    mn, k = (1, 0) if layout.transposed else (0, 1)
    block_k = extents[k]
    s_layout = cute.make_layout(
        (extents[mn], block_k, values.shape[at], batch),
        stride=(strides[mn], strides[k], values.stride[at], values.stride[0] if at else 0),
    )
    mX = batch_first_view(b, batch, swap=not layout.dense_left)  # (X, K, L)
    x_layout = cute.make_layout(
        (mX.shape[0], block_k, mX.shape[1] // block_k, mX.shape[2]),
        stride=(mX.stride[0], mX.stride[1], block_k * mX.stride[1], mX.stride[2]),
    )
    mD = batch_first_view(d, batch, swap=False)
    shape = (mD.shape[0], mD.shape[1], batch)
    operands = operands or ()
    if len(operands) != len(layout.operand_modes):
        raise ValueError(f"{len(operands)} epilogue operands, {len(layout.operand_modes)} descriptions")
    viewed = tuple(
        epilogue_operand_view(operand, modes, shape, False)
        for operand, modes in zip(operands, layout.operand_modes, strict=True)
    )
    return Views(
        cute.make_tensor(values.iterator, s_layout), cute.make_tensor(mX.iterator, x_layout), mD, viewed
    )


def scales_view(scales: cute.Tensor, batch) -> cute.Tensor:
    """Scales (blocks) or (L, blocks), or these with two modes of size 1 after them, as (blocks, L)."""
    if cute.rank(scales) in (1, 3):
        layout = cute.make_layout((scales.shape[0], batch), stride=(scales.stride[0], 0))
        return cute.make_tensor(scales.iterator, layout)
    return cute.make_tensor(scales.iterator, cute.select(scales.layout, [1, 0]))


class SampledViews(NamedTuple):
    """A (M, K, L), B (N, K, L), values (rows, columns, blocks, L), and L, of a sampled product."""

    a: cute.Tensor
    b: cute.Tensor
    values: cute.Tensor
    batch: Int32


def sampled_views(
    a: cute.Tensor, b: cute.Tensor, values: cute.Tensor, block: tuple[int, int]
) -> SampledViews:
    """The views of a sampled product's tensors.

    a (M, K), b (K, N) or with a leading L; values (blocks, *block) or (L, blocks, *block), contiguous within
    blocks.
    """
    rank = cute.rank(values)
    batch = values.shape[0] if rank == 4 else batch_extent(a, b)
    mA = batch_first_view(a, batch, swap=False)  # (M, K, L)
    mB = batch_first_view(b, batch, swap=True)  # (N, K, L)
    layout = cute.make_layout(
        (*block, values.shape[rank - 3], batch),
        stride=(block[1], 1, values.stride[rank - 3], values.stride[0] if rank == 4 else 0),
    )
    return SampledViews(mA, mB, cute.make_tensor(values.iterator, layout), batch)
