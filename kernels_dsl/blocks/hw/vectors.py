"""Vectors of neighbouring elements between global memory and registers."""

import cutlass.cute as cute


def vector_at(tensor: cute.Tensor, at: cute.Coord, count: int) -> cute.Tensor:
    """`count` neighbours from coordinate `at` on, whose address is a multiple of the vector's size.

    A single element may lie anywhere; more need a contiguous last mode.
    """
    start = tensor.iterator + cute.crd2idx(at, tensor.layout)
    if count > 1:  # `Pointer.align` would round it up
        size = count * tensor.element_type.width // 8
        start = cute.make_ptr(start.dtype, start.toint(), start.memspace, assumed_align=size)
    return cute.make_tensor(start, cute.make_layout(count))


def load_vector(tensor: cute.Tensor, at: cute.Coord, count: int) -> cute.Tensor:
    """The same neighbours, in registers."""
    found = cute.make_rmem_tensor(count, tensor.element_type)
    cute.autovec_copy(vector_at(tensor, at, count), found)
    return found
