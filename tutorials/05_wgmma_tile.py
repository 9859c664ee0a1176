"""Step 5: one matrix product by one instruction. WGMMA on a single tile.

    python tutorials/05_wgmma_tile.py

Adds:      WGMMA: swizzled shared memory, matrix descriptors, fence - commit - wait, accumulator layout.
Reuses:    step 2's TMA load.
Measures:  the rate of one warpgroup an SM against instruction N; A from shared memory or from registers.

WHY
The tensor cores of a Hopper SM do 2048 multiply-adds of bfloat16 a cycle, and the way to them is *WGMMA*
(warpgroup matrix multiply-accumulate). 128 threads issue it together; it computes

    D (64 x N)  +=  A (64 x 16)  @  B (16 x N)        N = 8, 16, ... 256; bfloat16 in, float32 out

and runs by itself, like TMA does: A and B are read from shared memory (A also from registers), D sits in the
registers of the 128 threads. Three things are new.

1. *Where A and B lie.* Shared memory has 32 banks of 4 bytes; a column of a row-major tile with rows of 128
bytes would lie in one bank and be read in turns. So rows are stored with their 16-byte chunks permuted:
chunk c of row r goes to place c ^ (r % 8). This *swizzle* is known to TMA, which writes it, and to WGMMA,
which reads it. 64 bfloat16 of K are one 128-byte row; 8 rows (1 KB) are the *atom* that repeats:

    row 0 | 0 1 2 3 4 5 6 7 |      the numbers are chunks of 8 elements; read chunk 0 of every row
    row 1 | 1 0 3 2 5 4 7 6 |      downwards, and you meet eight different columns of banks
    row 2 | 2 3 0 1 6 7 4 5 |
    row 3 | 3 2 1 0 7 6 5 4 |      in CuTe: Swizzle<3,4,3> o (8, 64):(64, 1), made by
     ...                           make_smem_layout_atom(K_SW128, bfloat16) and repeated by tile_to_shape

2. *Order.* WGMMA is asynchronous, so the accumulators are not there when the next line runs:

    fence     registers that were written before may be read by what follows
    issue     four times here: K = 64 is four steps of 16
    commit    what was issued since the last commit is one group
    wait(n)   return when at most n groups are unfinished; wait(0) before reading D or overwriting A and B

3. *Who holds D.* Warp w of the four has rows 16 w ... 16 w + 15. Within 8 rows x 8 columns, lane l has row
l // 4 and columns 2 (l % 4) and the next one, and the same 8 rows further down:

              columns 0 1   2 3   4 5   6 7  | 8 9 ...
    row 0     lane    0     1     2     3    |  0  ...       value index of a thread, (2, 2, N / 8):
    row 1             4     5     6     7    |  4                v % 2           column + 1
    ...                                                          v // 2 % 2      row + 8
    row 8             0     1     2     3    |  0                v // 4          column + 8
"""

from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernels_dsl.blocks.hw import tma
from lowering import jit

M, K = 64, 64
THREADS = 128

# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def tile_kernel(
    tiled_mma: cute.TiledMma,
    loads: tuple,  # (atom of A, coordinates of A (M, K, L), the same of B (N, K, L))
    layouts: tuple,  # swizzled (M, K, 1) and (N, K, 1)
    mD: cute.Tensor,  # (M, N, L) float32
    repeat: Int32,
):
    """CTA l computes D[:, :, l] = repeat * A[:, :, l] @ B[:, :, l].T"""
    load_a, tma_a, load_b, tma_b = loads
    thread, _, _ = cute.arch.thread_idx()
    batch, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    barrier = smem.allocate_array(cutlass.Int64, 1)
    # The swizzle permutes address bits, so an atom must begin at a multiple of its 1024 bytes.
    sA, sB = (
        smem.allocate_tensor(cutlass.BFloat16, x.outer, byte_alignment=1024, swizzle=x.inner) for x in layouts
    )
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    n = mD.shape[1]
    one = cute.make_layout(1)
    tAsA, tAgA = tma.load_partition(load_a, cute.local_tile(tma_a, (M, K), (0, 0, batch)), sA, one, Int32(0))
    tBsB, tBgB = tma.load_partition(
        load_b, cute.local_tile(tma_b, (cute.size(sB, mode=[0]), K), (0, 0, batch)), sB, one, Int32(0)
    )
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, (M + cute.size(sB, mode=[0])) * K * 2)
        cute.copy(load_a, tAgA, tAsA[None, 0], tma_bar_ptr=barrier)
        cute.copy(load_b, tBgB, tBsB[None, 0], tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)

    thr_mma = tiled_mma.get_slice(thread)
    # A and B "fragments" hold no data but *matrix descriptors*: address, strides and swizzle in 64 bits.
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, 1): MMA_K = 4 steps of 16
    tCsA = thr_mma.partition_A(sA)
    if cutlass.const_expr(tiled_mma.op.a_src == warpgroup.OperandSource.SMEM):
        tCrA = tiled_mma.make_fragment_A(tCsA)  # (MMA, MMA_M, MMA_K, 1)
    else:
        tCrA = cute.make_rmem_tensor(tCsA.shape, cutlass.BFloat16)  # now there is data, 32 values a thread
        cute.autovec_copy(tCsA, tCrA)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((M, cute.size(sB, mode=[0]))), cutlass.Float32)

    tCgD = thr_mma.partition_C(mD[None, None, batch])  # ((2, 2, N / 8), 1, 1)
    tCcD = thr_mma.partition_C(cute.make_identity_tensor((M, n)))

    multiply(tiled_mma, acc, tCrA, tCrB, False)
    for _ in cutlass.range(1, repeat, unroll=1):  # again and again, for the measurement
        multiply(tiled_mma, acc, tCrA, tCrB, True)
        warpgroup.wait_group(1)
    warpgroup.wait_group(0)

    for v in cutlass.range(cute.size(acc), unroll_full=True):
        if tCcD[v][1] < n:
            tCgD[v] = acc[v]


