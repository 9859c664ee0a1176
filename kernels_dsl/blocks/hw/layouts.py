"""Shared-memory layouts that TMA writes and WGMMA or a TMA store reads: swizzled, one mode per stage."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

SWIZZLES = (
    # bytes of the contiguous mode that one swizzle atom spans, K-major kind, MN-major kind
    (128, warpgroup.SmemLayoutAtomKind.K_SW128, warpgroup.SmemLayoutAtomKind.MN_SW128),
    (64, warpgroup.SmemLayoutAtomKind.K_SW64, warpgroup.SmemLayoutAtomKind.MN_SW64),
    (32, warpgroup.SmemLayoutAtomKind.K_SW32, warpgroup.SmemLayoutAtomKind.MN_SW32),
    (16, warpgroup.SmemLayoutAtomKind.K_INTER, warpgroup.SmemLayoutAtomKind.MN_INTER),
)


def major_mode(tensor: cute.Tensor) -> OperandMajorMode:
    """K where mode 1 of (MN, K, L) is contiguous, MN where mode 0 is. Fails at trace time if neither is."""
    strides = tensor.stride
    if cutlass.const_expr(cute.is_static(strides[1]) and strides[1] == 1):
        return OperandMajorMode.K
    if cutlass.const_expr(cute.is_static(strides[0]) and strides[0] == 1):
        return OperandMajorMode.MN
    raise ValueError(f"operand must be contiguous in mode 0 or 1; strides are {strides}")


def staged_smem_layout(
    dtype: type[cutlass.Numeric], tile: tuple[int, int], stages: int, major: OperandMajorMode
) -> cute.ComposedLayout:
    """Layout (tile[0], tile[1], stages) with the widest swizzle whose span divides the contiguous mode.

    `tile` is (MN, K). The span of a swizzle is 128, 64, 32 or 16 bytes (PTX ISA, 'swizzling modes').
    """
    k_major = major == OperandMajorMode.K
    row_bytes = tile[1 if k_major else 0] * dtype.width // 8
    kind = next((k if k_major else mn for span, k, mn in SWIZZLES if row_bytes % span == 0), None)
    if kind is None:
        raise ValueError(f"contiguous extent of a tile must be a multiple of 16 bytes; it is {row_bytes}")
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    # The contiguous mode is tiled first, so that the atoms of one TMA box are adjacent.
    return cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2) if k_major else (1, 0, 2))


def first_part(layout: cute.ComposedLayout, part: tuple[int, int]) -> cute.ComposedLayout:
    """Layout (part[0], part[1], stages) of the first part of a staged tile in equal parts."""
    if tuple(cute.size(layout, mode=[i]) for i in range(2)) == part:
        return layout
    return cute.slice_(cute.flat_divide(layout, part), (None, None, 0, 0, None))
