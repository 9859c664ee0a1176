"""Dense GEMM for Hopper: TMA loads, WGMMA, warp-specialised, persistent. D = epilogue(A @ B).

Roles. The last warpgroup of a CTA is the producer: one of its warps issues the TMA loads, the others
only give up their registers. The warpgroups before it are consumers: WGMMA and epilogue.

Pipelines. One ring of `stages` (A tile, B tile) pairs, `blocks.pipeline`; a consumer releases a stage
when the WGMMAs that read it are done, which is one K tile after they were issued. Arrivals that
empty a stage: `blocks.arrive_counts`. The epilogue has a ring of its own a warpgroup.

Timeline of a CTA, cooperative (both warpgroups hold half of the rows of one tile):

    producer  | load tile 0 ......... | load tile 1, as stages become empty ........
    consumer 0|    | wgmma tile 0 ...... | epilogue 0 | wgmma tile 1 ...
    consumer 1|    | wgmma tile 0 ...... | epilogue 0 | wgmma tile 1 ...

and ping-pong (each warpgroup owns whole tiles; named barriers pass the tensor cores back and forth):

    consumer 0|    | wgmma tile 0 | epilogue 0 |           | wgmma tile 2 | epilogue 2 |
    consumer 1|                   | wgmma tile 1 | epilogue 1 |            | wgmma tile 3 | ...
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import major_mode, staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma
from kernels_dsl.blocks.schedule.groups import GroupedGrid
from kernels_dsl.blocks.schedule.scheduler import SharedTiles, TileGrid, with_divisors

from .sm90_roles import gemm_kernel
from .sm90_spec import GemmSpec, make_spec


@cute.jit
def gemm_sm90(
    mA: cute.Tensor,  # (M, K, L)
    mB: cute.Tensor,  # (N, K, L)
    mD: cute.Tensor,  # (M, N, L * split_k)
    scales,  # None, or of A (groups of M, groups of K, L) and of B, as `promotion` says
    operands,  # None or a tuple of (M, N, L) tensors and Float32 scalars, for the epilogue
    max_ctas: Int32,
    stream: cuda.CUstream,
    how: cutlass.Constexpr,  # configuration, epilogue, promotion or None
    offsets=None,  # None, or (L) int32: groups of rows of A and D, `blocks.groups`
    stream_k=None,  # None, or (counters, workspace, tiles, share): memory of `shared_tiles`, `SharedTiles`
):
    """Launches the GEMM. A and B: 16-byte aligned base and strides, contiguous in mode 0 or 1.

    D is contiguous in mode 0 or 1 and 16-byte aligned where `config.epi_tma`, else of any strides.
    `epilogue(acc, *operands)` maps float32 TensorSSA values to the output. `max_ctas` is the number
    of CTAs that run at one time. With `config.split_k` > 1, D holds the partial sums of each split.
    `promotion`: fp8 products are summed by the tensor cores over 128 of K at a time, `blocks.promotion`.
    """
    config, epilogue, promotion = how
    spec = make_spec(config, mA, mB, mD, promotion)
    a_major, b_major = major_mode(mA), major_mode(mB)
    a_dtype, b_dtype = spec.mma_dtypes
    tiled_mma = make_warpgroup_mma(a_dtype, a_major, b_major, spec.mma_n, b_dtype=b_dtype)
    tiled_mma_epi = make_warpgroup_mma(a_dtype, a_major, b_major, spec.epilogue.epi_n, b_dtype=b_dtype)
    a_layout = staged_smem_layout(a_dtype, (spec.tile_m, spec.tile_k), spec.stages, a_major)
    b_layout = staged_smem_layout(b_dtype, (spec.tile_n, spec.tile_k), spec.stages, b_major)
    d_major = cute.nvgpu.OperandMajorMode.MN if spec.epilogue.m_major else cute.nvgpu.OperandMajorMode.K
    d_layout = staged_smem_layout(mD.element_type, spec.epilogue.subtile, spec.epilogue.stages, d_major)

    a_atom, tma_a = tma.make_load_atom(mA, a_layout, (spec.tile_m, spec.tile_k), spec.cluster[1])
    b_atom, tma_b = tma.make_load_atom(mB, b_layout, (spec.tile_n, spec.tile_k), spec.cluster[0])
    d_atom, tma_d = None, mD
    if cutlass.const_expr(spec.epilogue.use_tma):
        d_atom, tma_d = tma.make_store_atom(mD, d_layout, spec.epilogue.subtile)

    problem = (cute.size(mA, mode=[0]), cute.size(mB, mode=[0]), cute.size(mA, mode=[1]))
    grid, tiles = tile_grid(spec, problem, cute.size(mD, mode=[2]), offsets)
    cluster_size = spec.cluster[0] * spec.cluster[1]
    clusters = max_ctas // cluster_size
    if cutlass.const_expr(stream_k is None):
        clusters = cutlass.min(clusters, tiles)
    else:
        grid = grid._replace(shared=SharedTiles(*(Int32(x) for x in stream_k[2:])))
    clusters = cutlass.max(clusters, Int32(1))
    output = (d_atom, tma_d, () if operands is None else operands, *(() if offsets is None else (mD,)))
    kernel = gemm_kernel(
        spec, epilogue, (tiled_mma, tiled_mma_epi), (a_layout, b_layout, d_layout),
        (a_atom, tma_a, b_atom, tma_b), output, scales, (grid, problem),
        memory=None if stream_k is None else stream_k[:2],
    )  # fmt: skip
    kernel.launch(
        grid=(spec.cluster[0], spec.cluster[1], clusters),
        block=(spec.threads, 1, 1),
        cluster=(*spec.cluster, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


def tile_grid(spec: GemmSpec, problem: tuple, slices: Int32, offsets: cute.Tensor | None) -> tuple:
    """Extent of the schedule for (M, N, K) `problem`, and cluster tiles at most.

    `slices`: batches * splits of D. `offsets`: None, or where groups of rows end.
    """
    columns = spec.tile_n * spec.cluster[1]
    tiles_n = cute.ceil_div(problem[1], columns)
    if offsets is not None:
        groups = GroupedGrid(offsets, Int32(problem[0]), Int32(tiles_n))
        return groups, groups.most(spec.cluster_rows)
    tiles_m = cute.ceil_div(problem[0], spec.cluster_rows)
    grid = TileGrid(tiles_m, tiles_n, slices // spec.split_k, spec.split_k)
    if cutlass.const_expr(spec.promotion is not None):
        grid = with_divisors(grid, spec.raster_group, spec.raster_along_m)
    return grid, grid.size