@cute.jit
def multiply(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    tCrA: cute.Tensor,
    tCrB: cute.Tensor,
    accumulate: cutlass.Constexpr,
):
    """acc (+)= A @ B.T over the K = 64 of the tile; issued, not awaited.

    ACCUMULATE False makes the first instruction overwrite, so nobody clears the accumulators. It is known
    at trace time: an instruction with a predicate would keep both old and new accumulators alive.
    """
    warpgroup.fence()
    tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(tCrB, mode=[2])):
        cute.gemm(tiled_mma, acc, tCrA[None, None, k, 0], tCrB[None, None, k, 0], acc)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


# ---- host --------------------------------------------------------------------------------------------------


@jit
def tile_product(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    repeat: Int32,
    stream,
    n: cutlass.Constexpr,
    a_in_registers: cutlass.Constexpr = False,
):
    """D (64, n, L) = repeat * A (64, 64, L) @ B (n, 64, L).T; n contiguous in D."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    major = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (M, n, 16), source, major, major)
    tiled_mma = cute.make_tiled_mma(op)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, cutlass.BFloat16)
    a_layout = cute.tile_to_shape(atom, (M, K, 1), order=(0, 1, 2))
    b_layout = cute.tile_to_shape(atom, (n, K, 1), order=(0, 1, 2))
    load_a, tma_a = tma.make_load_atom(mA, a_layout, (M, K))
    load_b, tma_b = tma.make_load_atom(mB, b_layout, (n, K))
    tile_kernel(tiled_mma, (load_a, tma_a, load_b, tma_b), (a_layout, b_layout), mD, repeat).launch(
        grid=(mA.shape[2], 1, 1), block=(THREADS, 1, 1), stream=stream
    )


# ---- check -------------------------------------------------------------------------------------------------


def operands(make, n: int, batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (64, 64, L) and B (n, 64, L) with K contiguous."""
    a, b = make(batches, M, K, dtype=torch.bfloat16), make(batches, n, K, dtype=torch.bfloat16)
    return a.permute(1, 2, 0), b.permute(1, 2, 0)


def check(lab: common.Lab) -> None:
    """Integers, so every bit must be right; narrow and wide, A from shared memory and from registers."""
    for n, in_registers, repeat in ((8, False, 1), (64, False, 3), (64, True, 3), (256, False, 2)):
        a, b = operands(lab.integers, n, 2)
        d = lab.poison(2, M, n).permute(1, 2, 0)
        lab.launch(tile_product, a, b, d, repeat, n=n, a_in_registers=in_registers)
        expected = repeat * torch.einsum("mkl,nkl->mnl", a.float(), b.float())
        lab.equal(
            f"64×{n}×64, A in {'registers' if in_registers else 'shared memory'}, ×{repeat}", d, expected
        )


# ---- measure -----------------------------------------------------------------------------------------------


def measure(bench: common.Bench) -> None:
    """One warpgroup on each SM, the same tile 2000 times: what can the tensor cores do from here?"""
    repeat, sms = 2000, common.sm_count()
    calls, flops = {}, {}
    for n in (8, 16, 32, 64, 128, 192, 256):
        a, b = operands(common.random, n, sms)
        d = torch.empty(sms, M, n, device="cuda").permute(1, 2, 0)
        for in_registers in (False, True):
            name = f"N={n}, A in {'registers' if in_registers else 'shared memory'}"
            calls[name] = partial(tile_product, a, b, d, repeat, n=n, a_in_registers=in_registers)
            flops[name] = 2.0 * M * n * K * repeat * sms
    bench.compare("64×N×64, 2000 times on each SM", calls, flops=flops, baseline="N=256, A in shared memory")


# ---- takeaways ---------------------------------------------------------------------------------------------
# * Swizzle: TMA writes it, WGMMA reads it, both are told by one layout.
# * fence, issue, commit, wait; peel the first product instead of clearing accumulators.
# * Wide N pays. Shared memory delivers 128 bytes a cycle: A's 64 x 16 take 16 cycles, B's N x 16 take N / 4,
#   and the multiplication N / 2. Below N = 64 reading takes longer (N = 32: 24 cycles against 16), and A in
#   registers is what helps. From 64 on it makes no difference. Below 32 nothing helps: N = 8 from registers
#   takes as long as N = 16.
# * exercise: python tutorials/exercises/05.py

if __name__ == "__main__":
    common.main(check, measure)
