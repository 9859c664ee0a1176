"""Step 7: the ring feeds the tensor cores. A warp-specialised GEMM.

    python tutorials/07_gemm_warp_specialized.py

Adds:      two consumer warpgroups on one tile, WGMMAs in flight across stages, budgets.
Reuses:    steps 3 and 4 (ring, roles: `kernels_dsl.blocks.hw.pipeline`), 5 (WGMMA), 6's store.
Measures:  against step 6 and cuBLAS; stages and tiles.

WHY
Step 6 loads, waits, multiplies, waits. Steps 3 and 4 know how loads run ahead, and step 5 that WGMMA is
asynchronous too. Together:

    producer (warp 8)      | load 0 | load 1 | load 2 | load 3 | wait empty 0 | load 4 | ...
    consumer 0 (warps 0-3)          | wgmma 0 | wgmma 1 | wgmma 2 | ...    rows 0 ... 63 of the tile
    consumer 1 (warps 4-7)          | wgmma 0 | wgmma 1 | wgmma 2 | ...    rows 64 ... 127

Two consumer warpgroups share a tile of 128 x 256: each has 64 rows, so both read all of B's stage and half
of A's. A 64 x 256 accumulator is 128 registers of each of 128 threads; one warpgroup with the whole tile
would need 256, and a thread may have 255 at most.

*In flight.* A consumer issues the WGMMAs of tile k, and only then waits for those of tile k - 1, so that the
tensor cores always have the next ones queued. Tile k - 1's stage is released then, one tile late:

    wait full k | issue k | wait until k - 1 is done | release k - 1 | wait full k + 1 | issue k + 1 | ...

*Budgets.* What one CTA may have decides what a tile can be; a CTA that takes all of it has its SM to itself:

    registers      65536 an SM: 128 producers x 24 + 256 consumers x 240
    shared memory  227 KB: stages x (bM + bN) x bK x 2 bytes; 128 x 256 x 64 is 48 KB a stage, so 4 stages

The body of the kernel hands out roles; each role is a function that fits on a screen. Without a GPU this
script draws what the emulator saw: L loads, W WGMMAs, '.' a warp that waits.
"""

from dataclasses import dataclass
from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import major_mode, staged_smem_layout
from kernels_dsl.blocks.hw.pipeline import consumer_state, make_tma_ring, producer_state, sync_after_init
from kernels_dsl.blocks.hw.wgmma import issue_k_tile, make_warpgroup_mma
from lowering import jit

step6 = common.load("06_gemm_simple")
WARPGROUP = 128
CONSUMERS = 2  # warpgroups; the producer's is the third


@dataclass(frozen=True)
class Tile:
    """bM x bN x bK and the number of stages. A frozen dataclass of constants can be a Constexpr."""

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(
                f"stages is {self.stages}, must be at least 2: a stage is released one tile late"
            )

    @property
    def stage_bytes(self) -> int:
        return (self.m + self.n) * self.k * 2

    @property
    def label(self) -> str:
        return f"{self.m}×{self.n}×{self.k}, {self.stages} stages"


# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(
    tiled_mma: cute.TiledMma,
    loads: tuple,  # (atom of A, coordinates of A (M, K), the same of B (N, K))
    layouts: tuple,  # swizzled (bM, bK, stages) and (bN, bK, stages)
    mD: cute.Tensor,  # (M, N)
    k_tiles: Int32,
    tile: cutlass.Constexpr,
):
    """Three warpgroups, one tile of D."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    barriers, sA, sB = allocate(layouts, tile)
    ring = make_tma_ring(barriers, tile.stages, tile.stage_bytes, CONSUMERS * 4, (1, 1))
    sync_after_init((1, 1))
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == CONSUMERS:
        cute.arch.setmaxregister_decrease(24)
        if warp == CONSUMERS * 4:
            produce(ring, loads, (sA, sB), k_tiles, tile)
    else:
        cute.arch.setmaxregister_increase(240)
        consume(ring, tiled_mma, (sA, sB), mD, k_tiles, tile, group)


def allocate(layouts: tuple, tile: Tile) -> tuple:
    """In shared memory: the ring's barriers, A (bM, bK, stages), B (bN, bK, stages); more in later steps."""
    smem = cutlass.memory.SmemAllocator()
    barriers = smem.allocate_array(cutlass.Int64, 2 * tile.stages)
    return barriers, *(
        smem.allocate_tensor(cutlass.BFloat16, x.outer, byte_alignment=1024, swizzle=x.inner) for x in layouts
    )


