"""Step 4: some warps load, the others compute. Warp specialisation, arrive counts, setmaxnreg.

    python tutorials/04_warp_roles.py

Adds:      producer and consumer roles, arrive counts, elected arrival, giving registers away (setmaxnreg).
Reuses:    step 3's task and partition; its barriers come from `kernels_dsl.blocks.hw.pipeline` from here on.
Measures:  against step 3; with and without setmaxnreg.

WHY
In step 3 warp 0 had two jobs. To load tile k + stages it had to wait until the slowest of the four warps
had read tile k; meanwhile it did not add, so the others waited for it one tile later. The jobs want
different things: the loader should run ahead as far as the ring lets it, the adders should never wait for
each other. So each gets warps of its own:

    step 3   warp 0    | add 0 | wait for all | load 3 | add 1 | wait for all | load 4 |
             warp 1-3  | add 0 |              | add 1 |
    step 4   producer  | load 0, 1, 2 | wait empty 0 | load 3 | wait empty 1 | load 4 |
             consumers |       | add 0 | add 1 | add 2 | add 3 |

A *warpgroup* is four neighbouring warps, 128 threads. The producer gets a warpgroup although one warp does
all of its work, because of registers: an SM has 65536 of them, and each thread of a CTA gets equally many
at launch. `setmaxnreg` changes that while the kernel runs, by warpgroup: the producer keeps 24 or 40, and
the consumers take what it gave up. Here nobody needs many; from step 7 on accumulators will.

*Arrive counts.* A barrier that expects one arrival too many hangs, one too few lets the producer overwrite
what is being read. So they are computed, not typed in: one elected thread of each consumer warp arrives,

    full[s]:    1 arrival (the producer, which announces the bytes)
    empty[s]:   4 warps   = 4 arrivals, not 128: each warp syncs itself first, which is cheap

`make_tma_ring` of the blocks does so, and makes `PipelineTmaAsync` of it: the barriers with names for what
one does to them. A `PipelineState` holds stage index and phase bit, so nobody computes k % stages again:

    producer_acquire(state)    wait(empty[stage]), then arrive at full[stage] and expect the bytes
    consumer_wait(state)       wait(full[stage])
    consumer_release(state)    arrive at empty[stage]
    state.advance()            next stage; at the end of the ring index 0 and the other phase

The producer's state starts with phase 1: "the phase before the first one is complete" is what a fresh
barrier answers, so the first pass over the ring does not wait. That is step 3's fill, for nothing.
"""

from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, pipeline

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.pipeline import consumer_state, make_tma_ring, producer_state, sync_after_init
from lowering import jit

step3 = common.load("03_pipeline")
TILE = step3.TILE
CONSUMERS = 128  # threads; the producer's warpgroup follows

# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def fold_kernel(
    load: cute.CopyAtom,
    tma_x: cute.Tensor,  # (M, K) of coordinates
    mY: cute.Tensor,  # (M, bK)
    smem_layout: cute.Layout,  # (bM, bK, stages)
    k_tiles: Int32,
    setmaxnreg: cutlass.Constexpr,
):
    """Sets up, then each warpgroup goes its way. From here on a kernel's body only hands out roles."""
    stages = cute.size(smem_layout, mode=[2])
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    barriers = smem.allocate_array(cutlass.Int64, 2 * stages)
    sX = smem.allocate_tensor(cutlass.Float32, smem_layout, byte_alignment=128)  # (bM, bK, stages)
    ring = make_tma_ring(barriers, stages, TILE[0] * TILE[1] * 4, CONSUMERS // 32, (1, 1))
    sync_after_init((1, 1))

    if warp >= CONSUMERS // 32:
        if cutlass.const_expr(setmaxnreg):
            cute.arch.setmaxregister_decrease(40)
        if warp == CONSUMERS // 32:
            produce(ring, load, tma_x, sX, k_tiles)
    else:
        if cutlass.const_expr(setmaxnreg):
            cute.arch.setmaxregister_increase(232)
        consume(ring, sX, mY, k_tiles)


@cute.jit
def produce(
    ring: pipeline.PipelineTmaAsync, load: cute.CopyAtom, tma_x: cute.Tensor, sX: cute.Tensor, k_tiles: Int32
):
    """One warp: as far ahead as the ring lets it."""
    block, _, _ = cute.arch.block_idx()
    gX = cute.local_tile(tma_x, TILE, (block, None))  # (bM, bK, k_tiles)
    tXsX, tXgX = tma.load_partition(load, gX, sX, cute.make_layout(1), Int32(0))
    state = producer_state(sX.shape[2])
    for k in cutlass.range(k_tiles, unroll=1):
        ring.producer_acquire(state)
        cute.copy(load, tXgX[None, k], tXsX[None, state.index], tma_bar_ptr=ring.producer_get_barrier(state))
        state.advance()


@cute.jit
def consume(ring: pipeline.PipelineTmaAsync, sX: cute.Tensor, mY: cute.Tensor, k_tiles: Int32):
    """Four warps: add, tell the producer, and never wait for each other."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    tXsX, acc, mine = step3.accumulator(sX, thread)
    state = consumer_state(sX.shape[2])
    for _ in cutlass.range(k_tiles, unroll=1):
        ring.consumer_wait(state)
        cute.autovec_copy(tXsX[None, None, None, state.index], mine)
        acc.store(acc.load() + mine.load())
        cute.arch.sync_warp()  # all 32 lanes have read before one of them says so
        ring.consumer_release(state)
        state.advance()
    step3.write_rows(acc, mY, thread, block)


# ---- host --------------------------------------------------------------------------------------------------


@jit
def fold(
    mX: cute.Tensor,
    mY: cute.Tensor,
    stream,
    stages: cutlass.Constexpr,
    setmaxnreg: cutlass.Constexpr = True,
):
    """Y (M, 64) = the sum of the (M, 64) slices of X (M, K); float32, multiples of 64."""
    smem_layout = cute.make_ordered_layout((*TILE, stages), order=(1, 0, 2))
    load, tma_x = tma.make_load_atom(mX, smem_layout, TILE)
    fold_kernel(load, tma_x, mY, smem_layout, mX.shape[1] // TILE[1], setmaxnreg).launch(
        grid=(mX.shape[0] // TILE[0], 1, 1),
        block=(CONSUMERS + 128, 1, 1),
        min_blocks_per_mp=1,  # the assembler must know who shares the registers, else setmaxnreg is ignored
        stream=stream,
    )


# ---- check -------------------------------------------------------------------------------------------------


def check(lab: common.Lab) -> None:
    """Step 3's cases, on this kernel."""
    step3.check(lab, fold)
    x, y = lab.integers(64, 64 * 3), lab.poison(64, 64)
    lab.launch(fold, x, y, stages=2, setmaxnreg=False)
    lab.equal("registers left alone", y, x.view(64, -1, 64).sum(1))


# ---- measure -----------------------------------------------------------------------------------------------


def measure(bench: common.Bench) -> None:
    """The same task as step 3."""
    x, y = step3.problem()
    calls = {}
    for s in (2, 4, 8):
        calls[f"step 3, {s} stages"] = partial(step3.fold, x, y, stages=s)
        calls[f"step 4, {s} stages"] = partial(fold, x, y, stages=s)
    calls["step 4, 4 stages, no setmaxnreg"] = partial(fold, x, y, stages=4, setmaxnreg=False)
    view, out = x.view(x.shape[0], -1, 64), torch.empty_like(y)
    calls["torch.sum"] = partial(torch.sum, view, 1, out=out)
    bench.compare("fold, one CTA an SM", calls, bytes=x.nbytes, baseline="torch.sum")


def show(lab: common.Lab) -> None:
    """Eight tiles through three stages: for the timeline."""
    lab.launch(fold, lab.integers(64, 64 * 8), lab.poison(64, 64), stages=3)


# ---- takeaways ---------------------------------------------------------------------------------------------
# * Producer and consumer run at their own pace; the ring is all they share.
# * Count arrivals from who arrives: one elected thread a consumer warp.
# * Where memory is the limit anyway, as in this fold, roles hardly pay: a few per cent, most with few stages;
#   setmaxnreg nothing at all. They pay in step 7, where consumers have work and accumulators need registers.
# * exercise: python tutorials/exercises/04.py

if __name__ == "__main__":
    common.main(check, measure, show)
