"""Sampled product for Hopper: the kept blocks of A @ B by TMA and WGMMA.

A tile of the result is some kept blocks of one block row side by side: they share the rows of A, and the
columns of B that they name are gathered into one tile in shared memory, a TMA load each, so that one WGMMA
as wide as all of them reads it. Beyond the last block of a row TMA fills with zeros, and nothing is stored.
Roles, ring and main loop are those of the dense kernel.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import major_mode, staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma
from kernels_dsl.blocks.mainloop.operand_ring import Layouts
from kernels_dsl.config.bsr_sampled import Sm90SampledConfig
from kernels_dsl.kernels.bsr.entry_views import sampled_views
from kernels_dsl.kernels.skeleton import Loads, Mmas, Output

from .sddmm_sm90_roles import Chunks, SampledLayouts, sddmm_kernel
from .sddmm_sm90_spec import make_spec


def sddmm_sm90_entry(
    a: cute.Tensor,
    b: cute.Tensor,
    values: cute.Tensor,
    lists: tuple,  # the compiler takes `tuple[X, ...]` for a pair
    operands: Operands | None,
    max_ctas: Int32,
    stream,
    config: cutlass.Constexpr[Sm90SampledConfig],
    epilogue: cutlass.Constexpr,
    block: cutlass.Constexpr[tuple[int, int]],
):
    """Launches values[e] = epilogue(block (row of e, columns[e]) of a @ b, *operands).

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
    mmas = Mmas(
        make_warpgroup_mma(spec.dtype, a_major, b_major, spec.tile_n),
        make_warpgroup_mma(spec.dtype, a_major, b_major, spec.epilogue.epi_n),
    )
    a_tile, unit_tile = (spec.tile_m, spec.tile_k), (spec.unit_n, spec.tile_k)
    # A staging buffer holds one block's rows after another's.
    part = (spec.epilogue.subtile[0] // spec.rows_together, spec.epilogue.subtile[1])
    buffers = spec.epilogue.stages * spec.rows_together
    layouts = SampledLayouts(
        Layouts(
            staged_smem_layout(spec.dtype, a_tile, spec.stages, a_major),
            staged_smem_layout(spec.dtype, (spec.tile_n, spec.tile_k), spec.stages, b_major),
            spec.epilogue.layout(),
        ),
        staged_smem_layout(spec.dtype, unit_tile, spec.stages * spec.units, b_major),
        staged_smem_layout(mV.element_type, part, buffers, cute.nvgpu.OperandMajorMode.K),
    )
    loads = Loads(
        tma.make_load_atom(mA, layouts.tiles.a, a_tile, spec.peers),
        tma.make_load_atom(mB, layouts.units, unit_tile),
    )
    output = Output(*tma.make_store_atom(mV, layouts.parts, part), operands or ())
    rows, entries, columns, first = lists[:4]
    kept = None
    if spec.rows_together > 1:
        kept_layout = cute.make_layout((cute.size(columns), spec.rows_together))
        kept = cute.make_tensor(lists[4].iterator, kept_layout)
    chunks = Chunks(rows, entries, columns, first, mA.shape[1], mB.shape[0] // spec.unit_n, kept)
    items = Int32(cute.size(rows) * (spec.subs[0] * spec.subs[1]) * batch)
    sddmm_kernel(spec, epilogue, mmas, layouts, loads, output, chunks, items).launch(
        grid=(spec.peers, cutlass.max(cutlass.min(max_ctas // spec.peers, items), Int32(1)), 1),
        block=(spec.threads, 1, 1),
        cluster=(spec.peers, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )
