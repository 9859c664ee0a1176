"""Two-level sums of fp8 products: the matrix unit's of one K tile, scaled and added to a float32 set.

The first level is a K tile, within one group of 128 of K, so that scales of such groups (1x128 of either
operand, 128x128 of either) are factors of a whole partial sum. Their loads start with the K tile's first
product and are used after its last. In block-sparse products the groups are the kept blocks (`ListSum`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.config.promotion import GROUP, Promotion


@dataclass(frozen=True)
class TileScales:
    """The scales of one operand that a thread's accumulators need."""

    mS: cute.Tensor  # (groups of MN, groups of K) of the tile's batch
    tCcX: cute.Tensor  # (rows): the MN coordinates of the accumulators' rows, or columns
    tCrS: cute.Tensor  # (rows), or (1) where the whole tile has one
    rows: int  # of MN that share a scale

    @cute.jit
    def fetch(self, group: Int32) -> None:
        """Start the loads of the scales of K group `group`; beyond the tensor, the last ones again."""
        last = self.mS.shape[0] - 1
        for i in range_constexpr(cute.size(self.tCrS)):
            row = self.tCcX[i] if const_expr(self.rows == 1) else self.tCcX[i] // self.rows
            self.tCrS[i] = self.mS[cutlass.min(row, last), group]

    def of(self, i: int) -> Float32:
        """The scale of row (or column) `i` of the accumulators."""
        return self.tCrS[i if cute.size(self.tCrS) > 1 else 0]


def tile_scales(mS: cute.Tensor, coords: list, rows: int, extent: int) -> TileScales:
    """Scales of the rows at `coords`; a tile of `extent` that lies within one group has a single one."""
    single = rows > 1 and rows % extent == 0
    tCcX = cute.make_rmem_tensor(len(coords), Int32)
    for i, coord in enumerate(coords):
        tCcX[i] = Int32(coord)
    return TileScales(mS, tCcX, cute.make_rmem_tensor(1 if single else len(coords), Float32), rows)


@dataclass(frozen=True)
class PromotedSum:
    """The second set of accumulators of a thread, and the scales of what goes into it."""

    total: cute.Tensor  # ((2, 2), MMA_M, MMA_N) float32
    a: Any  # TileScales, or None
    b: Any
    tile_k: int

    @cute.jit
    def fetch(self, k_tile: Int32) -> None:
        """Start the loads of the scales of K tile `k_tile`."""
        group = k_tile if const_expr(self.tile_k == GROUP) else k_tile * self.tile_k // GROUP
        if const_expr(self.a is not None):
            self.a.fetch(group)
            self.b.fetch(group)

    parts = 1
    """Partial sums of a K tile."""

    @cute.jit
    def add(self, acc: cute.Tensor, part: cutlass.Constexpr) -> None:
        """total += acc, each element times the scales of its row and its column."""
        m_steps, n_steps = cute.size(acc, mode=[1]), cute.size(acc, mode=[2])
        for i in range_constexpr(m_steps):
            for j in range_constexpr(2):
                for n in range_constexpr(n_steps):
                    for v in range_constexpr(2):
                        part = acc[(v, j), i, n]
                        if const_expr(self.a is not None):
                            part = part * (self.a.of(2 * i + j) * self.b.of(2 * n + v))
                        self.total[(v, j), i, n] = self.total[(v, j), i, n] + part


def promoted_sum(
    promotion: Promotion | None,
    scales: tuple[cute.Tensor, cute.Tensor] | None,  # of A and of B: (groups of M or N, groups of K, L)
    tiled_mma: cute.TiledMma,
    tile: tuple[int, int, int],
    coord: tuple[Int32, Int32, Int32],  # tile along M and N, batch
    tidx: Int32,
) -> PromotedSum | None:
    """The second level for one output tile, zeroed; None where there is none.

    ValueError where a K tile would not lie within one group of 128.
    """
    if promotion is None:
        return None
    if GROUP % tile[2]:
        raise ValueError(f"tile_k is {tile[2]}; it must divide {GROUP} where partial sums are promoted")
    total = cute.make_rmem_tensor(tiled_mma.partition_shape_C(tile[:2]), Float32)
    total.fill(0.0)
    if promotion.rows_a == 0:
        return PromotedSum(total, None, None, tile[2])
    cC = cute.make_identity_tensor(tile[:2])
    tCcC = tiled_mma.get_slice(tidx).partition_C(cC)  # ((2, 2), MMA_M, MMA_N) of (m, n)
    m_steps, n_steps = cute.size(tCcC, mode=[1]), cute.size(tCcC, mode=[2])
    rows = [coord[0] * tile[0] + tCcC[(0, j), i, 0][0] for i in range(m_steps) for j in range(2)]
    columns = [coord[1] * tile[1] + tCcC[(v, 0), 0, n][1] for n in range(n_steps) for v in range(2)]
    a = tile_scales(scales[0][None, None, coord[2]], rows, promotion.rows_a, tile[0])
    b = tile_scales(scales[1][None, None, coord[2]], columns, promotion.rows_b, tile[1])
    return PromotedSum(total, a, b, tile[2])


@dataclass(frozen=True)
class ListSum:
    """The second level where kept blocks put end to end are the K axis, and each has a scale.

    A K tile has `parts` partial sums, each of which lies within one block.
    """

    total: cute.Tensor  # ((2, 2), MMA_M, MMA_N) float32
    kept: cute.Tensor  # (entries): the blocks of the list
    scales: cute.Tensor  # (blocks) float32
    held: cute.Tensor  # (parts) float32: the scales of a K tile's partial sums
    block_k: int
    tile_k: int

    @property
    def parts(self) -> int:
        """Partial sums of a K tile."""
        return self.tile_k // math.gcd(self.tile_k, self.block_k)

    @cute.jit
    def fetch(self, k_tile: Int32) -> None:
        """Start the loads of the scales of K tile `k_tile`; 0 behind the list's end."""
        kept, scales = self.kept, self.scales
        parts, tile_k, block_k = self.parts, self.tile_k, self.block_k
        for part in range_constexpr(parts):
            entry = (k_tile * tile_k + part * (tile_k // parts)) // block_k
            scale = Float32(0.0)
            if entry < cute.size(kept):  # no `self` in here: its integers would become values of the GPU's
                scale = scales[kept[entry]]
            self.held[part] = scale

    @cute.jit
    def add(self, acc: cute.Tensor, part: cutlass.Constexpr) -> None:
        """total += acc times the scale of partial sum `part` of the K tile."""
        for i in range_constexpr(cute.size(acc)):
            self.total[i] = self.total[i] + acc[i] * self.held[part]


def list_sum(
    tiled_mma: cute.TiledMma,
    tile: tuple[int, int, int],
    kept: cute.Tensor,
    scales: cute.Tensor,
    block_k: int,
    step_k: int,
) -> ListSum:
    """The second level for one output tile, zeroed. `step_k`: elements of K of a matrix instruction.

    ValueError where an instruction would not lie within one block.
    """
    if block_k % step_k:
        raise ValueError(
            f"blocks have {block_k} elements along K; with scales it must be a multiple of {step_k}"
        )
    total = cute.make_rmem_tensor(tiled_mma.partition_shape_C(tile[:2]), Float32)
    total.fill(0.0)
    held = cute.make_rmem_tensor(tile[2] // math.gcd(tile[2], block_k), Float32)
    return ListSum(total, kept, scales, held, block_k, tile[2])
