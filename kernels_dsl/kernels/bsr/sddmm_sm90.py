"""Sampled product for Hopper: the kept blocks of A @ B by TMA and WGMMA.

A tile of the result is some kept blocks of one block row side by side: they share the rows of A, and the
columns of B that they name are gathered into one tile in shared memory, a TMA load each, so that one WGMMA
as wide as all of them reads it. Beyond the last block of a row TMA fills with zeros, and nothing is stored.
Roles, ring and main loop are those of the dense kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import major_mode, staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma
from kernels_dsl.blocks.mainloop.operand_ring import Warpgroups, stages_that_fit
from kernels_dsl.config.bsr_sampled import Sm90SampledConfig
from kernels_dsl.kernels.bsr.entry_views import sampled_views

from .sddmm_sm90_roles import Chunks, sddmm_kernel

TILE_K = 64
"""Elements of K in a stage: 128 bytes, the widest swizzle."""


@dataclass(frozen=True)
class SampledSpec(Warpgroups):
    """Static facts of one instance; extents in elements. `subs`: tiles of a block along rows and columns.

    `rows_together`: block rows in a tile. `peers`: CTAs whose tiles are of one block row.
    """

    tile_m: int
    unit_n: int
    units: int
    subs: tuple[int, int]
    wg_m: int
    pingpong: bool
    stages: int
    rows_together: int
    peers: int
    dtype: type[cutlass.Numeric]
    epilogue: EpiloguePlan

    consumers = 2
    tile_k = TILE_K

    @property
    def tile_n(self) -> int:
        """Columns of a tile: those of all its units."""
        return self.unit_n * self.units

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of A and B in shared memory, which are what TMA announces."""
        return (self.tile_m + self.tile_n) * TILE_K * 2


def make_spec(config: Sm90SampledConfig, block: tuple, dtype, d_dtype) -> SampledSpec:
    """Completes a configuration for blocks of (rows, columns). ValueError: what does not fit."""
    rows = block[0] * config.rows_together
    if rows % config.tile_m or block[1] % config.unit_n:
        raise ValueError(
            f"tile_m and unit_n are {config.tile_m} and {config.unit_n}, must divide {(rows, block[1])}"
        )
    if config.rows_together > 1 and (rows, block[1]) != (config.tile_m, config.unit_n):
        raise ValueError(
            f"rows_together is {config.rows_together}, must be 1 where tiles are not whole blocks"
        )
    pingpong = config.schedule.name == "PINGPONG"
    tile_n = config.unit_n * config.units
    wg_m = config.tile_m if pingpong else config.tile_m // 2
    epi_n = epilogue_columns(config.unit_n, d_dtype)
    stage_bytes = (config.tile_m + tile_n) * TILE_K * 2
    subtile_bytes = 2 * 64 * epi_n * d_dtype.width // 8
    stages, epi_stages = stages_that_fit(config, 0, stage_bytes, subtile_bytes, most=12)
    return SampledSpec(
        config.tile_m, config.unit_n, config.units, (rows // config.tile_m, block[1] // config.unit_n),
        wg_m=wg_m, pingpong=pingpong, stages=stages, rows_together=config.rows_together,
        peers=config.cluster, dtype=dtype,
        epilogue=EpiloguePlan((wg_m, tile_n), epi_n, epi_stages, d_dtype, True),
    )  # fmt: skip


def sddmm_sm90_entry(
    a: cute.Tensor,
    b: cute.Tensor,
    values: cute.Tensor,
    lists: tuple,
    operands: tuple | None,
    max_ctas: Int32,
    stream,
    config: cutlass.Constexpr[Sm90SampledConfig],
    epilogue: cutlass.Constexpr,
    block: cutlass.Constexpr[tuple],
):
    """Launch values[e] = epilogue(block (row of e, columns[e]) of a @ b, *operands).

    a (M, K), b (K, N), 16-byte aligned, contiguous in either mode, or with a leading L; values
    (blocks, *block) or (L, blocks, *block), 16-byte aligned, the last two contiguous. lists: rows and first
    entries of chunks, columns (blocks), first entries of block rows (block rows + 1), all int32: chunk i has
    `config.units * config.cluster` entries from entries[i] on, or as many as its block row still has,
    perhaps none. Where `config.rows_together` is not 1, a row is so many block rows, and a fifth tensor has
    what each keeps of an entry: its number among the blocks, or theirs in all.
    `operands`: scalars only. `max_ctas`: CTAs that run at one time.
    """
    mA, mB, mV, batch = sampled_views(a, b, values, block)
    spec = make_spec(config, block, mA.element_type, mV.element_type)
    a_major, b_major = major_mode(mA), major_mode(mB)
    tiled_mma = make_warpgroup_mma(spec.dtype, a_major, b_major, spec.tile_n)
    tiled_mma_epi = make_warpgroup_mma(spec.dtype, a_major, b_major, spec.epilogue.epi_n)
    a_layout = staged_smem_layout(spec.dtype, (spec.tile_m, TILE_K), spec.stages, a_major)
    b_layout = staged_smem_layout(spec.dtype, (spec.tile_n, TILE_K), spec.stages, b_major)
    unit_layout = staged_smem_layout(spec.dtype, (spec.unit_n, TILE_K), spec.stages * spec.units, b_major)
    d_layout = staged_smem_layout(
        mV.element_type, spec.epilogue.subtile, spec.epilogue.stages, cute.nvgpu.OperandMajorMode.K
    )
    a_atom, tma_a = tma.make_load_atom(mA, a_layout, (spec.tile_m, TILE_K), spec.peers)
    b_atom, tma_b = tma.make_load_atom(mB, unit_layout, (spec.unit_n, TILE_K))
    # A staging buffer holds one block's rows after another's.
    part = (spec.epilogue.subtile[0] // spec.rows_together, spec.epilogue.subtile[1])
    part_layout = staged_smem_layout(
        mV.element_type, part, spec.epilogue.stages * spec.rows_together, cute.nvgpu.OperandMajorMode.K
    )
    d_atom, tma_d = tma.make_store_atom(mV, part_layout, part)
    kept = None
    if spec.rows_together > 1:
        kept_layout = cute.make_layout((cute.size(lists[2]), spec.rows_together))
        kept = cute.make_tensor(lists[4].iterator, kept_layout)
    units_n = mB.shape[0] // spec.unit_n
    chunks = Chunks(lists[0], lists[1], lists[2], lists[3], mA.shape[1], units_n, kept)
    work = cute.size(lists[0]) * (spec.subs[0] * spec.subs[1]) * batch
    sddmm_kernel(
        spec, epilogue, (tiled_mma, tiled_mma_epi), (a_layout, b_layout, unit_layout, d_layout, part_layout),
        (a_atom, tma_a, b_atom, tma_b), (d_atom, tma_d, operands or ()), chunks, Int32(work),
    ).launch(
        grid=(spec.peers, cutlass.max(cutlass.min(max_ctas // spec.peers, Int32(work)), Int32(1)), 1),
        block=(spec.threads, 1, 1),
        cluster=(spec.peers, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip
