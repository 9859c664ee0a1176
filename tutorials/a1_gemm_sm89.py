"""Appendix 1: the same GEMM without Hopper. cp.async and mma.sync, for SM80, SM86, SM89 and everything later.

    python tutorials/a1_gemm_sm89.py

Adds:      a pipeline of cp.async groups, ldmatrix, mma.sync; what a GPU such as an L4 or RTX 4090 has.
Reuses:    step 8's order of tiles; fragments and swizzle from `mma_sync` and `cp_async` of `blocks.hw`.
Measures:  against step 7 and cuBLAS, all on the same GPU: what TMA and WGMMA bought.

WHY
Ada (SM89) has tensor cores, but no TMA, no mbarrier transactions, no WGMMA, no setmaxnreg. What takes their
place costs threads' time and registers:

    Hopper                                     Ampere and Ada
    TMA: one thread, whole tiles               cp.async: every thread, 16 bytes each, addresses computed
    mbarriers, a ring with two roles           groups: commit, and wait until at most n are under way;
                                               one barrier for the CTA; every warp has every role
    WGMMA reads shared memory by itself        ldmatrix: shared memory -> registers, then
    64 x N x 16, asynchronous                  mma.sync: 16 x 8 x 16, a warp, synchronous

The loop, with 3 stages. Copies of two tiles are under way while one is multiplied:

    iteration k    wait until tile k is there | barrier | start the copy of tile k + 2 | multiply tile k

One barrier serves two purposes: everybody's copies of tile k are there, not just my own; and everybody is
done with tile k - 1, into whose stage tile k + 2 goes. Groups are committed even where there is nothing left
to copy, so that "at most 1 group under way" always means that tile k is there.

A warp computes 64 x 32 or more of the output so that a fragment, once in registers, is used several times:

              warp columns 0 ... 3               8 warps, 2 x 4; each 64 x 32 of the 128 x 128 tile:
    warp row  +----+----+----+----+              4 x 4 instructions of 16 x 8 for each 16 of K,
    0         | w0 | w2 | w4 | w6 |              for which it loads 64 x 16 of A and 32 x 16 of B
    1         | w1 | w3 | w5 | w7 |
              +----+----+----+----+
"""

from dataclasses import dataclass
from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from kernels_dsl.blocks.hw.cp_async import staged_tile_layout, swizzle_of
from kernels_dsl.blocks.hw.mma_sync import make_fragments_a, make_fragments_b, make_tiled_mma, mma_k_block
from lowering import jit

step6, step7, step8 = (
    common.load(name) for name in ("06_gemm_simple", "07_gemm_warp_specialized", "08_gemm_persistent")
)
GROUP = 8  # rows of tiles that go together (step 8)


@dataclass(frozen=True)
class Tile:
    """bM x bN x bK, stages, and warps along M and N."""

    m: int = 128
    n: int = 128
    k: int = 64
    stages: int = 3
    warps: tuple[int, int] = (2, 4)

    @property
    def threads(self) -> int:
        return self.warps[0] * self.warps[1] * 32

    @property
    def label(self) -> str:
        return f"{self.m}×{self.n}×{self.k}, {self.stages} stages, {self.warps[0]}×{self.warps[1]} warps"


# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, grid: tuple, tile: cutlass.Constexpr):
    """mA (M, K), mB (N, K), mD (M, N), multiples of the tile. One CTA, one tile; all warps do the same."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    m, n = step8.tile_at(block, grid, GROUP)
    sA, sB = (shared_tiles(rows, tile) for rows in (tile.m, tile.n))
    copy = load_partition(tile)
    tAgA, tAsA = split(copy, cute.local_tile(mA, (tile.m, tile.k), (m, None)), sA, thread)
    tBgB, tBsB = split(copy, cute.local_tile(mB, (tile.n, tile.k), (n, None)), sB, thread)
    k_tiles = cute.size(tAgA, mode=[3])

    for s in cutlass.range_constexpr(tile.stages - 1):
        if s < k_tiles:
            cute.copy(copy, tAgA[None, None, None, s], tAsA[None, None, None, s])
            cute.copy(copy, tBgB[None, None, None, s], tBsB[None, None, None, s])
        cute.arch.cp_async_commit_group()

    tiled_mma = make_tiled_mma(cutlass.BFloat16, *tile.warps)
    a = make_fragments_a(tiled_mma, sA, True, thread)
    b = make_fragments_b(tiled_mma, sB, True, thread)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile.m, tile.n)), cutlass.Float32)
    acc.fill(0.0)
    for k in cutlass.range(k_tiles, unroll=1):
        cute.arch.cp_async_wait_group(
            tile.stages - 2
        )  # all but the newest two groups are done: tile k is there
        cute.arch.sync_threads()
        ahead = k + tile.stages - 1
        if ahead < k_tiles:
            to = ahead % tile.stages
            cute.copy(copy, tAgA[None, None, None, ahead], tAsA[None, None, None, to])
            cute.copy(copy, tBgB[None, None, None, ahead], tBsB[None, None, None, to])
        cute.arch.cp_async_commit_group()
        for block_k in cutlass.range_constexpr(cute.size(a.tCrX, mode=[2])):
            a.load(block_k, k % tile.stages)  # ldmatrix
            b.load(block_k, k % tile.stages)
            mma_k_block(tiled_mma, acc, a, b, block_k)

    tCgD = tiled_mma.get_slice(thread).partition_C(cute.local_tile(mD, (tile.m, tile.n), (m, n)))
    rD = cute.make_rmem_tensor(acc.shape, mD.element_type)
    rD.store(acc.load().to(mD.element_type))
    cute.autovec_copy(rD, tCgD)  # pairs of neighbours, as with WGMMA


def shared_tiles(rows: int, tile: Tile) -> cute.Tensor:
    """(rows, bK, stages) in shared memory, swizzled so that ldmatrix meets no bank twice."""
    layout = staged_tile_layout(cutlass.BFloat16, (rows, tile.k), tile.stages, True)
    swizzle = cute.make_swizzle(*swizzle_of(cutlass.BFloat16, (rows, tile.k), True))
    data = cutlass.memory.SmemAllocator().allocate(cute.cosize(layout) * 2, byte_alignment=1024)
    return cute.make_tensor(cute.recast_ptr(data, swizzle, dtype=cutlass.BFloat16), layout)


def load_partition(tile: Tile) -> cute.TiledCopy:
    """The threads' shares of a copy: 16 bytes a thread, neighbours along K."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.BFloat16, num_bits_per_copy=128)
    along = tile.k // 8
    threads = cute.make_ordered_layout((tile.threads // along, along), order=(1, 0))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, 8)))


def split(copy: cute.TiledCopy, g_tiles: cute.Tensor, s_tiles: cute.Tensor, thread: Int32) -> tuple:
    """This thread's part of the tiles, (8, rows, 1, k_tiles), and of the stages, (8, rows, 1, stages)."""
    mine = copy.get_slice(thread)
    return mine.partition_S(g_tiles), mine.partition_D(s_tiles)


# ---- host --------------------------------------------------------------------------------------------------


@jit
def gemm(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, stream, tile: cutlass.Constexpr):
    """D (M, N) = A (M, K) @ B (N, K).T in bfloat16, all row-major, multiples of the tile (`cp_async`
    shows what the edges take without TMA: a count of valid bytes for every single copy)."""
    grid = (mD.shape[0] // tile.m, mD.shape[1] // tile.n)
    gemm_kernel(mA, mB, mD, grid, tile).launch(
        grid=(grid[0] * grid[1], 1, 1), block=(tile.threads, 1, 1), stream=stream
    )


# ---- check, measure ----------------------------------------------------------------------------------------


def check(lab: common.Lab) -> None:
    """Fewer K tiles than stages, and more."""
    for shape in lab.pick(((512, 512, 512), (256, 384, 64)), ((64, 64, 64), (64, 128, 256))):
        for tile in lab.pick((Tile(), Tile(128, 256, 32, 3)), (Tile(64, 64, 32, 4, (2, 2)),)):
            if shape[1] % tile.n == 0:
                step6.check_gemm(lab, gemm, shape, tile=tile)


def measure(bench: common.Bench) -> None:
    """On one and the same Hopper GPU."""
    tiles = (Tile(), Tile(128, 128, 32, 4), Tile(128, 256, 32, 3))
    for size in (8192, 4096):
        a, b, d = step6.problem(size, size, size)
        calls = {f"A1, {tile.label}": partial(gemm, a, b, d, tile=tile) for tile in tiles}
        calls["step 7"] = partial(step7.gemm, a, b, d, tile=step7.Tile())
        calls["cuBLAS"] = partial(torch.mm, a, b.T, out=d)
        bench.compare(f"{size}³ bfloat16", calls, flops=2.0 * size**3, baseline="cuBLAS")


# ---- takeaways ---------------------------------------------------------------------------------------------
# * cp.async: count groups, not bytes; one barrier a K tile does for both hazards.
# * Every warp loads, waits and multiplies; fragments go through registers, and registers limit the tile.
# * On Hopper this is a fallback; the table says what the new units are worth.
# * exercise: python tutorials/exercises/a1.py

if __name__ == "__main__":
    common.main(check, measure)
