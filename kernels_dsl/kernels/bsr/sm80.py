"""Block-sparse GEMM for SM80-class GPUs: the dense kernel's main loop over lists of kept blocks.

One CTA computes one tile of D: all or part of a block row (or, with the dense matrix on the left, of a
block column) by a tile of the dense mode. Its K axis is the row's kept blocks put end to end. CTAs of one
tile of the dense mode are neighbours, longest rows first: a wave shares few panels of the dense matrix in
L2, and the end of the launch has the short rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.epilogue.staged_store import OutputTile, store_tile
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.mma_sync import mma_k
from kernels_dsl.blocks.mainloop.list_loader import make_list_loader
from kernels_dsl.blocks.mainloop.multistage import (
    SMEM_ALIGN,
    MultistagePlan,
    OperandFacts,
    accumulate,
    make_multistage_plan,
    stages_of,
)
from kernels_dsl.blocks.mainloop.operand_views import mode_panel
from kernels_dsl.blocks.mainloop.promotion import list_sum
from kernels_dsl.blocks.schedule.block_lists import BlockLists
from kernels_dsl.config.gemm import Sm80GemmConfig


@dataclass(frozen=True)
class BsrPlan:
    """What of an instance is known at trace time beside the pipeline's plan."""

    pipeline: MultistagePlan
    block_mn: int
    sub_tiles: int
    """Tiles that a block row takes."""
    dense_left: bool


def bsr_sm80(
    mS: cute.Tensor,
    mX: cute.Tensor,
    mD: cute.Tensor,
    lists: BlockLists,
    operands: tuple,
    stream,
    config: Sm80GemmConfig,
    epilogue,
    dense_left: bool,
    scales: cute.Tensor | None = None,
):  # fmt: skip
    """Launch D = epilogue(sum of products, *operands) over lists of kept blocks.

    mS (block_mn, block_k, blocks, L): the kept blocks, extents of a block static multiples of 16. mX
    (X, block_k, K / block_k, L): the dense matrix, seen as blocks along K. Both bf16 or fp16, one mode
    contiguous, aligned to 16 bytes; or each e4m3 or e5m2, K contiguous and block_k a multiple of 32, with
    `scales` (blocks, L) float32, what each kept block is multiplied by (sm_89 and later). mD (M, N, L) bf16,
    fp16 or float32: rows of list r are the kept blocks' (columns, with dense_left) r * block_mn upwards.
    `operands` as in `kernels_dsl.blocks.epilogue.operands`. ValueError while tracing where the configuration
    does not fit.
    """
    block_mn = mS.shape[0]
    sparse = OperandFacts("values", 16, k_major=_is_one(mS.stride[1]))
    dense = OperandFacts("b", 16, k_major=_is_one(mX.stride[1]))
    pair = (dense, sparse) if dense_left else (sparse, dense)
    dtypes = (mX.element_type, mS.element_type) if dense_left else (mS.element_type, mX.element_type)
    pipeline = make_multistage_plan(config, dtypes[0], pair, mD, dtypes[1])
    blocked, other = (config.tile_n, config.tile_m) if dense_left else (config.tile_m, config.tile_n)
    plan = BsrPlan(pipeline, block_mn, -(-block_mn // blocked), dense_left)
    rows = cute.size(lists.table, mode=[0]) * plan.sub_tiles
    tiles = cute.ceil_div(mX.shape[0], other)
    bsr_sm80_kernel(mS, mX, mD, (lists, scales), operands, rows, plan, epilogue).launch(
        grid=[rows, tiles, mD.shape[2]],
        block=[config.threads, 1, 1],
        smem=pipeline.smem_bytes,
        stream=stream,
        min_blocks_per_mp=1,
    )


def _is_one(stride) -> bool:
    return isinstance(stride, int) and stride == 1


@entry_name("bsr_sm80")
@cute.kernel
def bsr_sm80_kernel(
    mS: cute.Tensor,
    mX: cute.Tensor,
    mD: cute.Tensor,
    pattern: tuple,  # (BlockLists, scales or None)
    operands: tuple,
    rows: Int32,
    plan: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
):
    """Device side of `bsr_sm80`."""
    pipeline = plan.pipeline
    config = pipeline.config
    lists, scales = pattern
    tidx, _, _ = cute.arch.thread_idx()
    place, x_tile, batch = cute.arch.block_idx()
    number = place // plan.sub_tiles
    sub = place % plan.sub_tiles
    row, first = lists.table[number, 0], lists.table[number, 1]
    entries = lists.table[number, 2] - first

    smem = cutlass.memory.SmemAllocator().allocate(pipeline.smem_bytes, byte_alignment=SMEM_ALIGN)
    sA, sB = stages_of(smem, pipeline)
    kept = cute.make_tensor(lists.kept.iterator + first, cute.make_layout(entries))
    where = cute.make_tensor(lists.dense.iterator + first, cute.make_layout(entries))
    mSl, mXl = mS[None, None, None, batch], mX[None, None, None, batch]
    if cutlass.const_expr(plan.dense_left):
        loaders = (
            make_list_loader(pipeline.a, mXl, sA, x_tile, where, tidx),
            make_list_loader(pipeline.b, mSl, sB, sub, kept, tidx),
        )
        coord = (x_tile, sub, batch)
    else:
        loaders = (
            make_list_loader(pipeline.a, mSl, sA, sub, kept, tidx),
            make_list_loader(pipeline.b, mXl, sB, x_tile, where, tidx),
        )
        coord = (sub, x_tile, batch)
    k_tiles = cute.ceil_div(entries * mS.shape[1], config.tile_k)
    promoted = None
    if cutlass.const_expr(scales is not None):
        tile = (config.tile_m, config.tile_n, config.tile_k)
        promoted = list_sum(
            pipeline.tiled_mma(), tile, kept, scales[None, batch], mS.shape[1], mma_k(pipeline.dtype)
        )
    acc, tiled_mma = accumulate(pipeline, (sA, sB), loaders, (Int32(0), k_tiles), tidx, promoted)

    mode = 1 if cutlass.const_expr(plan.dense_left) else 0
    mDr = mode_panel(mD, mode, plan.block_mn, row)
    parts = tuple(
        mode_panel(op, mode, plan.block_mn, row) if isinstance(op, cute.Tensor) else op for op in operands
    )
    out = OutputTile(mDr, coord, (config.tile_m, config.tile_n), parts, epilogue)
    store_tile(acc, tiled_mma, cute.recast_ptr(smem, dtype=Float32), out, pipeline.store, tidx)
