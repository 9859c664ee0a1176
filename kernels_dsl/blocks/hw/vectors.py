"""Vectors of neighbouring elements between global memory and registers, and between threads."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

PAIRS = 4
"""Pairs of 16-bit elements in 16 bytes, and threads among which accumulators share eight columns."""


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


def eight_columns(words: list[Int32], thread: Int32) -> list[Int32]:
    """Eight neighbouring elements of a row, as words of two, out of accumulators' pairs.

    words: a thread's pairs of four blocks of eight columns of one row, whose other pairs the other threads of
    its quad have. Thread q of the quad gets block q, in four shuffles: a transposition of 4x4 words.
    """
    words = list(words)
    for bit in (1, 2):
        upper = (thread & bit) != 0
        for i in (i for i in range(PAIRS) if not i & bit):
            low, high = words[i], words[i | bit]
            other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, low, high), offset=bit)
            words[i], words[i | bit] = cutlass.select_(upper, other, low), cutlass.select_(upper, high, other)
    return words
