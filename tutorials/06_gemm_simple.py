"""Step 6: the simplest GEMM with TMA and WGMMA. A loop over K, and a grid of tiles.

    python tutorials/06_gemm_simple.py

Adds:      K loop, grid of output tiles, ragged edges, float32 -> bfloat16 store.
Reuses:    step 2's TMA load and mbarrier; step 5's WGMMA, with `kernels_dsl.blocks` from here on.
Measures:  against cuBLAS (torch.mm).

WHY
D = A @ B.T with A (M, K), B (N, K), D (M, N). (A linear layer has its weights as (N, K); for WGMMA and TMA it
makes no difference which mode of B is contiguous.) D is cut into tiles of bM x bN, one for each CTA, which
walks along K:

                     B (N, K)    +-----+-----+-----+
                                 |  0  |  1  |  2  |  bN
                                 +-----+-----+-----+
         A (M, K)                   bK
         +-----+-----+-----+     +-----------+
         |  0  |  1  |  2  | bM  | D (M, N)  |  bN x bM accumulators, float32, in registers
         +-----+-----+-----+     +-----------+

Each K tile: load both tiles, wait, multiply, wait. Nothing overlaps inside of one CTA, as in step 2; what
saves it are other CTAs on the same SM. How many there can be is a matter of budget: 128 x 128 tiles of
bfloat16 with bK = 64 take 2 x 16 KB of shared memory, and 128 accumulators of each of the 128 threads plus
some 30 more registers allow three CTAs an SM.

Why big tiles? A tile loads (bM + bN) * bK numbers for bM * bN * bK multiply-adds. With 128 x 128 that is 64
multiply-adds a number, with 64 x 64 only 32, and the memory system delivers no more than it does.

*Edges.* M, N and K need not be multiples of the tile. TMA fills what is outside of A and B with zeros: along
K they add nothing, along M and N they give rows and columns of D that the store leaves out, by predicates on
a coordinate tensor as in step 1.
"""

from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import major_mode, staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import issue_k_tile, make_warpgroup_mma
from lowering import jit

TILE = (128, 128, 64)  # bM, bN, bK
THREADS = 128

# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(
    tiled_mma: cute.TiledMma,
    loads: tuple,  # (atom of A, coordinates of A (M, K), the same of B (N, K))
    layouts: tuple,  # swizzled (bM, bK, 1) and (bN, bK, 1)
    mD: cute.Tensor,  # (M, N)
    k_tiles: Int32,
):
    """One CTA of one warpgroup: one tile of D."""
    load_a, tma_a, load_b, tma_b = loads
    thread, _, _ = cute.arch.thread_idx()
    n, m, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    barrier = smem.allocate_array(cutlass.Int64, 1)
    sA, sB = (
        smem.allocate_tensor(cutlass.BFloat16, x.outer, byte_alignment=1024, swizzle=x.inner) for x in layouts
    )
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    gA = cute.local_tile(tma_a, (TILE[0], TILE[2]), (m, None))  # (bM, bK, k_tiles)
    gB = cute.local_tile(tma_b, (TILE[1], TILE[2]), (n, None))  # (bN, bK, k_tiles)
    tAsA, tAgA = tma.load_partition(load_a, gA, sA, cute.make_layout(1), Int32(0))
    tBsB, tBgB = tma.load_partition(load_b, gB, sB, cute.make_layout(1), Int32(0))
    thr_mma = tiled_mma.get_slice(thread)
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, 2, 4, 1): 2 x 64 rows, 4 x 16 of K
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, 1, 4, 1)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(TILE[:2]), cutlass.Float32)
    acc.fill(0.0)

    for k in cutlass.range(k_tiles, unroll=1):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, (TILE[0] + TILE[1]) * TILE[2] * 2)
            cute.copy(load_a, tAgA[None, k], tAsA[None, 0], tma_bar_ptr=barrier)
            cute.copy(load_b, tBgB[None, k], tBsB[None, 0], tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, k & 1)  # one stage: a new phase with each K tile
        issue_k_tile(tiled_mma, acc, tCrA, tCrB, 0, True)
        warpgroup.wait_group(0)
        cute.arch.sync_threads()  # every warp is done with the tiles before they are overwritten

    store_accumulators(acc, mD, (m * TILE[0], n * TILE[1]), thread)


@cute.jit
def store_accumulators(acc: cute.Tensor, mD: cute.Tensor, origin: tuple, thread: Int32):
    """A warpgroup's accumulators ((2, 2, bN / 8), bM / 64, 1) to D at `origin`, converted to D's dtype.

    Straight from registers: a thread holds pairs of neighbours (step 5), so it writes 4 bytes at a time,
    eight rows a warp. Step 9 does better.
    """
    rows, columns = cute.size(acc.shape[1]) * 64, cute.size(acc.shape[0]) // 4 * 8
    offset_m = thread // 32 * 16 + thread % 32 // 4  # step 5's picture
    offset_n = thread % 4 * 2
    for i in cutlass.range_constexpr(rows // 64):
        for j in cutlass.range_constexpr(columns // 8):
            for half in cutlass.range_constexpr(2):
                m = origin[0] + 64 * i + offset_m + 8 * half
                n = origin[1] + 8 * j + offset_n
                pair = cute.make_rmem_tensor(2, mD.element_type)
                for v in cutlass.range_constexpr(2):
                    pair[v] = mD.element_type(acc[(v, half, j), i, 0])
                if m < mD.shape[0] and n < mD.shape[1]:
                    # Rows are multiples of 16 bytes and n is even: the pair is aligned, and N ends after it.
                    where = (mD[m, None].iterator + n).align(2 * mD.element_type.width // 8)
                    cute.autovec_copy(pair, cute.make_tensor(where, cute.make_layout(2)))


# ---- host --------------------------------------------------------------------------------------------------


@jit
def gemm(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, stream):
    """D (M, N) = A (M, K) @ B (N, K).T in bfloat16, N contiguous in D; rows are multiples of 16 bytes."""
    a_major, b_major = major_mode(mA), major_mode(mB)
    tiled_mma = make_warpgroup_mma(cutlass.BFloat16, a_major, b_major, TILE[1])
    a_layout = staged_smem_layout(cutlass.BFloat16, (TILE[0], TILE[2]), 1, a_major)
    b_layout = staged_smem_layout(cutlass.BFloat16, (TILE[1], TILE[2]), 1, b_major)
    load_a, tma_a = tma.make_load_atom(mA, a_layout, (TILE[0], TILE[2]))
    load_b, tma_b = tma.make_load_atom(mB, b_layout, (TILE[1], TILE[2]))
    grid = (cute.ceil_div(mD.shape[1], TILE[1]), cute.ceil_div(mD.shape[0], TILE[0]), 1)
    gemm_kernel(
        tiled_mma,
        (load_a, tma_a, load_b, tma_b),
        (a_layout, b_layout),
        mD,
        cute.ceil_div(mA.shape[1], TILE[2]),
    ).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


# ---- check -------------------------------------------------------------------------------------------------


def check(lab: common.Lab) -> None:
    """Bit for bit on integers; sizes that are multiples of the tile, and that are not."""
    for shape in lab.pick(((512, 512, 512), (1000, 2056, 520)), ((128, 128, 128), (72, 136, 72))):
        check_gemm(lab, gemm, shape)


def check_gemm(lab: common.Lab, host, shape: tuple[int, int, int], **constants) -> None:
    """`host(a, b, d, **constants)` on (M, N, K) integers against float64."""
    m, n, k = shape
    a, b = lab.integers(m, k, dtype=torch.bfloat16), lab.integers(n, k, dtype=torch.bfloat16)
    d = lab.poison(m, n, dtype=torch.bfloat16)
    lab.launch(host, a, b, d, **constants)
    text = ", ".join(f"{name} {getattr(value, 'label', value)}" for name, value in constants.items())
    lab.equal(f"{m}×{n}×{k} {text}", d, a.double() @ b.double().T)


# ---- measure -----------------------------------------------------------------------------------------------


def problem(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a (m, k), b (n, k), N(0, 1), and an output."""
    return common.random(m, k), common.random(n, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")


def measure(bench: common.Bench) -> None:
    """A size that everyone quotes, and a smaller one."""
    for size in (8192, 4096):
        a, b, d = problem(size, size, size)
        calls = {"step 6": partial(gemm, a, b, d), "cuBLAS": partial(torch.mm, a, b.T, out=d)}
        notes = {"step 6": common.registers(gemm, a, b, d)}
        bench.compare(f"{size}³ bfloat16", calls, flops=2.0 * size**3, baseline="cuBLAS", notes=notes)


# ---- takeaways ---------------------------------------------------------------------------------------------
# * A GEMM is a K loop of (load, wait, multiply, wait) and a grid; edges come for free with TMA.
# * Big tiles: fewer bytes for each multiply-add.
# * While it loads the tensor cores idle, and the other way round; that the SM's other two CTAs work meanwhile
#   is worth a good deal: 0.7 of cuBLAS. Next, the ring goes in.
# * exercise: python tutorials/exercises/06.py

if __name__ == "__main__":
    common.main(check, measure)
