"""Epilogue of the SM80-class products: accumulator -> shared memory -> epilogue function -> output.

An MMA accumulator gives a thread pairs of elements from many rows, which makes narrow, scattered accesses.
Staged through shared memory, a thread gets whole vectors along N, both for the operands that it reads and for
the output that it writes, so the staging is in float32, before the epilogue function. The tile is staged in
as few chunks as shared memory allows, and a chunk is finished slab by slab in a loop: accumulators need
static indices, which would unroll the epilogue function for each of them, and once staged they leave their
registers to the epilogue's operands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.epilogue import gated_rows
from kernels_dsl.blocks.epilogue.gates import GatedEpilogue
from kernels_dsl.blocks.epilogue.operands import MAX_VECTOR_BYTES, Operands, apply_epilogue, load_operands
from kernels_dsl.blocks.hw.mma_sync import MMA_M
from kernels_dsl.blocks.reduce.lines import Staged, inner_of, reduce_staged, without_partials
from kernels_dsl.blocks.reduce.maximum import publish_maxima, running_maxima
from kernels_dsl.blocks.reduce.reductions import ReducedEpilogue
from kernels_dsl.config.gemm import SM80_STAGING_PADDING


@dataclass(frozen=True)
class StagedStorePlan:
    """Partition of an output tile of tile_n columns among a CTA's threads, by chunks and slabs."""

    tile_n: int
    warps_m: int
    threads: int
    vector: int
    """Elements along N that a thread accesses at once."""
    chunk_slabs: int
    """Slabs staged at a time."""

    @property
    def slab_rows(self) -> int:
        """Rows of a slab: one step of the tiled MMA."""
        return MMA_M * self.warps_m

    @property
    def chunk_rows(self) -> int:
        """Rows staged at a time."""
        return self.chunk_slabs * self.slab_rows

    @property
    def smem_layout(self) -> cute.Layout:
        """(chunk_rows, tile_n) float32.

        A warp stores 8 bytes a lane, four lanes in each of eight rows. The padding puts rows 32 bytes apart
        in the banks, so each half of the warp is free of conflicts.
        """
        row = self.tile_n + SM80_STAGING_PADDING
        return cute.make_layout((self.chunk_rows, self.tile_n), stride=(row, 1))

    def tiled_copy(self) -> cute.TiledCopy:
        """The partition of a slab among threads."""
        along = math.gcd(self.tile_n // self.vector, self.threads)
        return row_vectors((self.threads // along, along), self.vector)


def row_vectors(threads: tuple[int, int], vector: int) -> cute.TiledCopy:
    """A partition of (M, N) in which neighbouring threads take neighbouring vectors along N."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=32)
    layout = cute.make_ordered_layout(threads, order=(1, 0))
    return cute.make_tiled_copy_tv(atom, layout, cute.make_layout((1, vector)))


def output_vector(mD: cute.Tensor, per_thread: int) -> int:
    """Elements of D (M, N, L) that one store may take: 16 bytes if N is contiguous and everything is aligned.

    Divides `per_thread`, the elements that a thread has to store.
    """
    if not isinstance(mD.stride[1], int) or mD.stride[1] != 1:
        return 1
    width = mD.element_type.width // 8
    factors = [MAX_VECTOR_BYTES // width, mD.iterator.alignment // width, per_thread]
    for stride in (mD.stride[0], mD.stride[2]):
        factors.append(stride if isinstance(stride, int) else cute.get_divisibility(stride))
    return math.gcd(*factors)


class Panels(NamedTuple):
    """Division of D's columns into panels that are not next to each other in memory."""

    columns: int
    stride: Int32  # elements from one panel to the next


@dataclass(frozen=True)
class OutputTile:
    """Destination of a CTA's tile, and the epilogue."""

    mD: cute.Tensor  # (M, N, L)
    coord: tuple[Int32, Int32, Int32]
    """Along M, N and L, in tiles."""
    tile: tuple[int, int]
    operands: Operands
    epilogue: Any
    panels: Panels | None = None

    @property
    def shape(self) -> cute.Shape:
        """(M, N, L) of the product."""
        return gated_rows.product_shape(self.mD, self.epilogue)


@cute.jit
def store_tile(
    tCrC: cute.Tensor,
    tiled_mma: cute.TiledMma,
    smem: cute.Pointer,
    out: OutputTile,
    plan: cutlass.Constexpr,
    tidx: Int32,
) -> None:
    """Writes epilogue(acc, *operands) to the tile of D, from accumulators tCrC ((2, 2), MMA_M, MMA_N).

    `smem`: shared memory of plan.smem_layout's size, not otherwise in use. Elements beyond D are not written.
    Every thread of the CTA takes part.
    """
    operands, partials = without_partials(out.epilogue, out.operands)
    out = replace(out, operands=running_maxima(operands))
    sC = cute.make_tensor(smem, plan.smem_layout)  # (chunk_rows, bN)
    tCsC = tiled_mma.get_slice(tidx).partition_C(sC)  # ((2, 2), slabs, MMA_N)
    # (bM, bN, 1) of (m, n, l)
    cD = cute.local_tile(cute.make_identity_tensor(out.shape), (*out.tile, 1), out.coord)
    slab = (plan.slab_rows, out.tile[1])
    cD_slabs = cute.local_tile(cD[None, None, 0], slab, (None, 0))  # (slab_rows, bN, slabs of the tile)
    sC_slabs = cute.local_tile(sC, slab, (None, 0))  # (slab_rows, bN, slabs of the chunk)
    for first in range_constexpr(0, cute.size(tCrC, mode=[1]), plan.chunk_slabs):
        if const_expr(first > 0):
            cute.arch.sync_threads()
        for i in range_constexpr(plan.chunk_slabs):
            cute.autovec_copy(tCrC[None, first + i, None], tCsC[None, i, None])
        cute.arch.sync_threads()
        for i in cutlass.range(plan.chunk_slabs, unroll=1):
            _finish_slab(sC_slabs[None, None, i], cD_slabs[None, None, first + i], out, plan, tidx)
        if const_expr(partials is not None):
            cute.arch.sync_threads()
            corner = cD_slabs[0, 0, first]
            part = corner[0] // plan.chunk_rows if const_expr(out.epilogue.over == "m") else out.coord[1]
            staged = Staged(sC, corner, out.shape)
            reduce_staged(out.epilogue, partials, staged, part, plan.threads, tidx)
    publish_maxima(out.operands)


@cute.jit
def _finish_slab(
    sC: cute.Tensor, cD: cute.Tensor, out: OutputTile, plan: cutlass.Constexpr, tidx: Int32
) -> None:
    """Applies the epilogue function to one slab sC (slab_rows, bN) at the coordinates cD, and stores it.

    Values that are reduced afterwards take the place of the sums.
    """
    thr_copy = plan.tiled_copy().get_slice(tidx)
    tDsC = thr_copy.partition_S(sC)  # ((1, V), CPY_M, CPY_N)
    tDcD = thr_copy.partition_D(cD)  # ((1, V), CPY_M, CPY_N)
    operands, mZ = out.operands, None
    if const_expr(isinstance(out.epilogue, GatedEpilogue)):
        operands, mZ = gated_rows.without_preact(out.epilogue, operands)
    values = load_operands(operands, tDcD, out.shape)
    tDrC = cute.make_rmem_tensor(tDcD.shape, Float32)
    cute.autovec_copy(tDsC, tDrC)
    if const_expr(isinstance(out.epilogue, GatedEpilogue)):
        z = apply_epilogue(out.epilogue.inner, tDrC.load(), values)
        gated_rows.store(z, tDcD, out.epilogue, out.mD, mZ)
    else:
        tDrD = cute.make_rmem_tensor(tDcD.shape, out.mD.element_type)
        result = apply_epilogue(inner_of(out.epilogue), tDrC.load(), values)
        tDrD.store(result.to(out.mD.element_type))
        if const_expr(isinstance(out.epilogue, ReducedEpilogue)):
            tDrC.store(result)
            cute.autovec_copy(tDrC, tDsC)
        store_vectors(tDrD, tDcD, out.mD, plan.vector, out.panels)


@cute.jit
def store_vectors(
    tDrD: cute.Tensor,
    tDcD: cute.Tensor,
    mD: cute.Tensor,
    vector: cutlass.Constexpr,
    panels: Panels | None = None,
) -> None:
    """Stores registers ((1, V), CPY_M, CPY_N) to D: a vector within D at once, any other in part.

    The columns of a panel are a multiple of `vector`.
    """
    M, N = mD.shape[0], mD.shape[1]
    for j in range_constexpr(cute.size(tDcD, mode=[2])):
        for i in range_constexpr(cute.size(tDcD, mode=[1])):
            m, n, l = tDcD[(0, 0), i, j]
            row = mD[m, None, l]  # (N)
            if const_expr(panels is not None):
                skipped = n // panels.columns * (panels.stride - panels.columns)
                row = cute.make_tensor(row.iterator + skipped, row.layout)
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
