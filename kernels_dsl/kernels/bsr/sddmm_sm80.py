"""Sampled product for SM80-class GPUs: the kept blocks of A @ B.T.

One CTA computes a tile of some kept blocks of one block row, side by side: the rows of A that they share, and
the rows of B that they name, gathered. Narrow blocks so use the loads of A as often as wide ones.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.epilogue.staged_store import OutputTile, store_tile
from kernels_dsl.blocks.hw.cp_async import tile_loader
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.mainloop.list_loader import make_gather_loader
from kernels_dsl.blocks.mainloop.multistage import (
    SMEM_ALIGN,
    accumulate,
    make_multistage_plan,
    operand_facts,
    stages_of,
)
from kernels_dsl.blocks.mainloop.operand_views import mode_panel
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.kernels.bsr.entry_views import sampled_views


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
    units: cutlass.Constexpr[int],
):
    """Launch values[e] = epilogue(block (row of e, columns[e]) of a @ b, *operands).

    a (M, K), b (K, N), any layout, or with a leading L; values (blocks, *block) or (L, blocks, *block), the
    last two contiguous. lists: rows and entries of chunks (chunks), columns (blocks), first entries of block
    rows (block rows + 1), all int32: chunk i has the `units` entries, or as many as its block row still has,
    from entries[i] on. `operands`: scalars only. b aligned to 4 bytes. `max_ctas` is not used.
    """
    mA, mB, mV, batch = sampled_views(a, b, values, block)
    pair = (operand_facts(mA, "a", config.copy_bytes_a), operand_facts(mB, "b", config.copy_bytes_b))
    plan = make_multistage_plan(config, mA.element_type, pair, mV[None, None, None, 0])
    tiles = (-(-block[0] // config.tile_m), -(-units * block[1] // config.tile_n))
    sddmm_sm80_kernel(mA, mB, mV, lists, operands or (), (tiles, units), plan, epilogue).launch(
        grid=[cute.size(lists[0]) * (tiles[0] * tiles[1]), 1, batch],
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
    cut: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
):
    """Device side of `sddmm_sm80_entry`."""
    config = plan.config
    tidx, _, _ = cute.arch.thread_idx()
    place, _, batch = cute.arch.block_idx()
    tiles, units = cut
    chunk = place // (tiles[0] * tiles[1])
    tile = place % (tiles[0] * tiles[1])
    sub_m, sub_n = tile // tiles[1], tile % tiles[1]
    rows, entries, columns, first = lists
    row, entry = rows[chunk], entries[chunk]
    count = cutlass.min(first[row + 1] - entry, Int32(units))
    k_tiles = cute.ceil_div(mA.shape[1], config.tile_k)
    k_tiles = k_tiles if count > 0 else Int32(0)  # there are more chunks than are needed

    smem = cutlass.memory.SmemAllocator().allocate(plan.smem_bytes, byte_alignment=SMEM_ALIGN)
    sA, sB = stages_of(smem, plan)
    block_m, block_n = mV.shape[0], mV.shape[1]
    load_a = tile_loader(mode_panel(mA, 0, block_m, row), sA, plan.a, sub_m, batch, tidx)
    numbers = cute.make_tensor(columns.iterator + entry, cute.make_layout(units))
    load_b = make_gather_loader(plan.b, mB[None, None, batch], sB, (numbers, count, block_n), sub_n, tidx)
    acc, tiled_mma = accumulate(plan, (sA, sB), (load_a, load_b), (Int32(0), k_tiles), tidx)

    # The chunk's blocks side by side: (rows, columns of all, 1).
    stride = mV.stride[2]
    layout = cute.make_layout((block_m, count * block_n, 1), stride=(block_n, 1, 0))
    ptr = mV[None, None, entry, batch].iterator.align(mV.iterator.alignment)
    out = OutputTile(
        cute.make_tensor(ptr, layout), (sub_m, sub_n, 0), (config.tile_m, config.tile_n), operands, epilogue,
        panel=(block_n, stride),
    )  # fmt: skip
    store_tile(acc, tiled_mma, cute.recast_ptr(smem, dtype=Float32), out, plan.store, tidx)
