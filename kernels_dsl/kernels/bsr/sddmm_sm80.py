"""Sampled product for SM80-class GPUs: the kept blocks of A @ B.T, one CTA a tile of a block.

Blocks come in the order in which they are stored, row by row, so that CTAs in flight share the rows of A.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.cp_async import tile_loader
from kernels_dsl.blocks.entry_name import entry_name
from kernels_dsl.blocks.multistage import (
    SMEM_ALIGN,
    accumulate,
    make_multistage_plan,
    operand_facts,
    stages_of,
)
from kernels_dsl.blocks.operand_views import batch_extent, batch_first_view, mode_panel
from kernels_dsl.blocks.staged_store import OutputTile, store_tile
from kernels_dsl.config.gemm import Sm80GemmConfig


def sddmm_sm80_entry(
    a: cute.Tensor,
    b: cute.Tensor,
    values: cute.Tensor,
    lists: tuple,
    operands: tuple | None,
    max_ctas: Int32,
    stream,
    config: cutlass.Constexpr[Sm80GemmConfig],
    epilogue: cutlass.Constexpr,
    block: cutlass.Constexpr[tuple],
):
    """Launch values[e] = epilogue(block (rows[e], columns[e]) of a @ b, *operands).

    a (M, K), b (K, N), any layout, or with a leading L; values (blocks, *block) or (L, blocks, *block), the
    last two contiguous. lists: rows and columns (blocks), int32 block numbers. `operands`: scalars only.
    `max_ctas` is not used.
    """
    rank = cute.rank(values)
    batch = values.shape[0] if rank == 4 else batch_extent(a, b)
    mA = batch_first_view(a, batch, swap=False)  # (M, K, L)
    mB = batch_first_view(b, batch, swap=True)  # (N, K, L)
    layout = cute.make_layout(
        (*block, values.shape[rank - 3], batch),
        stride=(block[1], 1, values.stride[rank - 3], values.stride[0] if rank == 4 else 0),
    )
    mV = cute.make_tensor(values.iterator, layout)  # (rows, columns, blocks, L)
    pair = (operand_facts(mA, "a", config.copy_bytes_a), operand_facts(mB, "b", config.copy_bytes_b))
    plan = make_multistage_plan(config, mA.element_type, pair, mV[None, None, None, 0])
    tiles = (-(-block[0] // config.tile_m), -(-block[1] // config.tile_n))
    sddmm_sm80_kernel(mA, mB, mV, lists, operands or (), tiles, plan, epilogue).launch(
        grid=[mV.shape[2] * (tiles[0] * tiles[1]), 1, batch],
        block=[config.threads, 1, 1],
        smem=plan.smem_bytes,
        stream=stream,
        min_blocks_per_mp=1,
    )


@entry_name("bsr_sddmm_sm80")
@cute.kernel
def sddmm_sm80_kernel(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mV: cute.Tensor,
    lists: tuple,
    operands: tuple,
    tiles: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
):
    """Device side of `sddmm_sm80_entry`."""
    config = plan.config
    tidx, _, _ = cute.arch.thread_idx()
    place, _, batch = cute.arch.block_idx()
    entry = place // (tiles[0] * tiles[1])
    tile = place % (tiles[0] * tiles[1])
    sub_m, sub_n = tile // tiles[1], tile % tiles[1]
    smem = cutlass.memory.SmemAllocator().allocate(plan.smem_bytes, byte_alignment=SMEM_ALIGN)
    sA, sB = stages_of(smem, plan)
    mAr = mode_panel(mA, 0, mV.shape[0], lists[0][entry])
    mBr = mode_panel(mB, 0, mV.shape[1], lists[1][entry])
    load_a = tile_loader(mAr, sA, plan.a, sub_m, batch, tidx)
    load_b = tile_loader(mBr, sB, plan.b, sub_n, batch, tidx)
    k_tiles = cute.ceil_div(mA.shape[1], config.tile_k)
    acc, tiled_mma = accumulate(plan, (sA, sB), (load_a, load_b), (Int32(0), k_tiles), tidx)
    mVl = mV[None, None, None, batch]  # (rows, columns, blocks): the blocks stand where batches do
    out = OutputTile(mVl, (sub_m, sub_n, entry), (config.tile_m, config.tile_n), operands, epilogue)
    store_tile(acc, tiled_mma, cute.recast_ptr(smem, dtype=Float32), out, plan.store, tidx)
