"""Step 2: a tile moves by itself. TMA descriptors, and the mbarrier that says when the bytes are there.

    python tutorials/02_tma_copy.py

Adds:      TMA load and store of a 2-D tile, shared memory, mbarrier (expected bytes, phase), proxies.
Reuses:    step 1's partition, for the copies to compare with.
Measures:  against the same copy with step 1's loads and with cp.async, and against `Tensor.copy_`; GB/s and
           registers; tile sizes.

WHY
In step 1 each thread computed addresses, loaded into registers, and stored. To move a tile of 32 KB, 256
threads did that eight times over. Hopper has a unit for it, the *Tensor Memory Accelerator* (TMA). One
thread says "the tile at coordinate (i, j) of this tensor, to there in shared memory", and goes on.

*Shared memory* is the scratchpad of up to 227 KB that the threads of one CTA see together.

The tensor is described beforehand, on the host, in 128 bytes called the *descriptor*: base address, extents,
strides, and the *box*, which is the extent of one tile.

    global tensor (M, N), row-major                     shared memory
    +--------+--------+--------+---+
    | (0,0)  | (0,1)  | (0,2)  |   |      one instruction       +--------+
    +--------+--------+--------+---+   ------------------>      |  box   |   + "box bytes have arrived"
    | (1,0)  | (1,1)  | (1,2)  | : |                            +--------+     on an mbarrier
    +--------+--------+--------+---+
                                 ^ a box that reaches beyond N: what is outside arrives as zeros, and is
                                   counted like the rest; a store leaves the outside alone. No predicates.

How does anyone know that the tile is there? The copy runs beside the program, so it has to be waited for.
An *mbarrier* is 8 bytes of shared memory with three numbers: arrivals still to come, bytes still to come,
and a *phase* bit. When both counts are zero the phase is complete, the bit flips, and the counts of arrivals
start over for the next phase. Here there is one arrival, by the thread that also announces the bytes:

    thread 0:   init(1 arrival) ... arrive, and expect 32768 bytes ... start the copy
    TMA:                                                  - 16384 bytes ... - 16384 bytes -> phase 0 complete
    all:        wait(phase 0) ...............................................................| go on

`wait(p)` returns once phase p is complete. A fresh barrier is in phase 0; step 3 needs phase 1.
"""

from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync

from lowering import jit

step1 = common.load("01_vector_add")
THREADS = 128

# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def tma_copy_kernel(
    load: cute.CopyAtom,  # the instruction and its descriptor
    mX: cute.Tensor,  # (M, N) of *coordinates*: TMA takes coordinates, not addresses
    store: cute.CopyAtom,
    mY: cute.Tensor,
    smem_layout: cute.Layout,  # (bM, bN)
    dtype: cutlass.Constexpr,
):
    """One CTA moves one tile: global -> shared -> global, by one thread of its first warp."""
    block_n, block_m, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())  # tell the compiler: the same for 32 threads
    smem = cutlass.memory.SmemAllocator()
    barrier = smem.allocate_array(cutlass.Int64, 1)
    sX = smem.allocate_tensor(dtype, smem_layout, byte_alignment=128)

    if warp == 0:
        with cute.arch.elect_one():  # one thread of the warp
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()  # so that TMA, which is no thread, sees the initialised barrier
    cute.arch.sync_threads()

    tile = smem_layout.shape
    gX = cute.local_tile(mX, tile, (block_m, block_n))  # (bM, bN), coordinates
    gY = cute.local_tile(mY, tile, (block_m, block_n))
    tXsX, tXgX = partition(load, sX, gX)
    tYsY, tYgY = partition(store, sX, gY)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.size_in_bytes(dtype, smem_layout))
        cute.copy(load, tXgX, tXsX, tma_bar_ptr=barrier)  # elects a thread by itself
    cute.arch.mbarrier_wait(barrier, 0)

    # TMA reads and writes through the *async proxy*, threads through the generic one. TMA wrote this tile
    # and TMA reads it, so nothing more is needed here; where threads have written, a fence must come first.
    if warp == 0:
        cute.copy(store, tYsY, tYgY)
        # A store has no mbarrier. It belongs to a group; shared memory must live until that has been read.
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def partition(atom: cute.CopyAtom, s_tile: cute.Tensor, g_tile: cute.Tensor) -> tuple:
    """The tile as TMA sees it, (TMA): one mode of boxes. Nothing is shared with other CTAs (until step 8)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(s_tile, 0, 2), cute.group_modes(g_tile, 0, 2)
    )


@cute.kernel
def plain_copy_kernel(mX: cute.Tensor, mY: cute.Tensor, through_shared: cutlass.Constexpr):
    """The competitors, (n) with n a multiple of the tile: step 1's loads, and cp.async, its forerunner.

    cp.async (since Ampere) copies global -> shared in the background as well, but each thread issues its
    own 16 bytes, with its own address.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    layout = step1.tv_layout(interleaved=False)
    tile = (cute.size(layout),)
    tXgX = cute.composition(cute.local_tile(mX, tile, (block,)), layout)[thread, None]  # (V)
    tYgY = cute.composition(cute.local_tile(mY, tile, (block,)), layout)[thread, None]
    rX = cute.make_fragment_like(tXgX)
    if cutlass.const_expr(through_shared):
        sX = cutlass.memory.SmemAllocator().allocate_tensor(mX.element_type, cute.make_layout(tile), 128)
        tXsX = cute.composition(sX, layout)[thread, None]
        cp_async = cute.make_copy_atom(cpasync.CopyG2SOp(), mX.element_type, num_bits_per_copy=128)
        cute.copy(cp_async, tXgX, tXsX)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)  # a thread waits for its own copies, and here reads no other's
        cute.autovec_copy(tXsX, rX)
    else:
        cute.autovec_copy(tXgX, rX)
    cute.autovec_copy(rX, tYgY)


