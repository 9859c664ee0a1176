"""Dense GEMM for SM80-class GPUs: cp.async multistage pipeline, ldmatrix, mma.sync.

One CTA computes one (tile_m, tile_n) tile of D = epilogue(A @ B.T); all its warps play the same role.

Pipeline: `stages` buffers of a K tile of A and of B. While K tile t is multiplied, tiles t + 1 ..
t + stages - 1 are on their way from global memory. Within a K tile, fragments of K block b + 1 are read
while block b is multiplied; the last block reads the first fragments of the next tile.

    iteration t   block 0: read 1 | start copy of tile t + stages - 1 | multiply 0
                  ...
                  last block: wait for tile t + 1, barrier | read 0 of tile t + 1 | multiply last

The one barrier an iteration serves both hazards. It makes everyone's copies of tile t + 1 visible, and
it tells that all warps have read the last fragments of tile t, whose buffer iteration t + 1 overwrites.

The K tile that may be ragged is the last of its range; it is visited first, in the prologue, so that the
main loop's copies need no test of K. float32 sums in another order than ascending K: by one rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from kernels_dsl.blocks.cp_async import (
    TileLoader,
    TileLoadPlan,
    contiguous_mode,
    make_tile_loader,
    staged_tile_layout,
    swizzle_of,
    vector_alignment,
)
from kernels_dsl.blocks.entry_name import entry_name
from kernels_dsl.blocks.mma_sync import (
    MMA_M,
    MMA_N,
    Fragments,
    fragment_dtype,
    make_fragments_a,
    make_fragments_b,
    make_tiled_mma,
    mma_k,
    mma_k_block,
)
from kernels_dsl.blocks.scheduler import TileGrid, decode_tile, split_range
from kernels_dsl.blocks.staged_store import OutputTile, StagedStorePlan, output_vector, store_tile
from kernels_dsl.config.gemm import Sm80GemmConfig

SMEM_ALIGN = 1024
"""Bytes: the period of the widest swizzle."""


@dataclass(frozen=True)
class GemmPlan:
    """Everything about an instance that is known at trace time."""

    config: Sm80GemmConfig
    dtype: type[cutlass.Numeric]
    a: TileLoadPlan
    b: TileLoadPlan
    store: StagedStorePlan

    @property
    def bytes_a(self) -> int:
        """Shared memory of all stages of A; B's follow."""
        return self.config.tile_m * self.config.tile_k * self.config.stages * self.element_bytes

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A or B."""
        return self.dtype.width // 8

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.config.smem_bytes(self.element_bytes)


def make_plan(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, config: Sm80GemmConfig) -> GemmPlan:
    """Check the configuration against the tensors' types and derive the plan; ValueError if it cannot be."""
    dtype = mA.element_type
    if mB.element_type is not dtype:
        raise ValueError(f"A is {dtype} and B is {mB.element_type}; they must have one dtype")
    if config.stages < 3:
        raise ValueError(f"stages is {config.stages}; it must be 3 at least")
    steps = (
        ("tile_m", config.tile_m, MMA_M * config.warps_m),
        ("tile_n", config.tile_n, MMA_N * config.warps_n),
        ("tile_k", config.tile_k, 2 * mma_k(dtype)),
    )
    for name, extent, step in steps:
        if extent <= 0 or extent % step:
            raise ValueError(f"{name} is {extent}; it must be a multiple of {step} for {config}")
    element = dtype.width // 8

    def load_plan(mX: cute.Tensor, name: str, tile_mn: int, copy_bytes: int) -> TileLoadPlan:
        aligned = vector_alignment(mX)
        if copy_bytes > aligned:
            raise ValueError(f"copy_bytes is {copy_bytes} for {name}, aligned to {aligned} bytes only")
        k_major = contiguous_mode(mX) != 0  # where no mode is contiguous, either will do
        return TileLoadPlan((tile_mn, config.tile_k), config.threads, element, copy_bytes, k_major)

    per_thread = MMA_M * config.warps_m * config.tile_n // config.threads  # elements of a slab
    store = StagedStorePlan(
        config.tile_n,
        config.warps_m,
        config.threads,
        output_vector(mD, per_thread),
        config.staging_slabs(element),
    )
    return GemmPlan(
        config,
        dtype,
        load_plan(mA, "A", config.tile_m, config.copy_bytes_a),
        load_plan(mB, "B", config.tile_n, config.copy_bytes_b),
        store,
    )


