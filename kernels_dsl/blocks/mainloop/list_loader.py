"""Loaders that follow a list of blocks: the block-sparse counterparts of `cp_async.TileLoader`.

`ListLoader`: an operand is (MN, block_k, blocks), the kept blocks themselves or a dense matrix seen as blocks
along K, and a list names the blocks to visit. Put end to end, these are the K axis of the main loop. K tiles
and blocks begin independently of each other: a tile of 64 may hold four blocks of 16, or half a block of 112
and the first part of the next. Vectors of 16 bytes never straddle blocks, whose extents are multiples of 16.

`GatherLoader`: the rows of a tile are gathered, not its K: blocks of rows of a dense operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from kernels_dsl.blocks.hw.cp_async import Loader, TileLoadPlan, cp_async, swizzle_of


@dataclass(frozen=True)
class ListLoader(Loader):
    """Loads K tiles of the blocks that a list names; tXcX counts rows from the operand's first.

    The block numbers of a tile are read when the tile before it is fetched, so that their latency does not
    delay its copies. This rests on the main loop's order: the last tile first, with `guard_k`, then the
    others from 0 upwards.
    """

    mX: cute.Tensor  # (MN, block_k, blocks)
    blocks: cute.Tensor  # (entries) int32: numbers of the blocks to visit
    entries: Int32
    upcoming: cute.Tensor  # (lookups): block numbers of the next tile, in registers
    block_k: int

    @property
    def uniform(self) -> bool:
        """True if every K tile lies within one block."""
        return self.block_k % self.plan.tile[1] == 0

    @cute.jit
    def fetch(self, k_tile: Int32, stage: Int32, guard_k: cutlass.Constexpr) -> None:
        """Starts copying K tile `k_tile` to `stage`. Without `guard_k` the tile must lie within the list."""
        steps = const_expr(cute.size(self.tXcX, mode=[2]))
        if const_expr(guard_k):
            self._look_up(k_tile)
        for j in range_constexpr(steps):
            k = k_tile * self.plan.tile[1] + self.tXcX[(0, 0), 0, j][1]
            k_inside = k - k // self.block_k * self.block_k
            block = self.upcoming[0 if const_expr(self.uniform) else j]
            for i in range_constexpr(cute.size(self.tXcX, mode=[1])):
                mn = self.tXcX[(0, 0), i, j][0]
                offset = cute.crd2idx((mn, k_inside, block), self.mX.layout)
                src = (self.mX.iterator + offset).align(self.plan.copy_bytes)
                dst = self.slot(i, j, stage)
                cp_async(dst, src, self.plan.copy_bytes, self._valid_bytes(mn, k, guard_k))
        self._look_up(Int32(0) if const_expr(guard_k) else k_tile + 1)

    @cute.jit
    def _look_up(self, k_tile: Int32) -> None:
        """Reads the block numbers of K tile `k_tile`; past the list's end, the last block's."""
        for j in range_constexpr(cute.size(self.upcoming)):
            k = k_tile * self.plan.tile[1]
            if const_expr(not self.uniform):
                k = k + self.tXcX[(0, 0), 0, j][1]
            self.upcoming[j] = self.blocks[cutlass.min(k // self.block_k, self.entries - 1)]

    @cute.jit
    def _valid_bytes(self, mn: Int32, k: Int32, guard_k: cutlass.Constexpr) -> Int32:
        """Bytes of the vector at (mn, k) that lie within the operand and the list."""
        plan = const_expr(self.plan)
        extent = self.mX.shape[0]
        if const_expr(plan.k_major):
            valid = Int32(plan.copy_bytes) if mn < extent else Int32(0)
        else:
            inside = (extent - mn) * plan.element_bytes
            valid = cutlass.min(cutlass.max(inside, Int32(0)), Int32(plan.copy_bytes))
        if const_expr(guard_k):
            valid = valid if k < self.entries * self.block_k else Int32(0)
        return valid


class ListOperand(NamedTuple):
    """One tile along MN of an operand, over the blocks of a list."""

    mX: cute.Tensor  # (MN, block_k, blocks), aligned to 16 bytes
    tile: Int32
    blocks: cute.Tensor  # (entries) int32: numbers of the blocks to visit, in order


def make_list_loader(plan: TileLoadPlan, operand: ListOperand, sX: cute.Tensor, tidx: Int32) -> ListLoader:
    """The loader of the operand's tile; sX (MN, K, stages) in swizzled shared memory."""
    if plan.through_registers:
        raise ValueError(f"copy_bytes is {plan.copy_bytes}; it must be at least 4 for a list of blocks")
    mX, tile_mn = operand.mX, operand.tile
    extent = (plan.tile[0] * (tile_mn + 1), plan.tile[1])
    cX = cute.local_tile(cute.make_identity_tensor(extent), plan.tile, (tile_mn, 0))  # (bMN, bK)
    thr_copy = plan.tiled_copy(mX.element_type).get_slice(tidx)
    tXcX = thr_copy.partition_S(cX)
    block_k = mX.shape[1]
    lookups = 1 if block_k % plan.tile[1] == 0 else cute.size(tXcX, mode=[2])
    return ListLoader(
        plan,
        swizzle_of(mX.element_type, plan.tile, plan.k_major),
        thr_copy.partition_D(sX),
        tXcX,
        mX,
        operand.blocks,
        entries=cute.size(operand.blocks),
        upcoming=cute.make_rmem_tensor(lookups, Int32),
        block_k=block_k,
    )


