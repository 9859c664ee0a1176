"""Epilogue of the SM80-class GEMM: accumulator -> shared memory -> epilogue function -> output.

An MMA accumulator gives a thread pairs of elements from many rows, which makes narrow, scattered
accesses. Staged through shared memory, a thread gets whole vectors along N instead, both for the extra
operands that it reads and for the output that it writes; so the staging is in float32, before the
epilogue function. It goes slab by slab, 16 rows of every warp at a time, to keep registers and shared
memory small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.epilogue_operands import MAX_VECTOR_BYTES, apply_epilogue, load_operands
from kernels_dsl.blocks.mma_sync import MMA_M

ROW_PADDING = 8
"""Floats after each staged row. A warp stores 8 bytes a lane, four lanes in each of eight rows: rows
that are 32 bytes apart in the banks make each half of it conflict-free."""


@dataclass(frozen=True)
class StagedStorePlan:
    """How a CTA's threads share a slab (rows, tile_n) of the output tile."""

    tile_n: int
    warps_m: int
    threads: int
    vector: int
    """Elements of a thread's access along N."""

    @property
    def rows(self) -> int:
        """Rows of a slab: one step of the tiled MMA."""
        return MMA_M * self.warps_m

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the staged slab."""
        return self.rows * (self.tile_n + ROW_PADDING) * 4

    @property
    def smem_layout(self) -> cute.Layout:
        """(rows, tile_n) float32, rows padded."""
        return cute.make_layout((self.rows, self.tile_n), stride=(self.tile_n + ROW_PADDING, 1))

    def tiled_copy(self) -> cute.TiledCopy:
        """The partition of a slab among threads: neighbours along N, `vector` elements each."""
        along = math.gcd(self.tile_n // self.vector, self.threads)
        threads = cute.make_ordered_layout((self.threads // along, along), order=(1, 0))
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=32)
        return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, self.vector)))


def output_vector(mD: cute.Tensor, tile_n: int, rows: int, threads: int) -> int:
    """Elements of D (M, N, L) that one store may take: 16 bytes where N is contiguous and all is aligned.

    Narrowed to what keeps every thread of a (rows, tile_n) slab busy.
    """
    if not isinstance(mD.stride[1], int) or mD.stride[1] != 1:
        return 1
    width = mD.element_type.width // 8
    factors = [MAX_VECTOR_BYTES // width, mD.iterator.alignment // width, rows * tile_n // threads]
    for stride in (mD.stride[0], mD.stride[2]):
        factors.append(stride if isinstance(stride, int) else cute.get_divisibility(stride))
    return math.gcd(*factors)


@dataclass(frozen=True)
class OutputTile:
    """Where a CTA's tile goes: the tensor, the tile's coordinates in tiles, and the epilogue."""

    mD: cute.Tensor  # (M, N, L)
    coord: tuple[Int32, Int32, Int32]
    tile: tuple[int, int]
    operands: tuple
    epilogue: Any
    operand_batch: Any = None


@cute.jit
def store_tile(
    tCrC: cute.Tensor,
    tiled_mma: cute.TiledMma,
    smem: cute.Pointer,
    out: OutputTile,
    plan: cutlass.Constexpr,
    tidx: Int32,
) -> None:
    """Write epilogue(acc, *operands) to the tile of D, from accumulator tCrC ((2, 2), MMA_M, MMA_N).

    `smem` points to plan.smem_bytes of shared memory that nobody else uses. Elements beyond D are not
    written. Every thread of the CTA takes part.
    """
    sC = cute.make_tensor(smem, plan.smem_layout)  # (rows, bN)
    cD = cute.local_tile(
        cute.make_identity_tensor(out.mD.shape), (*out.tile, 1), out.coord
    )  # (bM, bN, 1) of (m, n, l)
    thr_copy = plan.tiled_copy().get_slice(tidx)
    tCsC = tiled_mma.get_slice(tidx).partition_C(sC)  # ((2, 2), 1, MMA_N)
    tDsC = thr_copy.partition_S(sC)  # ((1, V), CPY_M, CPY_N)
    slabs = cute.local_tile(cD[None, None, 0], (plan.rows, out.tile[1]), (None, 0))  # (rows, bN, slabs)
    for slab in range_constexpr(cute.size(tCrC, mode=[1])):
        tDcD = thr_copy.partition_D(slabs[None, None, slab])  # ((1, V), CPY_M, CPY_N)
        # Asked for before the barriers, so that their latency overlaps the staging.
        values = load_operands(out.operands, tDcD, out.mD.shape)
        cute.autovec_copy(tCrC[None, slab, None], tCsC[None, 0, None])
        cute.arch.sync_threads()
        tDrC = cute.make_rmem_tensor(tDcD.shape, Float32)
        cute.autovec_copy(tDsC, tDrC)
        cute.arch.sync_threads()
        tDrD = cute.make_rmem_tensor(tDcD.shape, out.mD.element_type)
        tDrD.store(apply_epilogue(out.epilogue, tDrC.load(), values).to(out.mD.element_type))
        _store_vectors(tDrD, tDcD, out.mD, plan.vector)


@cute.jit
def _store_vectors(
    tDrD: cute.Tensor, tDcD: cute.Tensor, mD: cute.Tensor, vector: cutlass.Constexpr
) -> None:
    """Registers ((1, V), CPY_M, CPY_N) to D: a vector that lies within D at once, any other in part."""
    M, N = mD.shape[0], mD.shape[1]
    for j in range_constexpr(cute.size(tDcD, mode=[2])):
        for i in range_constexpr(cute.size(tDcD, mode=[1])):
            m, n, l = tDcD[(0, 0), i, j]
            row = mD[m, None, l]  # (N)
            value = tDrD[(0, None), i, j]  # (V)
            if m < M:
                if const_expr(vector == 1):
                    if n < N:
                        row[n] = value[0]
                else:
                    if n + vector <= N:
                        ptr = (row.iterator + n).align(vector * mD.element_type.width // 8)
                        cute.autovec_copy(value, cute.make_tensor(ptr, cute.make_layout(vector)))
                    else:
                        for v in range_constexpr(vector):
                            if n + v < N:
                                row[n + v] = value[v]
