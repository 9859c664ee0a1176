"""Step 3: a ring of stages. Load tile k + 3 while tile k is being used.

    python tutorials/03_pipeline.py

Adds:      ring of stages, full and empty barriers, phases that alternate.
Reuses:    step 2's TMA load, written with `kernels_dsl.blocks.hw.tma` from here on.
Measures:  1 to 8 stages, against `torch.sum`.

WHY
Step 2 loaded, waited, stored. Whoever waits does nothing, and memory that nobody asks for anything does
nothing either. A byte takes the better part of a microsecond from memory to an SM (streaming
multiprocessor), in which an H200's memory could have delivered some 3 MB: that much has to be *under way* at
any time. Many small CTAs on each
SM hide it by taking turns. A GEMM cannot have many: its tiles fill registers and shared memory. So one CTA
has to keep several loads under way by itself, and puts them into a ring of *stages*.

The task is a GEMM without the multiplication, so that the loop is what we look at: *fold* the K tiles of a
matrix onto each other.

    x (M, K)   +------+------+------+--- ---+          y (M, bK)  +------+
               |  0   |  1   |  2   |  ...  |    sum   --------->  | sum  |
               +------+------+------+--- ---+                      +------+
    CTA i      rows [64 i, 64 i + 64), every K tile after the other, sum in registers

Each stage has two mbarriers, because there are two things to wait for:

    full[s]    "the bytes are there"      1 arrival + bytes   consumers wait before they read
    empty[s]   "everybody has read"       128 arrivals        the producer waits before it loads again

A stage is used again and again, each use is one phase of both barriers. Use number u = k // stages of a
stage waits for phase u & 1: one bit is enough, since nobody can be two uses ahead. With 3 stages:

    k         0   1   2   3   4   5   6   7   8
    stage     0   1   2   0   1   2   0   1   2          stage = k % 3
    phase     0   0   0   1   1   1   0   0   0          phase = (k // 3) & 1

Without a GPU this script draws what the emulator saw: L = a load under way, '.' = a warp that waits.
"""

from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from kernels_dsl.blocks.hw import tma
from lowering import jit

TILE = (64, 64)  # rows, columns (float32): 16 KB
THREADS = 128

# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def fold_kernel(
    load: cute.CopyAtom,
    tma_x: cute.Tensor,  # (M, K) of coordinates
    mY: cute.Tensor,  # (M, bK)
    smem_layout: cute.Layout,  # (bM, bK, stages)
    k_tiles: Int32,
):
    """One CTA folds one row of tiles. All threads add; one of them also keeps the loads going."""
    stages = cute.size(smem_layout, mode=[2])
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    block, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, stages)
    empty = smem.allocate_array(cutlass.Int64, stages)
    sX = smem.allocate_tensor(cutlass.Float32, smem_layout, byte_alignment=128)  # (bM, bK, stages)
    if warp == 0:
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, THREADS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    gX = cute.local_tile(tma_x, TILE, (block, None))  # (bM, bK, k_tiles)
    tXsX, tXgX = tma.load_partition(load, gX, sX, cute.make_layout(1), Int32(0))
    if warp == 0:  # the ring is empty: fill it without waiting
        for s in cutlass.range_constexpr(stages):
            if s < k_tiles:
                start(load, tXgX[None, s], tXsX[None, s], full + s)

    tXsX_reg, acc, mine = accumulator(sX, thread)
    for k in cutlass.range(k_tiles, unroll=1):
        stage, phase = k % stages, (k // stages) & 1
        cute.arch.mbarrier_wait(full + stage, phase)
        cute.autovec_copy(tXsX_reg[None, None, None, stage], mine)
        acc.store(acc.load() + mine.load())
        cute.arch.mbarrier_arrive(empty + stage)
        if warp == 0:
            if k + stages < k_tiles:
                # Here is the flaw: a warp that has adding to do waits for the three others to be done.
                cute.arch.mbarrier_wait(empty + stage, phase)
                start(load, tXgX[None, k + stages], tXsX[None, stage], full + stage)
    write_rows(acc, mY, thread, block)


def start(load: cute.CopyAtom, tXgX: cute.Tensor, tXsX: cute.Tensor, full: cute.Pointer) -> None:
    """Announce the bytes of a tile and start its load into a stage, which must be empty."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, TILE[0] * TILE[1] * 4)
    cute.copy(load, tXgX, tXsX, tma_bar_ptr=full)


def row_partition() -> cute.TiledCopy:
    """128 threads on a tile: 16 neighbours take one row of 64 floats, four floats (16 bytes) each."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
    threads = cute.make_ordered_layout((THREADS // 16, 16), order=(1, 0))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, 4)))


def accumulator(sX: cute.Tensor, thread: Int32) -> tuple:
    """This thread's part of the stages, its zeroed sums, and registers of the same shape for one tile."""
    part = row_partition().get_slice(thread).partition_S(sX)  # (4, rows, 1, stages)
    acc = cute.make_rmem_tensor(part.shape[:3], cutlass.Float32)
    acc.fill(0.0)
    return part, acc, cute.make_rmem_tensor(part.shape[:3], cutlass.Float32)


def write_rows(acc: cute.Tensor, mY: cute.Tensor, thread: Int32, block: Int32) -> None:
    """Sums to the rows of this CTA."""
    gY = cute.local_tile(mY, TILE, (block, 0))
    cute.autovec_copy(acc, row_partition().get_slice(thread).partition_D(gY))


# ---- host --------------------------------------------------------------------------------------------------


@jit
def fold(mX: cute.Tensor, mY: cute.Tensor, stream, stages: cutlass.Constexpr):
    """Y (M, 64) = the sum of the (M, 64) slices of X (M, K); float32, M and K multiples of 64."""
    smem_layout = cute.make_ordered_layout((*TILE, stages), order=(1, 0, 2))
    load, tma_x = tma.make_load_atom(mX, smem_layout, TILE)
    fold_kernel(load, tma_x, mY, smem_layout, mX.shape[1] // TILE[1]).launch(
        grid=(mX.shape[0] // TILE[0], 1, 1), block=(THREADS, 1, 1), stream=stream
    )


# ---- check -------------------------------------------------------------------------------------------------


def check(lab: common.Lab, host=None) -> None:
    """Fewer tiles than stages, as many, and a number that wraps the ring several times."""
    for stages, k_tiles in lab.pick(((1, 1), (1, 5), (2, 7), (3, 2), (4, 64)), ((1, 3), (3, 2), (3, 8))):
        x, y = lab.integers(128, 64 * k_tiles), lab.poison(128, 64)
        lab.launch(host or fold, x, y, stages=stages)
        lab.equal(f"fold of {k_tiles} tiles through {stages} stages", y, x.view(128, -1, 64).sum(1))


# ---- measure -----------------------------------------------------------------------------------------------


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """One CTA for each SM, 256 tiles for each CTA."""
    x = common.random(64 * common.sm_count(), 64 * 256, dtype=torch.float32)
    return x, torch.empty(x.shape[0], 64, device="cuda")


def measure(bench: common.Bench) -> None:
    """The share of the memory rate that a single CTA an SM reaches."""
    x, y = problem()
    names = {s: f"step 3, {s} stage{'s' * (s > 1)}" for s in (1, 2, 3, 4, 8)}
    calls = {name: partial(fold, x, y, stages=s) for s, name in names.items()}
    notes = {name: f"{16 * s} KiB an SM under way" for s, name in names.items()}
    view, out = x.view(x.shape[0], -1, 64), torch.empty_like(y)
    calls["torch.sum"] = partial(torch.sum, view, 1, out=out)
    bench.compare("fold, one CTA an SM", calls, bytes=x.nbytes, baseline="torch.sum", notes=notes)


def show(lab: common.Lab) -> None:
    """Eight tiles through three stages: for the timeline."""
    lab.launch(fold, lab.integers(64, 64 * 8), lab.poison(64, 64), stages=3)


# ---- takeaways ---------------------------------------------------------------------------------------------
# * Bytes under way = rate x latency; stages are how one CTA gets there.
# * Two barriers a stage: full (bytes arrived) and empty (everybody has read).
# * Phase = (use of the stage) & 1, the same number for both sides.
# * exercise: python tutorials/exercises/03.py

if __name__ == "__main__":
    common.main(check, measure, show)
