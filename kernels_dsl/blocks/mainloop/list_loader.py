"""Loads of K tiles that a list of blocks names: the block-sparse counterpart of `cp_async.TileLoader`.

An operand is (MN, block_k, blocks): the kept blocks themselves, or a dense matrix seen as blocks along K. A
list says which block comes next. The kept blocks put end to end are the K axis that the main loop walks;
where K tiles and blocks begin is independent of one another, so that a tile of 64 may hold four blocks of
16, or half of a block of 112 and the first part of the next one. Vectors of 16 bytes never straddle blocks,
whose extents are multiples of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from kernels_dsl.blocks.hw.cp_async import TileLoadPlan, cp_async, swizzle_of, swizzled_pointer


@dataclass(frozen=True)
class ListLoader:
    """One thread's share of one operand, with the interface of `TileLoader`.

    The block numbers of a tile are read when the tile before it is fetched, so that their latency does not
    delay its copies. This rests on the order of the main loop: the last tile first, with `guard_k`, then
    the others from 0 upwards.
    """

    plan: TileLoadPlan
    swizzle: tuple[int, int, int]
    mX: cute.Tensor  # (MN, block_k, blocks)
    tXsX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K, stages)
    tXcX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K): (mn, k), mn in the operand and k in the tile
    blocks: cute.Tensor  # (entries): numbers of the blocks to visit, int32
    entries: Int32
    upcoming: cute.Tensor  # (lookups): block numbers of the tile that comes next, in registers
    block_k: int

    @property
    def uniform(self) -> bool:
        """Whether a K tile always lies within one block."""
        return self.block_k % self.plan.tile[1] == 0

    @cute.jit
    def fetch(self, k_tile: Int32, stage: Int32, guard_k: cutlass.Constexpr) -> None:
        """Start copying K tile `k_tile` to `stage`. Without `guard_k` the tile must lie within the list."""
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
                dst = swizzled_pointer(self.tXsX[(None, 0), i, j, stage].iterator, self.swizzle)
                cp_async(dst, src, self.plan.copy_bytes, self._valid_bytes(mn, k, guard_k))
        self._look_up(Int32(0) if const_expr(guard_k) else k_tile + 1)

    def put(self, stage: Int32) -> None:
        """Nothing is left to do: cp.async does it all."""

    @cute.jit
    def _look_up(self, k_tile: Int32) -> None:
        """Read the block numbers of K tile `k_tile`; those past the list's end are the last one's."""
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


def make_list_loader(
    plan: TileLoadPlan,
    mX: cute.Tensor,
    sX: cute.Tensor,
    tile_mn: Int32,
    blocks: cute.Tensor,
    tidx: Int32,
) -> ListLoader:
    """The loader of tile `tile_mn` along MN of an operand mX (MN, block_k, blocks), which is 16-byte aligned.

    sX (MN, K, stages) in swizzled shared memory; `blocks` (entries) int32, the blocks to visit in order.
    """
    if plan.through_registers:
        raise ValueError(f"copy_bytes is {plan.copy_bytes}; it must be 4 at least for a list of blocks")
    extent = (plan.tile[0] * (tile_mn + 1), plan.tile[1])
    cX = cute.local_tile(cute.make_identity_tensor(extent), plan.tile, (tile_mn, 0))  # (bMN, bK)
    thr_copy = plan.tiled_copy(mX.element_type).get_slice(tidx)
    tXcX = thr_copy.partition_S(cX)
    block_k = mX.shape[1]
    lookups = 1 if block_k % plan.tile[1] == 0 else cute.size(tXcX, mode=[2])
    return ListLoader(
        plan,
        swizzle_of(mX.element_type, plan.tile, plan.k_major),
        mX,
        thr_copy.partition_D(sX),
        tXcX,
        blocks,
        entries=cute.size(blocks),
        upcoming=cute.make_rmem_tensor(lookups, Int32),
        block_k=block_k,
    )


@dataclass(frozen=True)
class GatherLoader:
    """The counterpart for a tile whose rows, not its K, are gathered: some blocks of rows of a dense operand.

    Row r of the tile is row r % block of block number blocks[r // block]. Interface of `TileLoader`.
    """

    plan: TileLoadPlan
    swizzle: tuple[int, int, int]
    mX: cute.Tensor  # (MN, K)
    tXsX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K, stages)
    tXcX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K): (row, k) in the tile
    rows: cute.Tensor  # (CPY_MN) rows of the operand, -1 for none, int32 in registers

    @cute.jit
    def fetch(self, k_tile: Int32, stage: Int32, guard_k: cutlass.Constexpr) -> None:
        """Start copying K tile `k_tile` to `stage`. Without `guard_k` the tile must lie within K."""
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
                dst = swizzled_pointer(self.tXsX[(None, 0), i, j, stage].iterator, self.swizzle)
                cp_async(dst, src.align(plan.copy_bytes), plan.copy_bytes, valid)

    def put(self, stage: Int32) -> None:
        """Nothing is left to do: cp.async does it all."""


@cute.jit
def make_gather_loader(
    plan: cutlass.Constexpr, mX: cute.Tensor, sX: cute.Tensor, blocks: tuple, sub: Int32, tidx: Int32
):
    """The loader of tile `sub` along the gathered rows of mX (MN, K), which is aligned to plan.copy_bytes.

    sX (MN, K, stages) in swizzled shared memory. blocks: (block numbers, int32; how many; rows of a block).
    """
    numbers, count, extent = blocks
    cX = cute.make_identity_tensor(plan.tile)  # (bMN, bK)
    thr_copy = plan.tiled_copy(mX.element_type).get_slice(tidx)
    tXcX = thr_copy.partition_S(cX)
    rows = cute.make_rmem_tensor(cute.size(tXcX, mode=[1]), Int32)
    for i in range_constexpr(cute.size(rows)):
        at = sub * plan.tile[0] + tXcX[(0, 0), i, 0][0]
        rows[i] = Int32(-1)
        if at < count * extent:
            rows[i] = numbers[at // extent] * extent + at % extent
    return GatherLoader(
        plan, swizzle_of(mX.element_type, plan.tile, plan.k_major), mX, thr_copy.partition_D(sX), tXcX, rows
    )
