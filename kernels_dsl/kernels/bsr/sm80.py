"""Block-sparse GEMM for SM80-class GPUs: the dense kernel's skeleton over lists of kept blocks.

One CTA computes one tile of D: all or part of a block row (with the dense matrix on the left, of a block
column) by a tile of the dense mode. Its K axis is the row's kept blocks put end to end. CTAs of one tile of
the dense mode are neighbours, longest rows first: a wave shares few panels of the dense matrix in L2, and the
end of the launch has the short rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.epilogue.staged_store import OutputTile
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.mma_sync import mma_k
from kernels_dsl.blocks.mainloop.list_loader import ListOperand, make_list_loader
from kernels_dsl.blocks.mainloop.multistage import (
    KRange,
    Loads,
    MultistagePlan,
    OperandFacts,
    launch,
    make_multistage_plan,
    product,
)
from kernels_dsl.blocks.mainloop.operand_views import mode_panel
from kernels_dsl.blocks.mainloop.promotion import list_sum
from kernels_dsl.blocks.schedule.block_lists import BlockLists
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.kernels.bsr.entry_views import Views


@dataclass(frozen=True)
class BsrSpec:
    """Trace-time facts of an instance."""

    pipeline: MultistagePlan
    block_mn: int
    sub_tiles: int
    """Tiles of a block row."""
    dense_left: bool
    epilogue: Any


def bsr_sm80(
    views: Views,
    lists: BlockLists,
    scales: cute.Tensor | None,
    stream,
    config: Sm80GemmConfig,
    epilogue: Any,
    dense_left: bool,
) -> None:
    """Launch D = epilogue(sum of products, *operands) over lists of kept blocks.

    views.s (block_mn, block_k, blocks, L): the kept blocks, extents of a block static multiples of 16.
    views.x (X, block_k, K / block_k, L): the dense matrix, seen as blocks along K. Both bf16 or fp16, one
    mode contiguous, aligned to 16 bytes; or each e4m3 or e5m2, K contiguous and block_k a multiple of 32,
    with `scales` (blocks, L) float32, a factor of each kept block (sm_89 and later). views.d (M, N, L) bf16,
    fp16 or float32: rows of list r are the kept blocks' (columns, with dense_left) from r * block_mn on.
    Operands as in `kernels_dsl.blocks.epilogue.operands`. ValueError while tracing if the configuration does
    not fit.
    """
    mS, mX, mD = views.s, views.x, views.d
    sparse = OperandFacts("values", 16, k_major=_is_one(mS.stride[1]))
    dense = OperandFacts("b", 16, k_major=_is_one(mX.stride[1]))
    pair = (dense, sparse) if dense_left else (sparse, dense)
    dtypes = (mX.element_type, mS.element_type) if dense_left else (mS.element_type, mX.element_type)
    plan = make_multistage_plan(config, dtypes[0], pair, mD, dtypes[1])
    blocked, other = (config.tile_n, config.tile_m) if dense_left else (config.tile_m, config.tile_n)
    spec = BsrSpec(plan, mS.shape[0], -(-mS.shape[0] // blocked), dense_left, epilogue)
    rows = cute.size(lists.table, mode=[0]) * spec.sub_tiles
    tiles = cute.ceil_div(mX.shape[0], other)
    kernel = bsr_sm80_kernel(mS, mX, mD, lists, scales, views.operands, rows, spec)
    launch(kernel, plan, [rows, tiles, mD.shape[2]], stream)


def _is_one(stride: Int32 | int) -> bool:
    return isinstance(stride, int) and stride == 1


@entry_name("bsr_sm80")
@cute.kernel
def bsr_sm80_kernel(
    mS: cute.Tensor,
    mX: cute.Tensor,
    mD: cute.Tensor,
    lists: BlockLists,
    scales: cute.Tensor | None,
    operands: Operands,
    rows: Int32,
    spec: cutlass.Constexpr[BsrSpec],
):
    """Device side of `bsr_sm80`."""
    plan = spec.pipeline
    mode = cutlass.const_expr(1 if spec.dense_left else 0)
    tidx, _, _ = cute.arch.thread_idx()
    index, x_tile, batch = cute.arch.block_idx()
    number = index // spec.sub_tiles
    sub = index % spec.sub_tiles
    row, first = lists.table[number, 0], lists.table[number, 1]
    entries = lists.table[number, 2] - first
    kept = cute.make_tensor(lists.kept.iterator + first, cute.make_layout(entries))
    columns = cute.make_tensor(lists.dense.iterator + first, cute.make_layout(entries))
    sparse = ListOperand(mS[None, None, None, batch], sub, kept)
    dense = ListOperand(mX[None, None, None, batch], x_tile, columns)
    a, b = (dense, sparse) if cutlass.const_expr(spec.dense_left) else (sparse, dense)

    def load(tiles):
        load_a = make_list_loader(plan.a, a, tiles.a, tidx)
        load_b = make_list_loader(plan.b, b, tiles.b, tidx)
        return Loads(load_a, load_b, KRange(Int32(0), cute.ceil_div(entries * mS.shape[1], plan.tile[2])))

    def promote():
        found = None
        if cutlass.const_expr(scales is not None):
            block_k, step_k = mS.shape[1], mma_k(plan.dtype)
            found = list_sum(plan.tiled_mma(), plan.tile, kept, scales[None, batch], block_k, step_k)
        return found

    def finish():
        mDr = mode_panel(mD, mode, spec.block_mn, row)
        own = tuple(
            mode_panel(op, mode, spec.block_mn, row) if isinstance(op, cute.Tensor) else op for op in operands
        )
        return OutputTile(mDr, (a.tile, b.tile, batch), plan.tile[:2], own, spec.epilogue)

    product(plan, load, finish, tidx, promote)
