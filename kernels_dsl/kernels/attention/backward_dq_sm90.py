"""dQ of attention for Hopper by tiles of queries: TMA, WGMMA, warp-specialised. No sums between CTAs.

A CTA keeps Q and dO of a query tile and walks the key blocks that it sees, as the forward pass does. A
producer warp issues the TMA loads; each consumer warpgroup has 64 queries and dQ of them in registers.

A step of a consumer, for key block j; products are WGMMA:

    tensor cores | dQ += dS(j-1) K(j-1), S = Q K^T | dP = dO V^T    | (the other warpgroup)
    registers    |                                 | P = exp2(S - lse) | dS = P (dP - row sum)

S and dP are computed a second time, beside `backward_sm90` for dK and dV alone: seven products in place of
five. In return dQ is written once, in its dtype, and no CTA waits for another: the same bits in any order.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from kernels_dsl.blocks.attention.kv_blocks import KeyLists, Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.seqlen import SeqLens
from kernels_dsl.blocks.attention.tile_queue import work_tile
from kernels_dsl.blocks.attention.work import LAYOUTS, AttentionArguments, Work, describe_work, rows_first
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.layouts import staged_smem_layout
from kernels_dsl.blocks.hw.pipeline import make_tma_ring, sync_after_init
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma

from .backward_dq_sm90_consumer import Mmas, RowNumbers, Shared, consume
from .backward_dq_sm90_producer import SharedTiles, produce
from .backward_dq_sm90_spec import DqSpec, make_spec
from .backward_sm90 import make_output
from .backward_sm90_outputs import Output
from .backward_sm90_producer import Loads, Rings
from .backward_work import row_tiles


class SmemLayouts(NamedTuple):
    """Layouts of the tiles in shared memory; `staging` is that of one warpgroup's output."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    do: cute.ComposedLayout
    staging: cute.ComposedLayout


@cute.jit
def attention_dq_sm90(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    do: cute.Tensor,
    dq: cute.Tensor,
    lse: cute.Tensor,  # float32, see `backward_work.Sums`
    row_sums: cute.Tensor,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple[cute.Tensor, cute.Tensor, cute.Tensor | None] | None,  # `SeqLens`
    max_q: Int32,
    lists: tuple[cute.Tensor | None, ...] | None,  # `KeyLists`
    mask: cute.Tensor | None,
    aux: tuple[cute.Tensor, ...] | None,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    config: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    row_tile: cutlass.Constexpr,  # query rows whose log-sum-exp lie together
):
    """Launches the kernel. q, k, v, do, dq: `layout` is a key of `LAYOUTS`."""
    mQ, mK, mV, mdO, mdQ = (rows_first(t, LAYOUTS[layout]) for t in (q, k, v, do, dq))
    spec = make_spec(config, variant, mQ.element_type, seqlens is not None, row_tile)
    mmas, layouts = make_mmas(spec), make_layouts(spec)
    loads = Loads(
        tma.make_load_atom(mQ, layouts.q, (spec.tile_m, spec.dim)),
        tma.make_load_atom(mK, layouts.k, (spec.tile_n, spec.dim)),
        tma.make_load_atom(mV, layouts.v, (spec.tile_n, spec.dim_v)),
        tma.make_load_atom(mdO, layouts.do, (spec.tile_m, spec.dim_v)),
    )
    arguments = AttentionArguments(
        None, ScoreOperands(scale, softcap, mask, aux), Window(left, right),
        None if seqlens is None else SeqLens(*seqlens), max_q,
        None if lists is None else KeyLists(*lists), None,
    )  # fmt: skip
    work = describe_work(spec, arguments, mQ, mK, cute.size(mdQ, mode=[1]))
    rows, heads = Int32(mQ.shape[0]), Int32(mQ.shape[2])
    tiles = row_tiles(rows, heads, work.tiles.batch, spec.row_tile, spec.varlen)
    output = make_output(spec.epilogue, mdQ, layouts.staging)
    numbers = RowNumbers(lse, row_sums, tiles)
    dq_kernel(spec, mmas, layouts, loads, output, work, numbers).launch(
        grid=(work.tiles.size, 1, 1),
        block=(spec.threads, 1, 1),
        min_blocks_per_mp=spec.ctas_per_sm,
        preferred_smem_carveout=None if spec.ctas_per_sm == 1 else 100,  # in percent
        stream=stream,
    )


