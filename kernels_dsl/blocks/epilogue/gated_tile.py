"""Gated epilogue of one consumer warpgroup on Hopper: D (M, N / 2), and perhaps the product z (M, N) itself.

Two neighbouring subtiles of z, 64 x epi_n each, make one of D. All go through the one ring of staging
buffers of `tile_store`: with z, two of three are z's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernels_dsl.blocks.epilogue.operands import apply_epilogue, load_operands
from kernels_dsl.blocks.epilogue.prefetch import Region, at_piece
from kernels_dsl.blocks.epilogue.tile_store import (
    StagingCopy,
    corner,
    drain,
    register_to_smem_copy,
    store_subtile,
    subtile_coordinates,
)
from kernels_dsl.blocks.hw.barriers import NamedBarrier, sync_warpgroup


class Writers(NamedTuple):
    """Stores of a staging buffer to D, and to z; None where z is not kept."""

    result: Callable
    product: Callable | None


@cute.jit
def store_tile(
    epilogue: cutlass.Constexpr,  # `tile_store.Epilogue` of a `GatedEpilogue`
    acc: cute.Tensor,  # (MMA, MMA_M, MMA_N) float32
    operands: cutlass.Constexpr,  # as they are, or as `Epilogue.prefetch` returned them
    region: Region,  # of z
    writers: cutlass.Constexpr,  # Writers
):
    """Runs the epilogue of one tile, two subtiles at a time."""
    plan, consumer, function = epilogue.plan, epilogue.consumer, epilogue.function
    copy_r2s = register_to_smem_copy(epilogue.mma, plan.dtype, plan.epi_n)
    thr_copy = copy_r2s.get_slice(consumer.thread)
    target = thr_copy.partition_D(epilogue.staging)  # (R2S, R2S_M, R2S_N, stages)
    staging = StagingCopy(copy_r2s, thr_copy.partition_S(epilogue.staging).shape[:3], target)
    thr_mma = epilogue.mma.get_slice(consumer.thread)
    c_sub = cute.make_identity_tensor((*plan.subtile, 1))
    r_acc = cute.make_rmem_tensor(thr_mma.partition_shape_C(plan.subtile), Float32)  # (MMA, 1, 1)
    size = cute.size(r_acc)
    r_d = cute.make_rmem_tensor(size, plan.dtype)
    inside = thr_mma.partition_C(c_sub[None, None, 0])  # coordinates within a subtile
    coordinates = partial(subtile_coordinates, plan, thr_mma, c_sub, region.origin)
    drain(plan, consumer.thread)
    sync_warpgroup(NamedBarrier.EPILOGUE, consumer.warpgroup)
    filled = 0
    for sub in cutlass.range_constexpr(cute.size(acc) // size):
        for i in cutlass.range_constexpr(size):
            r_acc[i] = acc[sub * size + i]
        first, tCcD = coordinates(sub)
        values = at_piece(load_operands(operands, tCcD, region.extent), corner(plan, sub), tCcD)
        r_acc.store(apply_epilogue(function.inner, r_acc.load(), values))
        if cutlass.const_expr(writers.product is not None):
            _stage(r_acc, staging, filled % plan.stages)
            store_subtile(plan, writers.product, filled % plan.stages, first, consumer)
            filled += 1
        half = cute.make_tensor(r_d.iterator + sub % 2 * (size // 2), cute.make_layout(size // 2))
        half.store(function.of_pairs(r_acc).to(plan.dtype))
        if cutlass.const_expr(sub % 2 == 1):
            _scatter(r_d, inside, epilogue.staging[None, None, filled % plan.stages])
            m, n, batch = coordinates(sub - 1)[0]
            store_subtile(plan, writers.result, filled % plan.stages, (m, n // 2, batch), consumer)
            filled += 1


def _stage(r_acc: cute.Tensor, staging: StagingCopy, stage: int) -> None:
    """Copies a subtile of z to a staging buffer."""
    r_z = cute.make_rmem_tensor(staging.shape, staging.target.element_type)
    as_mma = cute.make_tensor(r_z.iterator, r_acc.layout)  # the same registers as the MMA sees them
    as_mma.store(r_acc.load().to(staging.target.element_type))
    cute.copy(staging.copy, r_z, staging.target[None, None, None, stage])


def _scatter(r_d: cute.Tensor, inside: cute.Tensor, buffer: cute.Tensor) -> None:
    """Writes the gated pairs of two subtiles of z to a staging buffer of D.

    A pair is one element there: four neighbouring threads have four neighbours of a row, so that a warp's
    store takes eight pieces of eight bytes (16-bit D), which the swizzle spreads over the banks.
    """
    pairs = cute.size(inside) // 2
    half = cute.size(buffer, mode=[1]) // 2
    for i in range(cute.size(r_d)):
        row, column, _ = inside[i % pairs * 2]
        buffer[row, i // pairs * half + column // 2] = r_d[i]
