"""Dense GEMM for SM80-class GPUs: cp.async multistage pipeline, ldmatrix, mma.sync.

One CTA computes one (tile_m, tile_n) tile of D = epilogue(A @ B.T); all its warps play the same role.
The pipeline is that of `kernels_dsl.blocks.mainloop.multistage`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.epilogue.staged_store import OutputTile, store_tile
from kernels_dsl.blocks.hw.cp_async import tile_loader
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.mainloop.multistage import (
    SMEM_ALIGN,
    MultistagePlan,
    accumulate,
    make_multistage_plan,
    operand_facts,
    stages_of,
)
from kernels_dsl.blocks.mainloop.promotion import promoted_sum
from kernels_dsl.blocks.schedule.groups import GroupedGrid, decode_group_tile, first_cursor, rows_of
from kernels_dsl.blocks.schedule.scheduler import TileGrid, decode_tile, split_range
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.config.promotion import Promotion


def make_plan(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, config: Sm80GemmConfig) -> MultistagePlan:
    """Check the configuration against the tensors' types and derive the plan; ValueError if it cannot be."""
    operands = (operand_facts(mA, "A", config.copy_bytes_a), operand_facts(mB, "B", config.copy_bytes_b))
    return make_multistage_plan(config, mA.element_type, operands, mD, mB.element_type)


def gemm_sm80(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    operands: tuple,
    max_ctas: Int32,
    stream,
    config: cutlass.Constexpr[Sm80GemmConfig],
    epilogue: cutlass.Constexpr,
):
    """Launch D[:, :, l] = epilogue(A[:, :, l] @ B[:, :, l].T, *operands[:, :, l]).

    mA (M, K, L), mB (N, K, L) bf16, fp16 or float32 (taken as tf32), any strides, L's possibly 0; vectors
    of config.copy_bytes_a and _b need a contiguous mode with that alignment, single elements do not.
    mD (M, N, L) bf16, fp16 or float32. `operands` as in `kernels_dsl.blocks.epilogue.operands`. With
    config.split_k > 1, mD is the float32 workspace (M, N, L * split_k) that `splitk_reduce` sums.
    `max_ctas` is not used: one CTA a tile.
    ValueError while tracing where the configuration does not fit the tensors.
    """
    launch(mA, mB, mD, None, operands, stream, make_plan(mA, mB, mD, config), (None, epilogue))


def scaled_gemm_sm80(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    scales: tuple | None,
    operands: tuple,
    max_ctas: Int32,
    stream,
    config: cutlass.Constexpr[Sm80GemmConfig],
    epilogue: cutlass.Constexpr,
    promotion: cutlass.Constexpr[Promotion | None],
    offsets: cute.Tensor | None = None,
):
    """Launch D = epilogue(sum over groups g of 128 of K of A_g @ B_g.T * scale_a[g] * scale_b[g], *operands).

    As `gemm_sm80`, with mA and mB e4m3 or e5m2, K contiguous, in vectors of 4 bytes or more; from sm_89 on.
    `scales`: float32 (groups of M, groups of K, L) and (groups of N, groups of K, L), any strides, groups of
    MN as `promotion` says; None where promotion.rows_a is 0. Scales of a tensor or a row are operands of
    the epilogue. promotion None: the matrix unit's own sums over all of K. `offsets`: int32, where groups of
    rows of A and D end, as `blocks.groups` says; L counts groups then, and 16-bit operands will do as well.
    ValueError while tracing where the configuration does not fit the tensors.
    """
    plan = make_plan(mA, mB, mD, config)
    launch(mA, mB, mD, scales, operands, stream, plan, (promotion, epilogue), offsets=offsets)


def launch(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    scales: tuple | None,
    operands: tuple,
    stream,
    plan: MultistagePlan,
    functions: tuple,
    offsets: cute.Tensor | None = None,
) -> None:
    """Launch the kernel on the tensors; `functions` are the promotion and the epilogue."""
    config = plan.config
    tiles_n = cute.ceil_div(mD.shape[1], config.tile_n)
    grid: TileGrid | GroupedGrid
    if offsets is None:
        tiles_m = cute.ceil_div(mD.shape[0], config.tile_m)
        grid = dense = TileGrid(tiles_m, tiles_n, mD.shape[2] // config.split_k, config.split_k)
        ctas = dense.size
    else:
        grid = groups = GroupedGrid(offsets, Int32(mD.shape[0]), Int32(tiles_n))
        ctas = groups.most(config.tile_m)
    gemm_sm80_kernel(mA, mB, mD, scales, operands, grid, plan, functions).launch(
        grid=[ctas, 1, 1],
        block=[config.threads, 1, 1],
        smem=plan.smem_bytes,
        stream=stream,
        # Without a word on occupancy, ptxas spills a register or two to stay under 168, 128 or 80 of them.
        min_blocks_per_mp=1,
    )


@entry_name("gemm_sm80")
@cute.kernel
def gemm_sm80_kernel(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    scales: tuple | None,
    operands: tuple,
    grid: TileGrid | GroupedGrid,
    plan: cutlass.Constexpr,
    functions: cutlass.Constexpr,
):
    """Device side of `gemm_sm80` and `scaled_gemm_sm80`."""
    config = plan.config
    promotion, epilogue = functions
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    k_tiles = cute.ceil_div(mA.shape[1], config.tile_k)
    if cutlass.const_expr(isinstance(grid, GroupedGrid)):
        tile, group = decode_group_tile(
            bidx, grid, config.tile_m, (config.raster_group, True), first_cursor()
        )
        mA, mD = rows_of(mA, group), rows_of(mD, group)
        operands = tuple(rows_of(operand, group) for operand in operands)
        scales = None if scales is None else (rows_of(scales[0], group), scales[1])
        k_tiles = k_tiles if group.rows > 0 else Int32(0)  # a CTA without a tile
    else:
        tile = decode_tile(bidx, grid, config.raster_group, True)
    k_first, k_last = split_range(k_tiles, tile.split, config.split_k)

    smem = cutlass.memory.SmemAllocator().allocate(plan.smem_bytes, byte_alignment=SMEM_ALIGN)
    sA, sB = stages_of(smem, plan)
    load_a = tile_loader(mA, sA, plan.a, tile.m, tile.batch, tidx)
    load_b = tile_loader(mB, sB, plan.b, tile.n, tile.batch, tidx)
    shape = (config.tile_m, config.tile_n, config.tile_k)
    promoted = promoted_sum(promotion, scales, plan.tiled_mma(), shape, (tile.m, tile.n, tile.batch), tidx)
    acc, tiled_mma = accumulate(plan, (sA, sB), (load_a, load_b), (k_first, k_last), tidx, promoted)
    coord = (tile.m, tile.n, tile.batch * config.split_k + tile.split)
    out = OutputTile(mD, coord, (config.tile_m, config.tile_n), operands, epilogue)
    store_tile(acc, tiled_mma, cute.recast_ptr(smem, dtype=Float32), out, plan.store, tidx)
