"""Block-sparse GEMM for Hopper: the dense kernel's roles, with a list of kept blocks in place of a K counter.

A work item is a cluster's tile of D: some rows of a block row, by a tile of the dense mode. Its K axis is the
block row's kept blocks, end to end. The producer warp reads the list (32 entries at a time, one a lane, the
next 32 in flight) and loads for each entry the kept block and the rows of the dense matrix that it meets;
TMA fills what lies past a block's end, a list's end or the matrix' edge with zeros, so that tails need no
case of their own and nothing that no kept block meets is ever read.

Either operand may be WGMMA's M. Blocks of 64 rows and more go there; smaller ones go on N, which may be 16,
and the dense matrix on M, so that no lane is wasted: D is then computed transposed.

Lists that take longer than all work does over all CTAs come in pieces, whose sums meet in global memory
(`partial_sums`). Heavy lists go first. Items go by chunks of panels of the dense matrix that stay in L2,
longest lists first; clusters take them as they become free (`item_queue`), so that uneven lists even out.

Roles and timeline are those of the dense kernel: a producer warp, two consumer warpgroups that share a tile
(cooperative) or own one each (ping-pong), an epilogue that overlaps the next item's loads.
"""

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.epilogue.operands import Operands
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import first_part, major_mode, staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma
from kernels_dsl.blocks.mainloop.operand_ring import Layouts
from kernels_dsl.blocks.reduce.partial_sums import SumMemory
from kernels_dsl.blocks.schedule.block_lists import BlockLists, ListEnds, ListGrid
from kernels_dsl.config.bsr import NanRule, Sm90BsrConfig
from kernels_dsl.kernels.skeleton import Mmas, Output

from .sm90_roles import BsrLoads, Pattern, bsr_kernel
from .sm90_spec import PAIR, ROW, make_spec

PANELS_BYTES = 6 << 20
"""Of the dense matrix, worked on together. 24 MB cost 5 to 15 % with blocks of 64 rows and less (H200)."""


def bsr_sm90(
    mS: cute.Tensor,  # (block, block_k, blocks, L)
    mX: cute.Tensor,  # (X, block_k, K / block_k, L)
    mD: cute.Tensor,  # (M, N, L) in the kernel's sense: the blocked mode is M where config.sparse_on_m
    lists: BlockLists,
    memory: SumMemory,  # counters of `item_queue` and `partial_sums`, the latter's workspace or None
    operands: Operands,
    max_ctas: Int32,
    stream: cuda.CUstream,
    *,
    config: Sm90BsrConfig,
    epilogue: Callable[..., Any],
    scales: cute.Tensor | None = None,  # (blocks, L) float32: factors of the kept blocks
    nans: NanRule = NanRule.NONE,
) -> None:
    """Launches D = epilogue(sum over each list of kept block @ its part of the dense matrix, *operands).

    S and X: 16-byte aligned base and strides, contiguous in mode 0 or 1. So is D where `config.epi_tma`, else
    it has any strides. `max_ctas`: CTAs that run at one time.
    """
    spec = make_spec(config, mS, mX, mD, scales is not None, nans)
    a_major, b_major = (major_mode(x) for x in ((mS, mX) if config.sparse_on_m else (mX, mS)))
    mX = in_rows(mX) if config.deep_boxes else mX
    mA, mB = (mS, mX) if config.sparse_on_m else (mX, mS)
    a_dtype, b_dtype = spec.mma_dtypes
    mmas = Mmas(
        make_warpgroup_mma(a_dtype, a_major, b_major, spec.wg_n, b_dtype=b_dtype),
        make_warpgroup_mma(a_dtype, a_major, b_major, spec.epilogue.epi_n, b_dtype=b_dtype),
    )
    a_tile, b_tile = (spec.tile_m, spec.kept_k), (spec.wg_n, spec.unit_k)
    slots = spec.stages * spec.units
    layouts = Layouts(
        staged_smem_layout(a_dtype, a_tile, spec.kept_stages or slots, a_major),
        staged_smem_layout(b_dtype, b_tile, slots * spec.shares_n, b_major),
        spec.epilogue.layout(),
    )
    a = tma.make_load_atom(mA, layouts.a, a_tile, 1 if spec.pairs else spec.cluster[1])
    b = tma.make_load_atom(mB, layouts.b, b_tile, 1 if spec.pairs else spec.cluster[0])
    shared = None
    if spec.pairs:
        x_layout, x_tile = (layouts.b, b_tile) if config.sparse_on_m else (layouts.a, a_tile)
        if spec.halves:
            x_tile = (spec.part_n, spec.unit_k)
            x_layout = first_part(x_layout, x_tile)
        shared = tma.make_load_atom(mX, x_layout, x_tile, 1 if spec.halves else PAIR, whole=spec.halves)
    store = tma.TmaCopy(None, mD)
    if spec.epilogue.use_tma:
        store = tma.make_store_atom(mD, layouts.d, spec.epilogue.subtile)

    panel = config.tile_x * config.cluster_x
    panel_bytes = cute.size(mX, mode=[1]) * cute.size(mX, mode=[2]) * (panel * a_dtype.width // 8)
    grid = ListGrid(
        cute.size(lists.table, mode=[0]) * spec.sub_clusters,
        cute.ceil_div(cute.size(mX, mode=[0]), panel),
        cute.size(mD, mode=[2]),
        cutlass.max(Int32(PANELS_BYTES) // panel_bytes, Int32(1)),
    )
    clusters = cutlass.max(cutlass.min(max_ctas // spec.cluster_size, grid.size), Int32(1))
    if spec.two_rings:
        clusters = full_rounds(grid.size, clusters)
    ends = ListEnds(cute.size(mS, mode=[2]), cute.size(mX, mode=[2]))
    pattern = Pattern(lists, memory, ends, (mD.shape[0], mD.shape[1], mD.shape[2]), scales)
    kernel = bsr_kernel(
        spec, epilogue, mmas, layouts, BsrLoads(a, b, shared), Output(*store, operands), pattern, grid
    )
    kernel.launch(
        grid=(spec.cluster[0], spec.cluster[1], clusters),
        block=(spec.threads, 1, 1),
        cluster=(*spec.cluster, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


def in_rows(mX: cute.Tensor) -> cute.Tensor:
    """mX (X, ...), contiguous along X, as ((ROW, X / ROW), ...): two modes, of which a TMA box has both."""
    extent, *shape = mX.shape
    _, *strides = mX.stride
    layout = cute.make_layout(((ROW, extent // ROW), *shape), stride=((1, ROW), *strides))
    return cute.make_tensor(mX.iterator, layout)


@cute.jit
def full_rounds(items: Int32, clusters: Int32) -> Int32:
    """As many clusters as make the rounds full: L2 feeds a few CTAs less just as fast."""
    even = cute.ceil_div(items, cute.ceil_div(items, clusters))
    return even if even * 16 >= clusters * 15 else clusters