def gemm_sm80(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    operands: tuple,
    max_ctas: Int32,
    stream,
    config: cutlass.Constexpr[Sm80GemmConfig],
    epilogue: cutlass.Constexpr,
):
    """Launch D[:, :, l] = epilogue(A[:, :, l] @ B[:, :, l].T, *operands[:, :, l]).

    mA (M, K, L), mB (N, K, L) bf16, fp16 or float32 (taken as tf32), any strides, L's possibly 0; vectors
    of config.copy_bytes_a and _b need a contiguous mode with that alignment, single elements do not.
    mD (M, N, L) bf16, fp16 or float32. `operands` as in `kernels_dsl.blocks.epilogue_operands`. With
    config.split_k > 1, mD is the float32 workspace (M, N, L * split_k) that `splitk_reduce` sums.
    `max_ctas` is not used: one CTA a tile.
    ValueError while tracing where the configuration does not fit the tensors.
    """
    plan = make_plan(mA, mB, mD, config)
    grid = TileGrid(
        cute.ceil_div(mD.shape[0], config.tile_m),
        cute.ceil_div(mD.shape[1], config.tile_n),
        mD.shape[2] // config.split_k,
        config.split_k,
    )
    gemm_sm80_kernel(mA, mB, mD, operands, grid, plan, epilogue).launch(
        grid=[grid.size, 1, 1],
        block=[config.threads, 1, 1],
        smem=plan.smem_bytes,
        stream=stream,
        # Without a word on occupancy, ptxas spills a register or two to stay under 168, 128 or 80 of them.
        min_blocks_per_mp=1,
    )


@entry_name("gemm_sm80")
@cute.kernel
def gemm_sm80_kernel(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    operands: tuple,
    grid: TileGrid,
    plan: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
):
    """Device side of `gemm_sm80`."""
    config = plan.config
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    tile = decode_tile(bidx, grid, config.raster_group, True)
    k_first, k_last = split_range(cute.ceil_div(mA.shape[1], config.tile_k), tile.split, config.split_k)

    smem = cutlass.memory.SmemAllocator().allocate(plan.smem_bytes, byte_alignment=SMEM_ALIGN)
    sA = staged_operand(smem, plan.a, config.stages, plan.dtype)  # (bM, bK, stages)
    sB = staged_operand(smem + plan.bytes_a, plan.b, config.stages, plan.dtype)  # (bN, bK, stages)
    load_a = tile_loader(mA, sA, plan.a, tile.m, tile.batch, tidx)
    load_b = tile_loader(mB, sB, plan.b, tile.n, tile.batch, tidx)
    prologue(load_a, load_b, k_first, k_last, config.stages)

    tiled_mma = make_tiled_mma(plan.dtype, config.warps_m, config.warps_n)
    a = make_fragments_a(tiled_mma, sA, plan.a.k_major, tidx)
    b = make_fragments_b(tiled_mma, sB, plan.b.k_major, tidx)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    acc.fill(0.0)  # ((2, 2), MMA_M, MMA_N)
    mainloop(tiled_mma, acc, (a, b), (load_a, load_b), (k_first, k_last), config.stages)

    # Copies and fragment reads of the last tiles are still under way in the buffers reused here.
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    coord = (tile.m, tile.n, tile.batch * config.split_k + tile.split)
    out = OutputTile(mD, coord, (config.tile_m, config.tile_n), operands, epilogue)
    store_tile(acc, tiled_mma, cute.recast_ptr(smem, dtype=Float32), out, plan.store, tidx)


def staged_operand(
    smem: cute.Pointer, plan: TileLoadPlan, stages: int, dtype: type[cutlass.Numeric]
) -> cute.Tensor:
    """The operand's stages (MN, K, stages) in swizzled shared memory."""
    swizzle = cute.make_swizzle(*swizzle_of(dtype, plan.tile, plan.k_major))
    ptr = cute.recast_ptr(smem.align(SMEM_ALIGN), swizzle, dtype=fragment_dtype(dtype))
    return cute.make_tensor(ptr, staged_tile_layout(dtype, plan.tile, stages, plan.k_major))


def tile_loader(
    mX: cute.Tensor, sX: cute.Tensor, plan: TileLoadPlan, tile_mn: Int32, batch: Int32, tidx: Int32
) -> TileLoader:
    """The loader of row tile `tile_mn` of batch `batch` of an operand mX (MN, K, L)."""
    extent = (mX.shape[0], mX.shape[1])
    gX = cute.local_tile(mX[None, None, batch], plan.tile, (tile_mn, None))  # (bMN, bK, k_tiles)
    cX = cute.local_tile(cute.make_identity_tensor(extent), plan.tile, (tile_mn, 0))  # (bMN, bK)
    return make_tile_loader(plan, gX, sX, cX, extent, tidx)


@cute.jit
def prologue(
    load_a: TileLoader, load_b: TileLoader, k_first: Int32, k_last: Int32, stages: cutlass.Constexpr
) -> None:
    """Start the copies of the first stages - 1 tiles to visit: the last one, then the first ones."""
    if k_first < k_last:
        for load in (load_a, load_b):
            load.fetch(k_last - 1, Int32(0), True)
            load.put(Int32(0))
    cute.arch.cp_async_commit_group()
    for s in cutlass.range(1, stages - 1, unroll=1):
        if k_first + s < k_last:
            for load in (load_a, load_b):
                load.fetch(k_first + s - 1, s, False)
                load.put(s)
        cute.arch.cp_async_commit_group()


@cute.jit
def mainloop(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    fragments: tuple[Fragments, Fragments],
    loaders: tuple[TileLoader, TileLoader],
    k_range: tuple[Int32, Int32],
    stages: cutlass.Constexpr,
) -> None:
    """acc = sum over K tiles of A @ B.T; timeline in the module's docstring."""
    a, b = fragments
    k_blocks = cute.size(a.tCrX, mode=[2])
    read, write = Int32(0), Int32(stages - 1)
    cute.arch.cp_async_wait_group(stages - 2)
    cute.arch.sync_threads()
    if k_range[0] < k_range[1]:
        a.load(0, read)
        b.load(0, read)
    for k_tile in cutlass.range(k_range[0], k_range[1], unroll=1):
        ahead = k_tile + stages - 1
        for block in range_constexpr(k_blocks):
            if cutlass.const_expr(block == k_blocks - 1):
                # After the last tile there is no next one: its own fragments are read again, and not used.
                if k_tile + 1 < k_range[1]:
                    read = read + 1 if read + 1 < stages else Int32(0)
                cute.arch.cp_async_wait_group(stages - 2)
                cute.arch.sync_threads()
            a.load((block + 1) % k_blocks, read)
            b.load((block + 1) % k_blocks, read)
            if cutlass.const_expr(block == 0):
                if ahead < k_range[1]:
                    for load in loaders:
                        load.fetch(ahead - 1, write, False)
                cute.arch.cp_async_commit_group()
            mma_k_block(tiled_mma, acc, a, b, block)
        if ahead < k_range[1]:
            for load in loaders:
                load.put(write)
        write = write + 1 if write + 1 < stages else Int32(0)
