"""CuTe DSL kernels for the emulator's tests, each with a flag that takes its synchronisation away."""

import cutlass
from cutlass import Float32, cute

from lowering import jit

THREADS = 128


@cute.kernel
def reverse_kernel(mX: cute.Tensor, mY: cute.Tensor, synchronised: cutlass.Constexpr):
    tx, _, _ = cute.arch.thread_idx()
    bx, _, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    sX = smem.allocate_tensor(Float32, cute.make_layout(THREADS), 16)
    i = bx * THREADS + tx
    sX[tx] = mX[i]
    if cutlass.const_expr(synchronised):
        cute.arch.sync_threads()
    mY[i] = sX[THREADS - 1 - tx]  # the read that needs the barrier


@jit
def reverse(mX: cute.Tensor, mY: cute.Tensor, stream, synchronised: cutlass.Constexpr):
    """Y = X with each block of 128 reversed. X, Y: float32 (n,), n a multiple of 128."""
    reverse_kernel(mX, mY, synchronised).launch(
        grid=(mX.shape[0] // THREADS, 1, 1), block=(THREADS, 1, 1), smem=4 * THREADS, stream=stream
    )


@cute.kernel
def greet_kernel(mX: cute.Tensor):
    tx, _, _ = cute.arch.thread_idx()
    if tx < 2:
        cute.printf("thread %d has %f\n", tx, mX[tx])


@jit
def greet(mX: cute.Tensor, stream):
    """Prints the first two elements of X from the kernel."""
    greet_kernel(mX).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