def make_mmas(spec: DqSpec) -> Mmas:
    """The products of one warpgroup."""
    major, source = OperandMajorMode, warpgroup.OperandSource
    return Mmas(
        s=make_warpgroup_mma(spec.dtype, major.K, major.K, spec.tile_n),
        dq=make_warpgroup_mma(spec.dtype, major.K, major.MN, spec.dim, source.RMEM),
        out=make_warpgroup_mma(spec.dtype, major.K, major.K, spec.epilogue.epi_n),
    )


def make_layouts(spec: DqSpec) -> SmemLayouts:
    """Layouts of the tiles in shared memory, as TMA writes and WGMMA reads them."""
    major = OperandMajorMode
    return SmemLayouts(
        q=staged_smem_layout(spec.dtype, (spec.tile_m, spec.dim), 1, major.K),
        k=staged_smem_layout(spec.dtype, (spec.tile_n, spec.dim), spec.k_stages, major.K),
        v=staged_smem_layout(spec.dtype, (spec.tile_n, spec.dim_v), spec.v_stages, major.K),
        do=staged_smem_layout(spec.dtype, (spec.tile_m, spec.dim_v), 1, major.K),
        staging=spec.epilogue.layout(),
    )


@entry_name("attention_dq_sm90")
@cute.kernel
def dq_kernel(
    spec: cutlass.Constexpr,
    mmas: Mmas,
    layouts: SmemLayouts,
    loads: Loads,
    output: Output,
    work: Work,
    numbers: RowNumbers,
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for load in loads:
            cpasync.prefetch_descriptor(load.atom)
    barriers, tiles = allocate(spec, layouts)
    rings = make_rings(spec, barriers)
    sync_after_init((1, 1))
    tile = work_tile(spec, work, Int32(cute.arch.block_idx()[0]))
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers.producer)
        if warp == spec.consumers * 4 and spec.has_rows(tile.at, tile.seq):
            produce(spec, rings, loads, tiles, work, tile)
    else:
        cute.arch.setmaxregister_increase(spec.registers.consumer)
        if spec.has_rows(tile.at, tile.seq):
            consume(spec, Shared(rings, tiles, mmas), output, work, numbers, tile, group)


def make_rings(spec: DqSpec, barriers: cute.Pointer) -> Rings:
    """Initialises the mbarriers of all rings. The caller syncs."""
    warps = spec.consumers * 4

    def ring(stages: int, rows: int, columns: int):
        nonlocal barriers
        made = make_tma_ring(barriers, stages, spec.bytes_of(rows, columns), warps, (1, 1))
        barriers += 2 * stages
        return made

    return Rings(
        q=ring(1, spec.tile_m, spec.dim),
        k=ring(spec.k_stages, spec.tile_n, spec.dim),
        v=ring(spec.v_stages, spec.tile_n, spec.dim_v),
        do=ring(1, spec.tile_m, spec.dim_v),
    )


def allocate(spec: cutlass.Constexpr, layouts: SmemLayouts) -> tuple[cute.Pointer, SharedTiles]:
    """mbarriers and tiles."""
    words = 2 * (2 + spec.k_stages + spec.v_stages)
    threads = (WARPGROUP_THREADS, spec.consumers)

    @cute.struct
    class SharedStorage:
        barriers: cute.struct.MemRange[cutlass.Int64, words]
        scratch: cute.struct.MemRange[Float32, threads[0] * threads[1]]
        q: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.q)], 1024]
        k: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.v)], 1024]
        do: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.do)], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
    out = layouts.staging
    staging = cute.append(out.outer, cute.make_layout(spec.consumers, stride=cute.cosize(out)))
    tiles = SharedTiles(
        q=storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
        k=storage.k.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
        v=storage.v.get_tensor(layouts.v.outer, swizzle=layouts.v.inner),
        do=storage.do.get_tensor(layouts.do.outer, swizzle=layouts.do.inner),
        scratch=storage.scratch.get_tensor(cute.make_layout(threads)),
        staging=storage.q.get_tensor(staging, swizzle=out.inner),
    )
    return storage.barriers.data_ptr(), tiles
