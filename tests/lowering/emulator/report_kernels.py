"""CuTe DSL kernels with one planted bug each, for the tests of what reports say."""

import cutlass
from cutlass import Float32, cute

from lowering import jit

THREADS = 128
STAGES = 2


def put(tile: cute.Tensor, i: cutlass.Int32, value: Float32):
    tile[i] = value  # the helper's store


@cute.jit
def exchange(tile: cute.Tensor, i: cutlass.Int32, value: Float32):
    put(tile, i, value)  # the middle
    return tile[THREADS - 1 - i]  # the helper's load


@cute.kernel
def exchange_kernel(mX: cute.Tensor, mY: cute.Tensor):
    tx, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    unused = smem.allocate_tensor(Float32, cute.make_layout(8), 16)
    sX = smem.allocate_tensor(Float32, cute.make_layout(THREADS), 128)
    unused[0] = Float32(0)  # all write zero
    mY[tx] = exchange(sX, tx, mX[tx])  # the kernel's own line


@jit
def run_exchange(mX: cute.Tensor, mY: cute.Tensor, stream):
    """Y = X reversed, without the barrier that it needs. X, Y: float32 (128,)."""
    exchange_kernel(mX, mY).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def ring_kernel(mX: cute.Tensor, arriving: cutlass.Constexpr, waits: cutlass.Constexpr):
    tx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

    @cute.struct
    class Storage:
        words: cute.struct.MemRange[cutlass.Int64, STAGES]
        tile: cute.struct.Align[cute.struct.MemRange[Float32, THREADS], 128]

    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    full = storage.words.data_ptr()
    if tx == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 2)  # the initialisation
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp > 0 and warp <= arriving:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full + 1)
    if warp == 0:
        if cutlass.const_expr(waits):
            cute.arch.mbarrier_wait(full + 1, 0)  # the wait
        mX[tx] = Float32(1)


@jit
def run_ring(mX: cute.Tensor, stream, arriving: cutlass.Constexpr, waits: cutlass.Constexpr):
    """Sets the first 32 elements of X to one after `arriving` of two warps arrived. X: float32 (32,)."""
    ring_kernel(mX, arriving, waits).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def fill_kernel(mX: cute.Tensor, row: cutlass.Constexpr, column: cutlass.Constexpr):
    tx, _, _ = cute.arch.thread_idx()
    if tx == 5:
        mX[row, column] = Float32(1)


@jit
def fill(mX: cute.Tensor, stream, row: cutlass.Constexpr, column: cutlass.Constexpr):
    """Sets X[row, column], wherever that is. X: float32 (m, n)."""
    fill_kernel(mX, row, column).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def copy_element_kernel(mX: cute.Tensor, mY: cute.Tensor, row: cutlass.Constexpr, column: cutlass.Constexpr):
    tx, _, _ = cute.arch.thread_idx()
    if tx == 0:
        mY[0] = mX[row, column]


@jit
def copy_element(mX: cute.Tensor, mY: cute.Tensor, stream, row: cutlass.Constexpr, column: cutlass.Constexpr):
    """Y[0] = X[row, column], wherever that is. X: float32 (m, n), Y: float32 (k,)."""
    copy_element_kernel(mX, mY, row, column).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
