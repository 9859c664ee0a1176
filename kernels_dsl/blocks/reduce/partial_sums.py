"""Where a warpgroup leaves its sums for others: shares of a float32 workspace, in vectors of 16 bytes."""

import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS

VECTOR = 4
"""Elements of an access: 16 bytes."""


def vectors_of(workspace: cute.Tensor, share: Int32, size: int, thread: Int32) -> cute.Tensor:
    """(VECTOR, size / VECTOR): a thread's elements of a share; neighbouring threads have neighbours."""
    base = workspace.iterator + share * (size * WARPGROUP_THREADS) + thread * VECTOR
    layout = cute.make_layout((VECTOR, size // VECTOR), stride=(1, VECTOR * WARPGROUP_THREADS))
    return cute.make_tensor(base.align(VECTOR * 4), layout)
