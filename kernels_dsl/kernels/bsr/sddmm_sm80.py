"""Sampled product for SM80-class GPUs: the kept blocks of A @ B.T.

One CTA computes a tile of some kept blocks of one block row, side by side: the rows of A that they share, and
the rows of B that they name, gathered. Narrow blocks thus reuse the loads of A as often as wide ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.epilogue.staged_store import OutputTile, Panels
from kernels_dsl.blocks.hw.cp_async import tile_loader
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.mainloop.list_loader import BlockRows, make_gather_loader
from kernels_dsl.blocks.mainloop.multistage import (
    KRange,
    Loads,
    MultistagePlan,
    launch,
    make_multistage_plan,
    operand_facts,
    product,
)
from kernels_dsl.blocks.mainloop.operand_views import mode_panel
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.kernels.bsr.entry_views import sampled_views


class Chunks(NamedTuple):
    """Runs of kept blocks that are computed together, int32: at most as many as `SddmmSpec.units`.

    Chunk i begins at entry entries[i] and ends with its block row at the latest. There are more chunks than
    are needed.
    """

    rows: cute.Tensor  # (chunks): their block rows
    entries: cute.Tensor  # (chunks)
    columns: cute.Tensor  # (blocks): block columns of the entries
    first: cute.Tensor  # (block rows + 1): first entries of block rows


@dataclass(frozen=True)
class SddmmSpec:
    """Trace-time facts of an instance."""

    pipeline: MultistagePlan
    tiles: tuple[int, int]
    """Tiles of a chunk along M and N."""
    units: int
    epilogue: Any


def sddmm_sm80_entry(
    a: cute.Tensor,
    b: cute.Tensor,
    values: cute.Tensor,
    lists: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
    operands: Operands | None,
    max_ctas: Int32,
    stream,
    config: cutlass.Constexpr[Sm80GemmConfig],
    epilogue: cutlass.Constexpr,
    block: cutlass.Constexpr[tuple[int, int]],
    units: cutlass.Constexpr[int],
):
    """Launch values[e] = epilogue(block (row of e, columns[e]) of a @ b, *operands).

    a (M, K), b (K, N), any layout, or with a leading L; values (blocks, *block) or (L, blocks, *block), the
    last two contiguous. lists: `Chunks` of `units` blocks. `operands`: scalars only. b aligned to 4 bytes.
    `max_ctas` has no effect.
    """
    mA, mB, mV, batch = sampled_views(a, b, values, block)
    pair = (operand_facts(mA, "a", config.copy_bytes_a), operand_facts(mB, "b", config.copy_bytes_b))
    plan = make_multistage_plan(config, mA.element_type, pair, mV[None, None, None, 0])
    tiles = (-(-block[0] // config.tile_m), -(-units * block[1] // config.tile_n))
    chunks, spec = Chunks(*lists), SddmmSpec(plan, tiles, units, epilogue)
    kernel = sddmm_sm80_kernel(mA, mB, mV, chunks, operands or (), spec)
    launch(kernel, plan, [cute.size(chunks.rows) * (tiles[0] * tiles[1]), 1, batch], stream)


@entry_name("bsr_sddmm_sm80")
@cute.kernel
def sddmm_sm80_kernel(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mV: cute.Tensor,
    chunks: Chunks,
    operands: Operands,
    spec: cutlass.Constexpr[SddmmSpec],
):
    """Device side of `sddmm_sm80_entry`."""
    plan, tiles, units = spec.pipeline, spec.tiles, spec.units
    tidx, _, _ = cute.arch.thread_idx()
    index, _, batch = cute.arch.block_idx()
    chunk = index // (tiles[0] * tiles[1])
    tile = index % (tiles[0] * tiles[1])
    sub_m, sub_n = tile // tiles[1], tile % tiles[1]
    row, entry = chunks.rows[chunk], chunks.entries[chunk]
    count = cutlass.min(chunks.first[row + 1] - entry, Int32(units))
    k_tiles = cute.ceil_div(mA.shape[1], plan.tile[2])
    k_tiles = k_tiles if count > 0 else Int32(0)  # a chunk that is not needed
    block_m, block_n = mV.shape[0], mV.shape[1]

    def load(tiles):
        load_a = tile_loader(mode_panel(mA, 0, block_m, row), tiles.a, plan.a, sub_m, batch, tidx)
        numbers = cute.make_tensor(chunks.columns.iterator + entry, cute.make_layout(units))
        blocks = BlockRows(numbers, count, block_n)
        load_b = make_gather_loader(plan.b, mB[None, None, batch], tiles.b, blocks, sub_n, tidx)
        return Loads(load_a, load_b, KRange(Int32(0), k_tiles))

    def finish():
        # The chunk's blocks side by side: (rows, columns of all, 1).
        stride = mV.stride[2]
        layout = cute.make_layout((block_m, count * block_n, 1), stride=(block_n, 1, 0))
        ptr = mV[None, None, entry, batch].iterator.align(mV.iterator.alignment)
        coord, panels = (sub_m, sub_n, 0), Panels(block_n, stride)
        return OutputTile(
            cute.make_tensor(ptr, layout), coord, plan.tile[:2], operands, spec.epilogue, panels
        )

    product(plan, load, finish, tidx)
