"""A user's own file: a kernel, its helper and its configuration, with nothing of this project but `jit`."""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from lowering import jit

BIAS = 0.0


@dataclass(frozen=True)
class Config:
    """Threads a block, and how much shared memory to ask for."""

    threads: int = 128
    smem: int = 0


def shifted(value):
    """A helper that the kernel reaches."""
    return value + Float32(BIAS)


@cute.kernel
def affine_kernel(mX, mY, operands, n, threads: cutlass.Constexpr, function: cutlass.Constexpr):
    bx, _, _ = cute.arch.block_idx()
    tx, _, _ = cute.arch.thread_idx()
    i = bx * threads + tx
    if i < n:
        mY[i] = function(shifted(mX[i].to(Float32) * operands[0]) + operands[1][i].to(Float32)).to(
            mY.element_type
        )


def affine(
    mX: cute.Tensor,  # (n,)
    mY: cute.Tensor,  # (n,)
    operands: tuple,  # (factor, addend (n,))
    n: Int32,
    stream,
    config: cutlass.Constexpr,
    function: cutlass.Constexpr,
):
    """Y = function(factor * X + addend), element by element."""
    affine_kernel(mX, mY, operands, n, config.threads, function).launch(
        grid=((n + config.threads - 1) // config.threads, 1, 1),
        block=(config.threads, 1, 1),
        smem=config.smem,
        stream=stream,
    )


def same(value):
    return value


def negated(value):
    return -value


affine_jit = jit(affine)


@cute.kernel
def copy_kernel(mX, mY, mZ):
    tx, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(mZ is not None):
        mY[tx, 0] = mX[tx, 0] + mZ[tx]
    else:
        mY[tx, 0] = mX[tx, 0]


@jit
def copy_column(mX: cute.Tensor, mY: cute.Tensor, mZ, stream):
    """Y[:, 0] = X[:, 0] (+ Z), 32 rows; Z may be None."""
    copy_kernel(mX, mY, mZ).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@jit
@cute.jit
def branching(mX: cute.Tensor, n: Int32, stream):
    """Two launches, of which the host function chooses one when it is called."""
    if n > 2:
        copy_kernel_1d(mX).launch(grid=(n, 1, 1), block=(32, 1, 1), stream=stream)
    else:
        copy_kernel_1d(mX).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


@cute.kernel
def copy_kernel_1d(mX):
    tx, _, _ = cute.arch.thread_idx()
    mX[tx] = mX[tx] + mX[tx]