@cute.jit
def produce(ring, loads: tuple, s_tiles: tuple, k_tiles: Int32, tile: cutlass.Constexpr):
    """One warp loads the K tiles of A and B. Both announce to the same barrier: one stage, two loads."""
    load_a, tma_a, load_b, tma_b = loads
    n, m, _ = cute.arch.block_idx()
    gA = cute.local_tile(tma_a, (tile.m, tile.k), (m, None))  # (bM, bK, k_tiles)
    gB = cute.local_tile(tma_b, (tile.n, tile.k), (n, None))  # (bN, bK, k_tiles)
    tAsA, tAgA = tma.load_partition(load_a, gA, s_tiles[0], cute.make_layout(1), Int32(0))
    tBsB, tBgB = tma.load_partition(load_b, gB, s_tiles[1], cute.make_layout(1), Int32(0))
    state = producer_state(tile.stages)
    for k in cutlass.range(k_tiles, unroll=1):
        ring.producer_acquire(state)
        full = ring.producer_get_barrier(state)
        cute.copy(load_a, tAgA[None, k], tAsA[None, state.index], tma_bar_ptr=full)
        cute.copy(load_b, tBgB[None, k], tBsB[None, state.index], tma_bar_ptr=full)
        state.advance()


@cute.jit
def consume(ring, tiled_mma, s_tiles: tuple, mD, k_tiles: Int32, tile: cutlass.Constexpr, group: Int32):
    """One warpgroup: bM / 2 rows of the tile."""
    n, m, _ = cute.arch.block_idx()
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    acc, tCrA, tCrB = fragments(tiled_mma, s_tiles, tile, group, thread)
    _, release = issue_all(ring, consumer_state(tile.stages), tiled_mma, (acc, tCrA, tCrB), k_tiles)
    finish(ring, release)
    step6.store_accumulators(acc, mD, (m * tile.m + group * (tile.m // CONSUMERS), n * tile.n), thread)


def fragments(tiled_mma: cute.TiledMma, s_tiles: tuple, tile: Tile, group: Int32, thread: Int32) -> tuple:
    """Accumulators (MMA, MMA_M, 1), and the descriptors of A's rows of this warpgroup, and of B."""
    rows = tile.m // CONSUMERS
    sA = cute.local_tile(s_tiles[0], (rows, tile.k), (group, 0, None))  # (bM / 2, bK, stages)
    thr_mma = tiled_mma.get_slice(thread)
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, stages)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(s_tiles[1]))  # (MMA, MMA_N, MMA_K, stages)
    return cute.make_rmem_tensor(tiled_mma.partition_shape_C((rows, tile.n)), cutlass.Float32), tCrA, tCrB


@cute.jit
def issue_all(ring, state: pipeline.PipelineState, tiled_mma, operands: tuple, k_tiles: Int32) -> tuple:
    """acc = sum over the K tiles; the last group is left in flight. Returns the state, and that of its stage.

    `operands`: accumulators, descriptors of A and of B. The first K tile is peeled: it overwrites (step 5).
    """
    acc, tCrA, tCrB = operands
    release = state.clone()  # one tile behind
    ring.consumer_wait(state)
    issue_k_tile(tiled_mma, acc, tCrA, tCrB, state.index, False)
    state.advance()
    for _ in cutlass.range(1, k_tiles, unroll=1):
        ring.consumer_wait(state)
        issue_k_tile(tiled_mma, acc, tCrA, tCrB, state.index, True)
        state.advance()
        warpgroup.wait_group(1)  # all but the newest are done, so the stage before it is free
        ring.consumer_release(release)
        release.advance()
    return state, release


@cute.jit
def finish(ring: pipeline.PipelineTmaAsync, release: pipeline.PipelineState):
    """Waits for the accumulators, and gives the last stage back."""
    warpgroup.wait_group(0)
    ring.consumer_release(release)


# ---- host --------------------------------------------------------------------------------------------------


@jit
def gemm(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, stream, tile: cutlass.Constexpr):
    """D (M, N) = A (M, K) @ B (N, K).T in bfloat16, N contiguous in D; rows are multiples of 16 bytes."""
    tiled_mma, loads, layouts = set_up(mA, mB, tile)
    k_tiles = cute.ceil_div(mA.shape[1], tile.k)
    gemm_kernel(tiled_mma, loads, layouts, mD, k_tiles, tile).launch(
        grid=(cute.ceil_div(mD.shape[1], tile.n), cute.ceil_div(mD.shape[0], tile.m), 1),
        block=((CONSUMERS + 1) * WARPGROUP, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


def set_up(mA: cute.Tensor, mB: cute.Tensor, tile: Tile, cluster: int = 1) -> tuple:
    """(WGMMA of 64 x bN, TMA loads of A and B, shared-memory layouts of A and B) for operands of these kinds.

    `cluster` CTAs along M share the tiles of B (step 8).
    """
    a_major, b_major = major_mode(mA), major_mode(mB)
    a_layout = staged_smem_layout(cutlass.BFloat16, (tile.m, tile.k), tile.stages, a_major)
    b_layout = staged_smem_layout(cutlass.BFloat16, (tile.n, tile.k), tile.stages, b_major)
    load_a, tma_a = tma.make_load_atom(mA, a_layout, (tile.m, tile.k))
    load_b, tma_b = tma.make_load_atom(mB, b_layout, (tile.n, tile.k), cluster)
    tiled_mma = make_warpgroup_mma(cutlass.BFloat16, a_major, b_major, tile.n)
    return tiled_mma, (load_a, tma_a, load_b, tma_b), (a_layout, b_layout)


# ---- check, measure ----------------------------------------------------------------------------------------


def check(lab: common.Lab) -> None:
    """Step 6's check, on tiles that wrap the ring and that do not, and on ragged sizes."""
    shapes = lab.pick(((512, 512, 512), (1000, 2056, 520), (128, 256, 64)), ((128, 128, 192), (72, 136, 72)))
    for shape in shapes:
        for tile in lab.pick((Tile(), Tile(128, 128, 64, 2)), (Tile(128, 64, 64, 2),)):
            step6.check_gemm(lab, gemm, shape, tile=tile)


def measure(bench: common.Bench) -> None:
    """Steps and cuBLAS; then tiles, then stages."""
    tiles = (Tile(), Tile(128, 128, 64, 4), Tile(256, 128, 64, 4), Tile(128, 192, 64, 4))
    for size in (8192, 4096):
        a, b, d = step6.problem(size, size, size)
        calls = {"step 6": partial(step6.gemm, a, b, d)}
        calls.update({f"step 7, {tile.label}": partial(gemm, a, b, d, tile=tile) for tile in tiles})
        calls["cuBLAS"] = partial(torch.mm, a, b.T, out=d)
        bench.compare(f"{size}³ bfloat16", calls, flops=2.0 * size**3, baseline="cuBLAS")
    staged = [Tile(stages=stages) for stages in (2, 3, 4)]
    calls = {f"step 7, {tile.label}": partial(gemm, a, b, d, tile=tile) for tile in staged}
    bench.compare("4096³, stages", calls, flops=2.0 * 4096**3, baseline=f"step 7, {Tile().label}")


def show(lab: common.Lab) -> None:
    """Six K tiles through three stages: for the timeline."""
    step6.check_gemm(lab, gemm, (128, 64, 384), tile=Tile(128, 64, 64, 3))


# ---- takeaways ---------------------------------------------------------------------------------------------
# * Loads run ahead through the ring, WGMMAs run ahead by one group: nothing waits that need not.
# * Registers and shared memory are budgets that decide the tile; setmaxnreg moves registers to consumers.
#   The tile is what is won: with 128 x 128 this kernel is 1 to 7 % slower than step 6, since that one's three
#   CTAs an SM overlap too, by chance. With 128 x 256 it is 1.14 to 1.19 times as fast; with two stages half.
# * Left to win: between two tiles of a CTA the tensor cores idle: empty ring at the start, store at the end.
# * exercise: python tutorials/exercises/07.py

if __name__ == "__main__":
    common.main(check, measure, show)
