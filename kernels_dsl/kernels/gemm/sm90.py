"""Dense GEMM for Hopper: TMA loads, WGMMA, warp-specialised, persistent. D = epilogue(A @ B).

Roles. The last warpgroup of a CTA is the producer: one of its warps issues the TMA loads, the others
only give up their registers. The warpgroups before it are consumers: WGMMA and epilogue.

Pipelines. One ring of `stages` (A tile, B tile) pairs, `blocks.hw.pipeline`; a consumer releases a stage
when the WGMMAs that read it are done, which is one K tile after they were issued. Arrivals that
empty a stage: `multicast_release_count` there. The epilogue has a ring of its own a warpgroup.

Timeline of a CTA, cooperative (both warpgroups hold half of the rows of one tile):

    producer  | load tile 0 ......... | load tile 1, as stages become empty ........
    consumer 0|    | wgmma tile 0 ...... | epilogue 0 | wgmma tile 1 ...
    consumer 1|    | wgmma tile 0 ...... | epilogue 0 | wgmma tile 1 ...

and ping-pong (each warpgroup owns whole tiles; named barriers pass the tensor cores back and forth):

    consumer 0|    | wgmma tile 0 | epilogue 0 |           | wgmma tile 2 | epilogue 2 |
    consumer 1|                   | wgmma tile 1 | epilogue 1 |            | wgmma tile 3 | ...
"""

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.epilogue.gated_rows import without_preact
from kernels_dsl.blocks.epilogue.gates import GatedEpilogue
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import major_mode, staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma
from kernels_dsl.blocks.mainloop.last_rows import last_rows_atom
from kernels_dsl.blocks.mainloop.operand_ring import Layouts
from kernels_dsl.blocks.reduce.lines import without_partials
from kernels_dsl.blocks.reduce.partial_sums import SumMemory
from kernels_dsl.blocks.schedule.groups import GroupedGrid
from kernels_dsl.blocks.schedule.scheduler import CutTiles, TileGrid, with_divisors
from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.kernels.skeleton import Loads, Mmas, Output

from .entry_views import Views
from .sm90_roles import Extent, LastLoads, gemm_kernel
from .sm90_spec import GemmSpec, make_spec


def gemm_sm90(
    views: Views, max_ctas: Int32, stream: cuda.CUstream, config: Sm90GemmConfig, epilogue: Callable[..., Any]
) -> None:
    """Launches the GEMM. A and B: 16-byte aligned base and strides, contiguous in mode 0 or 1.

    D is contiguous in mode 0 or 1 and 16-byte aligned where `config.epi_tma`, else of any strides.
    `epilogue(acc, *operands)` maps float32 TensorSSA values to the output. `max_ctas` is the number
    of CTAs that run at one time. With `config.split_k` > 1, D holds the partial sums of each split. With
    `views.promotion` the tensor cores sum fp8 products over 128 of K at a time, see `promoted_ring`.
    """
    mA, mB, mD, operands = views.a, views.b, views.d, views.operands
    gated, mZ = isinstance(epilogue, GatedEpilogue), None
    if isinstance(epilogue, GatedEpilogue):
        operands, mZ = without_preact(epilogue, operands)
    operands, partials = without_partials(epilogue, operands)
    spec = make_spec(config, mA, mB, mD, views.promotion, gated)
    a_major, b_major = major_mode(mA), major_mode(mB)
    a_dtype, b_dtype = spec.mma_dtypes
    mmas = Mmas(
        make_warpgroup_mma(a_dtype, a_major, b_major, spec.mma_n, b_dtype=b_dtype),
        make_warpgroup_mma(a_dtype, a_major, b_major, spec.epilogue.epi_n, b_dtype=b_dtype),
    )
    a_tile, b_tile = (spec.tile_m, spec.tile_k), (spec.tile_n, spec.tile_k)
    layouts = Layouts(
        staged_smem_layout(a_dtype, a_tile, spec.stages, a_major),
        staged_smem_layout(b_dtype, b_tile, spec.stages, b_major),
        spec.epilogue.layout(),
    )
    loads = Loads(
        tma.make_load_atom(mA, layouts.a, a_tile, spec.cluster[1]),
        tma.make_load_atom(mB, layouts.b, b_tile, spec.cluster[0]),
    )
    last = LastLoads(
        last_rows_atom(mA, a_dtype, spec.last[0], spec.tile_k),
        last_rows_atom(mB, b_dtype, spec.last[1], spec.tile_k),
    )
    store = store_to(spec, mD, layouts.d)
    product = None if mZ is None else store_to(spec, mZ, layouts.d)

    problem = Extent(cute.size(mA, mode=[0]), cute.size(mB, mode=[0]), cute.size(mA, mode=[1]))
    grid, tiles = tile_grid(spec, problem, cute.size(mD, mode=[2]), views.offsets)
    clusters, memory = max_ctas // config.cluster_ctas, None
    if views.stream_k is None:
        clusters = cutlass.min(clusters, tiles)
    else:
        assert isinstance(grid, TileGrid)
        grid = grid._replace(cut=CutTiles(Int32(views.stream_k.tiles), Int32(views.stream_k.share)))
        memory = SumMemory(views.stream_k.counters, views.stream_k.workspace)
    output = Output(*store, operands, None if views.offsets is None else mD, product, partials)
    kernel = gemm_kernel(
        spec, epilogue, mmas, layouts, loads, last, output, views.scales,
        grid=grid, problem=problem, memory=memory,
    )  # fmt: skip
    kernel.launch(
        grid=(*spec.cluster, cutlass.max(clusters, Int32(1)) * spec.cluster_k),
        block=(spec.threads, 1, 1),
        cluster=(*spec.cluster, spec.cluster_k),
        min_blocks_per_mp=config.ctas_per_sm,
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=100 if spec.overlap else None,  # in percent
    )


def store_to(spec: GemmSpec, mX: cute.Tensor, layout: cute.ComposedLayout) -> tma.TmaCopy:
    """Stores of staging buffers to mX (M, N, L); without TMA the tensor alone."""
    if spec.epilogue.use_tma:
        return tma.make_store_atom(mX, layout, spec.epilogue.subtile)
    return tma.TmaCopy(None, mX)


def tile_grid(
    spec: GemmSpec, problem: Extent, slices: Int32, offsets: cute.Tensor | None
) -> tuple[TileGrid | GroupedGrid, Int32]:
    """Extent of the schedule, and cluster tiles at most.

    `slices`: batches * splits of D. `offsets`: None, or the ends of groups of rows.
    """
    tiles_n = cute.ceil_div(problem.n, spec.tile_n * spec.cluster[1])
    if offsets is not None:
        groups = GroupedGrid(offsets, Int32(problem.m), Int32(tiles_n))
        return groups, groups.most(spec.cluster_rows)
    tiles_m = cute.ceil_div(problem.m, spec.cluster_rows)
    grid = TileGrid(tiles_m, tiles_n, slices // spec.split_k, spec.split_k)
    if spec.promotion is not None:
        grid = with_divisors(grid, *spec.raster)
    return grid, grid.size
