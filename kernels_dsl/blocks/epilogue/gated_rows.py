"""Gated results from vectors along N: where a thread has neighbouring columns of some rows in registers.

The product z is (M, N); D is (M, N / 2), and z itself may be written too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr

from kernels_dsl.blocks.epilogue.gates import GatedEpilogue
from kernels_dsl.blocks.epilogue.operands import MAX_VECTOR_BYTES, Operands


def product_shape(mD: cute.Tensor, epilogue: Any) -> cute.Shape:
    """(M, N, L) of the product, whose result is mD."""
    if isinstance(epilogue, GatedEpilogue):
        return (mD.shape[0], 2 * mD.shape[1], mD.shape[2])
    return mD.shape


class ReadAndWritten(NamedTuple):
    """The operands that are read, and the tensor (M, N, L) that z is written to; None without."""

    read: Operands
    preact: cute.Tensor | None


def without_preact(epilogue: GatedEpilogue, operands: Operands) -> ReadAndWritten:
    """The operands of a gated epilogue, by what is done with them."""
    if not epilogue.preact:
        return ReadAndWritten(operands, None)
    *read, preact = operands
    assert isinstance(preact, cute.Tensor)
    return ReadAndWritten(tuple(read), preact)


def vector_of(mD: cute.Tensor, per_thread: int) -> int:
    """Columns of z that a thread takes at once: twice what a store of D takes, a divisor of `per_thread`."""
    return 2 * _store_vector(mD, per_thread // 2)


def _store_vector(mX: cute.Tensor, most: int) -> int:
    """Elements of one store to mX (M, N, L), a divisor of `most`."""
    if not isinstance(mX.stride[1], int) or mX.stride[1] != 1:
        return 1
    width = mX.element_type.width // 8
    factors = [MAX_VECTOR_BYTES // width, mX.iterator.alignment // width, most]
    factors += [s if isinstance(s, int) else cute.get_divisibility(s) for s in (mX.stride[0], mX.stride[2])]
    return math.gcd(*factors)


@cute.jit
def store(
    value: cute.TensorSSA,  # z: ((1, V), CPY_M, CPY_N) float32, V even
    tDcD: cute.Tensor,  # its coordinates (m, n, l)
    epilogue: GatedEpilogue,
    mD: cute.Tensor,
    mZ: cute.Tensor | None,
) -> None:
    """Stores the gated pairs to D, and z to mZ where there is one; nothing outside of them."""
    columns, vectors = cute.size(tDcD, mode=[0]), (cute.size(tDcD, mode=[1]), cute.size(tDcD, mode=[2]))
    z = cute.make_rmem_tensor((columns, *vectors), Float32)
    z.store(value.reshape((columns, *vectors)))
    if const_expr(mZ is not None):
        r_z = cute.make_rmem_tensor((columns, *vectors), mZ.element_type)
        r_z.store(z.load().to(mZ.element_type))
        store_runs(r_z, tDcD, mZ, 1)
    r_d = cute.make_rmem_tensor((columns // 2, *vectors), mD.element_type)
    pairs = epilogue.of_pairs(z)
    r_d.store(pairs.to(mD.element_type).reshape((columns // 2, *vectors)))
    store_runs(r_d, tDcD, mD, 2)


@cute.jit
def store_runs(values: cute.Tensor, tDcD: cute.Tensor, mX: cute.Tensor, pairs: int) -> None:
    """Stores registers (columns, CPY_M, CPY_N) to mX (M, N / pairs, L), in vectors where it is aligned."""
    M, N = mX.shape[0], mX.shape[1]
    vector = const_expr(_store_vector(mX, cute.size(values, mode=[0])))
    for j in range_constexpr(cute.size(values, mode=[2])):
        for i in range_constexpr(cute.size(values, mode=[1])):
            m, n, l = tDcD[(0, 0), i, j]
            n = n // pairs
            row = mX[m, None, l]  # (N)
            if m < M:
                for first in range_constexpr(0, cute.size(values, mode=[0]), vector):
                    if const_expr(vector == 1):
                        if n + first < N:
                            row[n + first] = values[first, i, j]
                    else:
                        run = cute.local_tile(values[None, i, j], (vector,), (first // vector,))
                        if n + first + vector <= N:
                            ptr = (row.iterator + n + first).align(vector * mX.element_type.width // 8)
                            cute.autovec_copy(run, cute.make_tensor(ptr, cute.make_layout(vector)))
                        else:
                            for v in range_constexpr(vector):
                                if n + first + v < N:
                                    row[n + first + v] = run[v]
