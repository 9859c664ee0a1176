"""Main loop of the SM80-class products: a cp.async multistage pipeline that feeds ldmatrix and mma.sync.

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

Where a K tile comes from is the loaders' business: `TileLoader` walks a dense operand, `ListLoader` follows
a list of kept blocks. A loader has `fetch(k_tile, stage, guard_k)`, which starts the copy of a tile, and
`put(stage)`, which completes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.epilogue.staged_store import StagedStorePlan, output_vector
from kernels_dsl.blocks.hw.cp_async import (
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
from kernels_dsl.config.gemm import Sm80GemmConfig

SMEM_ALIGN = 1024
"""Bytes: the period of the widest swizzle."""


@dataclass(frozen=True)
class OperandFacts:
    """What the plan needs to know of an operand: bytes of a vector load, and whether K is contiguous."""

    name: str
    copy_bytes: int
    k_major: bool


def operand_facts(mX: cute.Tensor, name: str, copy_bytes: int) -> OperandFacts:
    """The facts of an operand (MN, K, L); ValueError where it is not aligned to `copy_bytes`."""
    aligned = vector_alignment(mX)
    if copy_bytes > aligned:
        raise ValueError(f"copy_bytes is {copy_bytes} for {name}, aligned to {aligned} bytes only")
    # Where no mode is contiguous, either will do.
    return OperandFacts(name, copy_bytes, k_major=contiguous_mode(mX) != 0)


@dataclass(frozen=True)
class MultistagePlan:
    """Everything about an instance that is known at trace time."""

    config: Sm80GemmConfig
    dtype: type[cutlass.Numeric]
    b_dtype: type[cutlass.Numeric]  # as `dtype`, A's; e4m3 and e5m2 may differ
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
    """Check the configuration and derive the plan for A and B of `dtype` and D (M, N, L).

    `b_dtype`: B's where it is another. ValueError where the configuration cannot be.
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


def stages_of(smem: cute.Pointer, plan: MultistagePlan) -> tuple[cute.Tensor, cute.Tensor]:
    """All stages of A (bM, bK, stages) and of B (bN, bK, stages) in the CTA's shared memory."""
    sA = staged_operand(smem, plan.a, plan.config.stages, plan.dtype)
    sB = staged_operand(smem + plan.bytes_a, plan.b, plan.config.stages, plan.b_dtype)
    return sA, sB


@cute.jit
def accumulate(
    plan: cutlass.Constexpr,
    stages: tuple[cute.Tensor, cute.Tensor],
    loaders: tuple[Any, Any],
    k_range: tuple[Int32, Int32],
    tidx: Int32,
    promoted: Any = None,
):
    """Sum A @ B.T over the K tiles of `k_range`. Every thread of the CTA takes part.

    `promoted`: None, or the second level of sums (`PromotedSum` or `ListSum` of `promotion`), to which each
    K tile's are added.
    Returns the accumulator ((2, 2), MMA_M, MMA_N) and the tiled MMA. Afterwards the stages are free.
    """
    config = const_expr(plan.config)
    prologue(*loaders, *k_range, config.stages)
    tiled_mma = plan.tiled_mma()
    a = make_fragments_a(tiled_mma, stages[0], plan.a.k_major, tidx)
    b = make_fragments_b(tiled_mma, stages[1], plan.b.k_major, tidx)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    acc.fill(0.0)  # ((2, 2), MMA_M, MMA_N)
    mainloop(tiled_mma, acc, (a, b), loaders, k_range, config.stages, promoted)
    # Copies and fragment reads of the last tiles are still under way in the buffers that the epilogue reuses.
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    return (acc if const_expr(promoted is None) else promoted.total), tiled_mma


def staged_operand(
    smem: cute.Pointer, plan: TileLoadPlan, stages: int, dtype: type[cutlass.Numeric]
) -> cute.Tensor:
    """The operand's stages (MN, K, stages) in swizzled shared memory."""
    swizzle = cute.make_swizzle(*swizzle_of(dtype, plan.tile, plan.k_major))
    ptr = cute.recast_ptr(smem.align(SMEM_ALIGN), swizzle, dtype=fragment_dtype(dtype))
    return cute.make_tensor(ptr, staged_tile_layout(dtype, plan.tile, stages, plan.k_major))


@cute.jit
def prologue(load_a: Any, load_b: Any, k_first: Int32, k_last: Int32, stages: cutlass.Constexpr) -> None:
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
    loaders: tuple[Any, Any],
    k_range: tuple[Int32, Int32],
    stages: cutlass.Constexpr,
    promoted: Any = None,
) -> None:
    """acc = sum over K tiles of A @ B.T; timeline in the module's docstring.

    With `promoted` acc is the sum of one of `promoted.parts` of a K tile, added to promoted.total after each.
    """
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
        if const_expr(promoted is not None):
            promoted.fetch(k_tile - 1 if k_tile > k_range[0] else k_range[1] - 1)
        for block in range_constexpr(k_blocks):
            if const_expr(promoted is not None and block % (k_blocks // promoted.parts) == 0):
                acc.fill(0.0)
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
            if const_expr(promoted is not None and (block + 1) % (k_blocks // promoted.parts) == 0):
                promoted.add(acc, block * promoted.parts // k_blocks)
        if ahead < k_range[1]:
            for load in loaders:
                load.put(write)
        write = write + 1 if write + 1 < stages else Int32(0)
