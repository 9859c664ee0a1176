"""Dense and grouped GEMM for SM80-class GPUs, with scales or without: cp.async, ldmatrix, mma.sync.

One CTA computes one (tile_m, tile_n) tile of D = epilogue(A @ B.T); all its warps play the same role.
`kernels_dsl.blocks.mainloop.multistage` has the skeleton and the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.epilogue import gated_rows
from kernels_dsl.blocks.epilogue.gates import GatedEpilogue
from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.epilogue.staged_store import OutputTile
from kernels_dsl.blocks.hw.cp_async import tile_loader
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.mainloop.multistage import (
    KRange,
    Loads,
    MultistagePlan,
    launch,
    make_multistage_plan,
    operand_facts,
    product,
)
from kernels_dsl.blocks.mainloop.promotion import promoted_sum
from kernels_dsl.blocks.schedule.groups import GroupedGrid, decode_group_tile, first_cursor, rows_of
from kernels_dsl.blocks.schedule.scheduler import Raster, TileGrid, decode_tile, split_range
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.config.promotion import Promotion
from kernels_dsl.kernels.gemm.entry_views import Views


@dataclass(frozen=True)
class GemmSpec:
    """Trace-time facts of an instance."""

    pipeline: MultistagePlan
    promotion: Promotion | None
    epilogue: Any


def gemm_sm80(views: Views, stream, config: Sm80GemmConfig, epilogue: Any) -> None:
    """Launch D[:, :, l] = epilogue(A[:, :, l] @ B[:, :, l].T, *operands[:, :, l]).

    A (M, K, L), B (N, K, L) bf16, fp16 or float32 (taken as tf32), any strides, L's possibly 0; vectors of
    config.copy_bytes_a and _b need a contiguous mode with that alignment, single elements do not. Or e4m3 or
    e5m2, K contiguous, in vectors of 4 bytes or more, from sm_89 on. D (M, N, L) bf16, fp16 or float32.
    Operands as in `kernels_dsl.blocks.epilogue.operands`. With config.split_k > 1, D is the float32 workspace
    (M, N, L * split_k) that `splitk_reduce` sums. With `views.promotion`, each K tile's sum is multiplied by
    its scales and added to a float32 sum. Scales of a tensor or a row are operands of the epilogue.
    `views.offsets`: int32, ends of the groups of rows of A and D, see `schedule.groups`; L counts groups.
    ValueError while tracing if the configuration does not fit the tensors.
    """
    mA, mB, mD = views.a, views.b, views.d
    facts = (operand_facts(mA, "A", config.copy_bytes_a), operand_facts(mB, "B", config.copy_bytes_b))
    plan = make_multistage_plan(config, mA.element_type, facts, mD, mB.element_type)
    if isinstance(epilogue, GatedEpilogue):
        per_thread = plan.store.slab_rows * config.tile_n // config.threads
        vector = gated_rows.vector_of(mD, per_thread)
        plan = replace(plan, store=replace(plan.store, vector=vector))
    tiles_n = cute.ceil_div(views.columns, config.tile_n)
    grid: TileGrid | GroupedGrid
    if views.offsets is None:
        tiles_m = cute.ceil_div(mD.shape[0], config.tile_m)
        grid = dense = TileGrid(tiles_m, tiles_n, mD.shape[2] // config.split_k, config.split_k)
        ctas = dense.size
    else:
        grid = groups = GroupedGrid(views.offsets, Int32(mD.shape[0]), Int32(tiles_n))
        ctas = groups.most(config.tile_m)
    spec = GemmSpec(plan, views.promotion, epilogue)
    kernel = gemm_sm80_kernel(mA, mB, mD, views.scales, views.operands, grid, spec)
    launch(kernel, plan, [ctas, 1, 1], stream)


@entry_name("gemm_sm80")
@cute.kernel
def gemm_sm80_kernel(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    scales: tuple[cute.Tensor, cute.Tensor] | None,
    operands: Operands,
    grid: TileGrid | GroupedGrid,
    spec: cutlass.Constexpr[GemmSpec],
):
    """Device side of `gemm_sm80`."""
    plan, config = spec.pipeline, spec.pipeline.config
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    k_tiles = cute.ceil_div(mA.shape[1], config.tile_k)
    if cutlass.const_expr(isinstance(grid, GroupedGrid)):
        tile, group = decode_group_tile(
            bidx, grid, config.tile_m, Raster(config.raster_group, True), first_cursor()
        )
        mA, mD = rows_of(mA, group), rows_of(mD, group)
        operands = tuple(rows_of(operand, group) for operand in operands)
        scales = None if scales is None else (rows_of(scales[0], group), scales[1])
        k_tiles = k_tiles if group.rows > 0 else Int32(0)  # a CTA without a tile
    else:
        tile = decode_tile(bidx, grid, config.raster_group, True)
    k_range = KRange(*split_range(k_tiles, tile.split, config.split_k))

    def load(tiles):
        return Loads(
            tile_loader(mA, tiles.a, plan.a, tile.m, tile.batch, tidx),
            tile_loader(mB, tiles.b, plan.b, tile.n, tile.batch, tidx),
            k_range,
        )

    def promote():
        corner = (tile.m, tile.n, tile.batch)
        return promoted_sum(spec.promotion, scales, plan.tiled_mma(), plan.tile, corner, tidx)

    def finish():
        coord = (tile.m, tile.n, tile.batch * config.split_k + tile.split)
        return OutputTile(mD, coord, plan.tile[:2], operands, spec.epilogue)

    product(plan, load, finish, tidx, promote)