class BlockRows(NamedTuple):
    """Blocks of rows of a dense operand, side by side."""

    numbers: cute.Tensor  # int32
    count: Int32
    extent: int  # rows of a block


@dataclass(frozen=True)
class GatherLoader(Loader):
    """Loads K tiles of gathered rows; tXcX counts rows from the tile's first."""

    mX: cute.Tensor  # (MN, K)
    rows: cute.Tensor  # (CPY_MN) rows of the operand, -1 for none, int32 in registers

    @cute.jit
    def fetch(self, k_tile: Int32, stage: Int32, guard_k: cutlass.Constexpr) -> None:
        """Starts copying K tile `k_tile` to `stage`. Without `guard_k` the tile must lie within K."""
        plan = const_expr(self.plan)
        for j in range_constexpr(cute.size(self.tXcX, mode=[2])):
            k = k_tile * plan.tile[1] + self.tXcX[(0, 0), 0, j][1]
            for i in range_constexpr(cute.size(self.tXcX, mode=[1])):
                row = self.rows[i]
                valid = Int32(plan.copy_bytes)
                if const_expr(guard_k):
                    inside = self.mX.shape[1] - k
                    if const_expr(plan.k_major):
                        valid = cutlass.min(cutlass.max(inside * plan.element_bytes, Int32(0)), valid)
                    else:
                        valid = valid if inside > 0 else Int32(0)
                valid = valid if row >= 0 else Int32(0)
                src = self.mX.iterator + cute.crd2idx((row, k), self.mX.layout)
                dst = self.slot(i, j, stage)
                cp_async(dst, src.align(plan.copy_bytes), plan.copy_bytes, valid)


@cute.jit
def make_gather_loader(
    plan: cutlass.Constexpr, mX: cute.Tensor, sX: cute.Tensor, blocks: BlockRows, sub: Int32, tidx: Int32
) -> GatherLoader:
    """The loader of tile `sub` along the gathered rows of mX (MN, K), which is aligned to plan.copy_bytes.

    Row r is row r % extent of block number numbers[r // extent]. sX (MN, K, stages) in swizzled shared
    memory.
    """
    cX = cute.make_identity_tensor(plan.tile)  # (bMN, bK)
    thr_copy = plan.tiled_copy(mX.element_type).get_slice(tidx)
    tXcX = thr_copy.partition_S(cX)
    rows = cute.make_rmem_tensor(cute.size(tXcX, mode=[1]), Int32)
    for i in range_constexpr(cute.size(rows)):
        row = sub * plan.tile[0] + tXcX[(0, 0), i, 0][0]
        rows[i] = Int32(-1)
        if row < blocks.count * blocks.extent:
            rows[i] = blocks.numbers[row // blocks.extent] * blocks.extent + row % blocks.extent
    swizzle = swizzle_of(mX.element_type, plan.tile, plan.k_major)
    return GatherLoader(plan, swizzle, thr_copy.partition_D(sX), tXcX, mX, rows)