# ---- host --------------------------------------------------------------------------------------------------


@jit
def tma_copy(mX: cute.Tensor, mY: cute.Tensor, stream, tile: cutlass.Constexpr):
    """Y = X for (M, N), N contiguous; TMA wants strides and base to be multiples of 16 bytes."""
    smem_layout = cute.make_ordered_layout(tile, order=(1, 0))  # (bM, bN):(bN, 1)
    # The descriptor goes into the atom; the tensor that comes with it has coordinates in place of data.
    load, tma_x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, smem_layout, tile)
    store, tma_y = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mY, smem_layout, tile)
    grid = (cute.ceil_div(mX.shape[1], tile[1]), cute.ceil_div(mX.shape[0], tile[0]), 1)
    tma_copy_kernel(load, tma_x, store, tma_y, smem_layout, mX.element_type).launch(
        grid=grid, block=(THREADS, 1, 1), stream=stream
    )


@jit
def plain_copy(mX: cute.Tensor, mY: cute.Tensor, stream, through_shared: cutlass.Constexpr):
    """Y = X for vectors whose size is a multiple of 1024."""
    tile = step1.THREADS * step1.VALUES
    plain_copy_kernel(mX, mY, through_shared).launch(
        grid=(cute.size(mX) // tile, 1, 1), block=(step1.THREADS, 1, 1), stream=stream
    )


# ---- check -------------------------------------------------------------------------------------------------


def check(lab: common.Lab) -> None:
    """Tiles that fit, and tiles that reach beyond both edges."""
    for m, n in lab.pick(((128, 256), (1000, 4004)), ((64, 64), (33, 68))):
        x, y = lab.integers(m, n), lab.poison(m, n)
        lab.launch(tma_copy, x, y, tile=(32, 64))
        lab.equal(f"TMA copy of ({m}, {n})", y, x)
    for through_shared in (False, True):
        x, y = lab.integers(4096), lab.poison(4096)
        lab.launch(plain_copy, x, y, through_shared=through_shared)
        lab.equal("copy by cp.async" if through_shared else "copy by loads and stores", y, x)


# ---- measure -----------------------------------------------------------------------------------------------


def measure(bench: common.Bench) -> None:
    """512 MB there and 512 MB back."""
    x = common.random(8192, 16384, dtype=torch.float32)
    y, flat_x = torch.empty_like(x), x.view(-1)
    flat_y = y.view(-1)
    calls, notes = {}, {}
    for name, through_shared in (("step 1's loads", False), ("cp.async", True)):
        calls[name] = partial(plain_copy, flat_x, flat_y, through_shared=through_shared)
        notes[name] = common.registers(plain_copy, flat_x, flat_y, through_shared=through_shared)
    for tile in ((8, 32), (32, 32), (32, 64), (32, 128), (64, 128), (128, 128)):
        name = f"step 2, TMA, tile {tile[0]}×{tile[1]}"
        calls[name] = partial(tma_copy, x, y, tile=tile)
        kib = tile[0] * tile[1] * 4 // 1024
        notes[name] = f"{kib} KiB, {common.registers(tma_copy, x, y, tile=tile)}"
    calls["Tensor.copy_"] = partial(y.copy_, x)
    bench.compare("copy, 8192×16384 float32", calls, bytes=2 * x.nbytes, baseline="Tensor.copy_", notes=notes)


# ---- takeaways ---------------------------------------------------------------------------------------------
# * One thread moves a tile; descriptors know the edges; coordinates replace addresses.
# * An mbarrier counts arrivals and bytes; a phase bit says which use of it is complete.
# * A copy alone is limited by memory: TMA is 1 to 3 % behind plain loads here (a fifth with tiles of 1 KiB),
#   but it *frees the threads*. What they do with the time is the subject of the next steps.
# * exercise: python tutorials/exercises/02.py

if __name__ == "__main__":
    common.main(check, measure)
