"""Block-sparse GEMM for Hopper: the dense kernel's roles, with a list of kept blocks in place of a K counter.

A work item is a cluster's tile of D: some rows of a block row, by a tile of the dense mode. Its K axis is the
block row's kept blocks, end to end. The producer warp reads the list (32 entries at a time, one a lane, the
next 32 in flight) and loads for each entry the kept block and the rows of the dense matrix that it meets;
TMA fills what lies behind a block's end, a list's end or the matrix' edge with zeros, so that tails need no
case of their own and nothing that no kept block meets is ever read.

Either operand may be WGMMA's M. Blocks of 64 rows and more go there; smaller ones go on N, which may be 16,
and the dense matrix on M, so that no lane is wasted: D is then computed transposed.

Lists that take longer than all work does over all CTAs come in pieces, whose sums meet in global memory
(`list_pieces`). Heavy lists go first. Items go by chunks of panels of the dense matrix that stay in L2,
longest lists first; clusters take them as they become free (`item_queue`), so that uneven lists even out.

Roles and timeline are those of the dense kernel: a producer warp, two consumer warpgroups that share a tile
(cooperative) or own one each (ping-pong), an epilogue that overlaps the next item's loads.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import major_mode, staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma
from kernels_dsl.blocks.schedule.block_lists import ListGrid
from kernels_dsl.config.bsr import Sm90BsrConfig

from .sm90_roles import bsr_kernel
from .sm90_spec import PAIR, make_spec

PANELS_BYTES = 6 << 20
"""Of the dense matrix, worked on together. 24 MB cost 5 to 15 % with blocks of 64 rows and less (H200)."""


@cute.jit
def bsr_sm90(
    mS: cute.Tensor,  # (block, block_k, blocks, L)
    mX: cute.Tensor,  # (X, block_k, K / block_k, L)
    mD: cute.Tensor,  # (M, N, L) in the kernel's sense: the blocked mode is M where config.sparse_on_m
    lists: tuple,  # (BlockLists, counters of `item_queue` and `list_pieces`, the latter's workspace or None)
    operands,  # () or a tuple of (M, N, L) tensors and Float32 scalars, for the epilogue
    max_ctas: Int32,
    stream: cuda.CUstream,
    config: cutlass.Constexpr[Sm90BsrConfig],
    epilogue: cutlass.Constexpr,
    scales=None,  # None, or (blocks, L) float32: what each kept block is multiplied by
):
    """Launches D = epilogue(sum over each list of kept block @ its part of the dense matrix).

    S and X: 16-byte aligned base and strides, contiguous in mode 0 or 1. So is D where `config.epi_tma`, else
    it has any strides. `max_ctas`: CTAs that run at one time.
    """
    spec = make_spec(config, mS, mX, mD, scales is not None)
    mA, mB = (mS, mX) if config.sparse_on_m else (mX, mS)
    a_major, b_major = major_mode(mA), major_mode(mB)
    a_dtype, b_dtype = spec.dtypes
    tiled_mma = make_warpgroup_mma(a_dtype, a_major, b_major, spec.wg_n, b_dtype=b_dtype)
    tiled_mma_epi = make_warpgroup_mma(a_dtype, a_major, b_major, spec.epilogue.epi_n, b_dtype=b_dtype)
    a_tile, b_tile = (spec.tile_m, spec.kept_k), (spec.wg_n, spec.unit_k)
    slots = spec.stages * spec.units
    a_layout = staged_smem_layout(a_dtype, a_tile, spec.kept_stages or slots, a_major)
    b_layout = staged_smem_layout(b_dtype, b_tile, slots * spec.shares_n, b_major)
    d_major = cute.nvgpu.OperandMajorMode.MN if spec.epilogue.m_major else cute.nvgpu.OperandMajorMode.K
    d_layout = staged_smem_layout(mD.element_type, spec.epilogue.subtile, spec.epilogue.stages, d_major)
    a_atom, tma_a = tma.make_load_atom(mA, a_layout, a_tile, 1 if spec.pairs else spec.cluster[1])
    b_atom, tma_b = tma.make_load_atom(mB, b_layout, b_tile, 1 if spec.pairs else spec.cluster[0])
    shared_atom, tma_shared = None, None
    if cutlass.const_expr(spec.pairs):
        x_layout, x_tile = (b_layout, b_tile) if config.sparse_on_m else (a_layout, a_tile)
        shared_atom, tma_shared = tma.make_load_atom(mX, x_layout, x_tile, PAIR)
    d_atom, tma_d = None, mD
    if cutlass.const_expr(spec.epilogue.use_tma):
        d_atom, tma_d = tma.make_store_atom(mD, d_layout, spec.epilogue.subtile)

    panel = config.tile_x * config.cluster_x
    panel_bytes = cute.size(mX, mode=[1]) * cute.size(mX, mode=[2]) * (panel * a_dtype.width // 8)
    grid = ListGrid(
        cute.size(lists[0].table, mode=[0]) * spec.sub_clusters,
        cute.ceil_div(cute.size(mX, mode=[0]), panel),
        cute.size(mD, mode=[2]),
        cutlass.max(Int32(PANELS_BYTES) // panel_bytes, Int32(1)),
    )
    cluster_size = spec.cluster[0] * spec.cluster[1]
    clusters = cutlass.max(cutlass.min(max_ctas // cluster_size, grid.size), Int32(1))
    if cutlass.const_expr(spec.two_rings):
        # As many as make the rounds full: L2 feeds a few CTAs less just as fast.
        even = cute.ceil_div(grid.size, cute.ceil_div(grid.size, clusters))
        clusters = even if even * 16 >= clusters * 15 else clusters
    ends = (cute.size(mS, mode=[2]), cute.size(mX, mode=[2]))
    kernel = bsr_kernel(
        spec, epilogue, (tiled_mma, tiled_mma_epi), (a_layout, b_layout, d_layout),
        (a_atom, tma_a, b_atom, tma_b, shared_atom, tma_shared),
        (d_atom, tma_d, () if operands is None else operands),
        (*lists, ends, (mD.shape[0], mD.shape[1], mD.shape[2]), scales), grid,
    )  # fmt: skip
    kernel.launch(
        grid=(spec.cluster[0], spec.cluster[1], clusters),
        block=(spec.threads, 1, 1),
        cluster=(*spec.cluster, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )
