"""Skeleton and main loop of the SM80-class products: a cp.async pipeline that feeds ldmatrix and mma.sync.

A kernel decodes its tile and calls `product` with its `Load` (the loaders of A and B and their K tiles) and
its `Finish` (where the tile goes). Loaders differ in where a K tile comes from: `TileLoader` walks a dense
operand, `ListLoader` follows a list of kept blocks, `GatherLoader` gathers rows.

Pipeline: `stages` buffers of a K tile of A and of B. While K tile t is multiplied, tiles t + 1 to
t + stages - 1 are on their way from global memory. Within a K tile, fragments of K block b + 1 are read
while block b is multiplied; the last block reads the first fragments of the next tile.

    iteration t   block 0: read 1 | start copy of tile t + stages - 1 | multiply 0
                  ...
                  last block: wait for tile t + 1, barrier | read 0 of tile t + 1 | multiply last

One barrier an iteration serves both hazards: it makes all threads' copies of tile t + 1 visible, and it
orders the last reads of tile t before iteration t + 1 overwrites its buffer.

Only the last K tile of a range may be ragged. It is visited first, in the prologue, so that copies in the
main loop need no test of K. The float32 sums are therefore in ascending K, rotated by one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.epilogue.staged_store import OutputTile, StagedStorePlan, output_vector, store_tile
from kernels_dsl.blocks.hw.cp_async import (
    Loader,
    TileLoadPlan,
    contiguous_mode,
    staged_tile_layout,
    swizzle_of,
    vector_alignment,
)
from kernels_dsl.blocks.hw.mma_sync import (
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
from kernels_dsl.blocks.mainloop.promotion import ListSum, PromotedSum
from kernels_dsl.config.gemm import Sm80GemmConfig

SMEM_ALIGN = 1024
"""Bytes: the period of the widest swizzle."""


@dataclass(frozen=True)
class OperandFacts:
    """Facts of an operand for the plan: its name in errors, bytes of a vector load, the contiguous mode."""

    name: str
    copy_bytes: int
    k_major: bool


def operand_facts(mX: cute.Tensor, name: str, copy_bytes: int) -> OperandFacts:
    """The facts of an operand (MN, K, L); ValueError where it is not aligned to `copy_bytes`."""
    aligned = vector_alignment(mX)
    if copy_bytes > aligned:
        raise ValueError(f"copy_bytes is {copy_bytes} for {name}, aligned to {aligned} bytes only")
    # Either will do if no mode is contiguous.
    return OperandFacts(name, copy_bytes, k_major=contiguous_mode(mX) != 0)


@dataclass(frozen=True)
class MultistagePlan:
    """Trace-time facts of an instance of the pipeline."""

    config: Sm80GemmConfig
    dtype: type[cutlass.Numeric]
    b_dtype: type[cutlass.Numeric]  # differs from A's only among e4m3 and e5m2
    a: TileLoadPlan
    b: TileLoadPlan
    store: StagedStorePlan

    @property
    def bytes_a(self) -> int:
        """Bytes of all stages of A; B's follow."""
        return self.config.tile_m * self.config.tile_k * self.config.stages * self.element_bytes

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A or B."""
        return self.dtype.width // 8

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.config.smem_bytes(self.element_bytes)

    @property
    def tile(self) -> tuple[int, int, int]:
        """(M, N, K) elements of a CTA's tile."""
        return self.config.tile_m, self.config.tile_n, self.config.tile_k

    def tiled_mma(self) -> cute.TiledMma:
        """The matrix instruction over the CTA's warps."""
        return make_tiled_mma(self.dtype, self.config.warps_m, self.config.warps_n, self.b_dtype)


def make_multistage_plan(
    config: Sm80GemmConfig,
    dtype: type[cutlass.Numeric],
    operands: tuple[OperandFacts, OperandFacts],
    mD: cute.Tensor,
    b_dtype: type[cutlass.Numeric] | None = None,
) -> MultistagePlan:
    """Checks the configuration and derives the plan for A and B of `dtype` and D (M, N, L).

    `b_dtype`: B's, if it differs. ValueError for a configuration that does not fit.
    """
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
    a, b = (
        TileLoadPlan((extent, config.tile_k), config.threads, element, facts.copy_bytes, facts.k_major)
        for facts, extent in zip(operands, (config.tile_m, config.tile_n))
    )
    per_thread = MMA_M * config.warps_m * config.tile_n // config.threads  # elements of a slab
    vector = output_vector(mD, per_thread)
    slabs = config.staging_slabs(element)
    store = StagedStorePlan(config.tile_n, config.warps_m, config.threads, vector, slabs)
    return MultistagePlan(config, dtype, b_dtype or dtype, a, b, store)


class OperandTiles(NamedTuple):
    """All stages of both operands in shared memory."""

    a: cute.Tensor  # (bM, bK, stages)
    b: cute.Tensor  # (bN, bK, stages)


class KRange(NamedTuple):
    """K tiles [begin, end) of a CTA."""

    begin: Int32
    end: Int32


class Loads(NamedTuple):
    """The copies of both operands, and the K tiles that they bring."""

    a: Loader
    b: Loader
    k_range: KRange


class StagedOperand(NamedTuple):
    """One operand in the main loop: where its fragments come from, and what refills its stages."""

    fragments: Fragments
    loader: Loader


Load = Callable[[OperandTiles], Loads]
"""Makes the copies that fill a CTA's stages."""
Promote = Callable[[], PromotedSum | ListSum | None]
"""Makes the second level of sums, zeroed; None: the matrix unit's own sums over all of K."""
Finish = Callable[[], OutputTile]
"""Makes the description of where the tile goes, after the main loop."""


def launch(kernel, plan: MultistagePlan, grid: list[Int32], stream) -> None:
    """Launch a call of a kernel that runs `product`."""
    kernel.launch(
        grid=grid,
        block=[plan.config.threads, 1, 1],
        smem=plan.smem_bytes,
        stream=stream,
        # Without an occupancy, ptxas spills a register or two to stay under 168, 128 or 80 of them.
        min_blocks_per_mp=1,
    )


@cute.jit
def product(
    plan: cutlass.Constexpr,
    load: cutlass.Constexpr[Load],
    finish: cutlass.Constexpr[Finish],
    tidx: Int32,
    promote: cutlass.Constexpr[Promote | None] = None,
):
    """Skeleton of a CTA's work on one tile: load, multiply, store. Every thread of the CTA takes part."""
    smem = cutlass.memory.SmemAllocator().allocate(plan.smem_bytes, byte_alignment=SMEM_ALIGN)
    tiles = OperandTiles(
        staged_operand(smem, plan.a, plan.config.stages, plan.dtype),
        staged_operand(smem + plan.bytes_a, plan.b, plan.config.stages, plan.b_dtype),
    )
    loads = load(tiles)
    promoted = promote() if const_expr(promote is not None) else None
    tiled_mma = plan.tiled_mma()
    acc = accumulate(plan, tiles, loads, tiled_mma, tidx, promoted)
    store_tile(acc, tiled_mma, cute.recast_ptr(smem, dtype=Float32), finish(), plan.store, tidx)


@cute.jit
def accumulate(
    plan: cutlass.Constexpr,
    tiles: OperandTiles,
    loads: Loads,
    tiled_mma: cute.TiledMma,
    tidx: Int32,
    promoted: PromotedSum | ListSum | None,
) -> cute.Tensor:
    """Sums A @ B.T over the K tiles of `loads`: accumulators ((2, 2), MMA_M, MMA_N). Frees the stages.

    `promoted`: None, or the second level of sums, to which each K tile's are added.
    """
    config = const_expr(plan.config)
    prologue(loads, config.stages)
    a = StagedOperand(make_fragments_a(tiled_mma, tiles.a, plan.a.k_major, tidx), loads.a)
    b = StagedOperand(make_fragments_b(tiled_mma, tiles.b, plan.b.k_major, tidx), loads.b)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    acc.fill(0.0)  # ((2, 2), MMA_M, MMA_N)
    mainloop(tiled_mma, acc, a, b, loads.k_range, config.stages, promoted)
    # Copies and fragment reads of the last tiles are still under way in the buffers that the epilogue reuses.
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    return acc if const_expr(promoted is None) else promoted.total


def staged_operand(
    smem: cute.Pointer, plan: TileLoadPlan, stages: int, dtype: type[cutlass.Numeric]
) -> cute.Tensor:
    """An operand's stages (MN, K, stages) in swizzled shared memory."""
    swizzle = cute.make_swizzle(*swizzle_of(dtype, plan.tile, plan.k_major))
    ptr = cute.recast_ptr(smem.align(SMEM_ALIGN), swizzle, dtype=fragment_dtype(dtype))
    return cute.make_tensor(ptr, staged_tile_layout(dtype, plan.tile, stages, plan.k_major))


@cute.jit
def prologue(loads: Loads, stages: cutlass.Constexpr) -> None:
    """Starts the copies of the first stages - 1 tiles to visit: the last, then those from the first on."""
    begin, end = loads.k_range
    if begin < end:
        for loader in (loads.a, loads.b):
            loader.fetch(end - 1, Int32(0), True)
            loader.put(Int32(0))
    cute.arch.cp_async_commit_group()
    for s in cutlass.range(1, stages - 1, unroll=1):
        if begin + s < end:
            for loader in (loads.a, loads.b):
                loader.fetch(begin + s - 1, s, False)
                loader.put(s)
        cute.arch.cp_async_commit_group()


@cute.jit
def mainloop(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: StagedOperand,
    b: StagedOperand,
    k_range: KRange,
    stages: cutlass.Constexpr,
    promoted: PromotedSum | ListSum | None,
) -> None:
    """Sums A @ B.T over K tiles in acc; see the timeline in the module's docstring.

    With `promoted`, acc is the sum of one of the `promoted.parts` of a K tile, added to promoted.total.
    """
    begin, end = k_range
    k_blocks = cute.size(a.fragments.tCrX, mode=[2])
    read, write = Int32(0), Int32(stages - 1)
    cute.arch.cp_async_wait_group(stages - 2)
    cute.arch.sync_threads()
    if begin < end:
        for operand in (a, b):
            operand.fragments.load(0, read)
    for k_tile in cutlass.range(begin, end, unroll=1):
        ahead = k_tile + stages - 1
        if const_expr(promoted is not None):
            promoted.fetch(k_tile - 1 if k_tile > begin else end - 1)
        for block in range_constexpr(k_blocks):
            if const_expr(promoted is not None and block % (k_blocks // promoted.parts) == 0):
                acc.fill(0.0)
            if const_expr(block == k_blocks - 1):
                # After the last tile there is no next one: its own fragments are read again, and not used.
                if k_tile + 1 < end:
                    read = read + 1 if read + 1 < stages else Int32(0)
                cute.arch.cp_async_wait_group(stages - 2)
                cute.arch.sync_threads()
            for operand in (a, b):
                operand.fragments.load((block + 1) % k_blocks, read)
            if const_expr(block == 0):
                if ahead < end:
                    for operand in (a, b):
                        operand.loader.fetch(ahead - 1, write, False)
                cute.arch.cp_async_commit_group()
            mma_k_block(tiled_mma, acc, a.fragments, b.fragments, block)
            if const_expr(promoted is not None and (block + 1) % (k_blocks // promoted.parts) == 0):
                promoted.add(acc, block * promoted.parts // k_blocks)
        if ahead < end:
            for operand in (a, b):
                operand.loader.put(write)
        write = write + 1 if write + 1 < stages else Int32(0)
