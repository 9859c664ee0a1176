"""Trace-time views that turn PyTorch-oriented GEMM tensors into the kernels' (M, K, L) orientation.

A kernel works on A (M, K, L), B (N, K, L), D (M, N, L) and epilogue operands (M, N, L). A caller has A (M, K)
or (L, M, K), B (K, N) or (L, K, N), D (M, N) or (L, M, N), and operands without the modes along which they
are broadcast. Making these views with torch would cost 0.7 us of host time each, in every call; made while
tracing they are layouts that the compiler sees, and free. A mode that a tensor lacks gets the static stride
0, and the batch mode of an unbatched problem the static extent 1, so neither costs an address computation in
the kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_dsl.blocks.epilogue.operands import Operand
from kernels_dsl.config.gemm import MAXIMUM, NUMBER, PARTIALS, WRITTEN


def batch_first_view(tensor: cute.Tensor, batch: Int32 | int, swap: bool) -> cute.Tensor:
    """(X, Y) or (L, X, Y) as (X, Y, L), or with `swap` as (Y, X, L).

    `batch` is the extent of L that a tensor of rank 2 gets, with stride 0.
    """
    shape, stride = tensor.shape, tensor.stride
    rank = cute.rank(tensor)
    if rank not in (2, 3):
        raise ValueError(f"a GEMM tensor must have rank 2 or 3, got rank {rank}")
    x, y = (rank - 1, rank - 2) if swap else (rank - 2, rank - 1)
    batch_shape, batch_stride = (shape[0], stride[0]) if rank == 3 else (batch, 0)
    layout = cute.make_layout((shape[x], shape[y], batch_shape), stride=(stride[x], stride[y], batch_stride))
    return cute.make_tensor(tensor.iterator, layout)


def partials_view(tensor: cute.Tensor) -> cute.Tensor:
    """(L, parts, lines) as (parts, lines, L)."""
    shape, stride = tensor.shape, tensor.stride
    layout = cute.make_layout((shape[1], shape[2], shape[0]), stride=(stride[1], stride[2], stride[0]))
    return cute.make_tensor(tensor.iterator, layout)


def epilogue_operand_view(
    operand: Operand | Int64, modes: str, shape: tuple[Int32, Int32, Int32 | int], swap: bool
) -> Operand:
    """An epilogue operand as (M, N, L), or with `swap` as (N, M, L).

    `modes` names the operand's own modes in their order, a subset of "lmn", and "1" for a mode of size 1;
    `shape` is the result's. A scalar, of no modes, is returned as it is. An operand of modes `NUMBER` or
    `MAXIMUM` is an address; the latter becomes the pointer that `reduce.maximum` takes. `PARTIALS` are
    (parts, lines, L) whatever the orientation.
    """
    modes = modes.removeprefix(WRITTEN)
    if modes == "":
        return operand
    if modes == PARTIALS:
        return partials_view(operand)
    if modes in (NUMBER, MAXIMUM):
        pointer = cute.make_ptr(Float32, operand, cute.AddressSpace.gmem, assumed_align=4)
        if modes == MAXIMUM:
            return pointer
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=(0, 0, 0)))
    if cute.rank(operand) != len(modes):
        raise ValueError(f"an epilogue operand with modes {modes!r} has rank {cute.rank(operand)}")
    order = "nml" if swap else "mnl"
    stride = tuple(operand.stride[modes.index(mode)] if mode in modes else 0 for mode in order)
    return cute.make_tensor(operand.iterator, cute.make_layout(shape, stride=stride))


def batch_extent(*tensors: cute.Tensor) -> Int32 | int:
    """The batch extent that tensors of rank 2 (no batch) and 3 share; the static 1 if all have rank 2."""
    for tensor in tensors:
        if cutlass.const_expr(cute.rank(tensor) == 3):
            return tensor.shape[0]
    return 1


def mode_panel(mX: cute.Tensor, mode: int, extent: int, index: Int32) -> cute.Tensor:
    """`extent` (static) elements of mX (X, Y, L) along `mode`, from index * extent on."""
    shape = tuple(extent if m == mode else mX.shape[m] for m in range(3))
    stride = mX.stride[mode]
    layout = cute.make_layout(shape, stride=mX.stride)
    if isinstance(stride, int) and stride == 0:
        return cute.make_tensor(mX.iterator, layout)
    step = (stride if isinstance(stride, int) else cute.get_divisibility(stride)) * extent
    step = step * mX.element_type.width // 8  # bytes; the panels begin at multiples of it
    alignment = min(mX.iterator.alignment, step & -step)
    return cute.make_tensor((mX.iterator + index * extent * stride).align(alignment), layout)
