"""dS^T of a consumer warpgroup on its way to shared memory, from one address of each thread.

A general copy finds the swizzled address of each stmatrix anew in each step: five instructions, between the
slopes and the next product. Here a thread keeps its first one, and the others differ in two bits.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.blocks.hw.swizzled_rows import opaque
from kernels_dsl.blocks.hw.wgmma import WGMMA_M

ATOM = 64
"""Queries of a swizzled row of 128 bytes."""
MATRICES = 16
"""Queries of one stmatrix of four matrices, and keys of one of a warp."""
BYTES = 2
"""Of an element."""


def place_of_d_scores(tiles: cute.Tensor, part: Int32 | int, thread: Int32) -> Int32:
    """Address of a thread's row in its warp's first stmatrix: of 16 keys of those of `part`, and of the first
    or the second eight queries. `tiles`: (queries, keys, stages)."""
    key = thread // 32 * MATRICES + thread % MATRICES
    chunk = (thread % 32 // MATRICES) ^ (key % 8)
    own = tiles.layout((0, WGMMA_M, 0)) * BYTES
    return opaque(tiles.iterator.toint() + part * own + key * (ATOM * BYTES) + chunk * 16)


def put_d_scores(tiles: cute.Tensor, place: Int32, d_scores: cute.Tensor, buffer: Int32) -> None:
    """Stores dS^T, operand A of 64 keys, in a stage of `tiles`. `place`: see `place_of_d_scores`."""
    elements = cute.make_layout(cute.size(d_scores))
    words = cute.recast_tensor(cute.make_tensor(d_scores.iterator, elements), Int32)
    start = place + buffer * (tiles.layout((0, 0, 1)) * BYTES)
    for n in range(cute.size(words) // 4):
        atom, step = divmod(n * MATRICES, ATOM)
        at = start + tiles.layout((atom * ATOM, 0, 0)) * BYTES if atom else start
        store_matrices(at ^ (step * BYTES) if step else at, [words[4 * n + i] for i in range(4)])


@dsl_user_op
def store_matrices(address: Int32, words: list[Int32], *, loc=None, ip=None) -> None:
    """`stmatrix` of four matrices of 8 x 8."""
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    inline_ptx(None, (address, *words), text, "r,r,r,r,r", effects=True, loc=loc, ip=ip)
