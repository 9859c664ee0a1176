"""The problem of an attention backward as its kernels see it, of either family."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.query_blocks import KeyTile, KeyTiles, QueryWalk
from kernels_dsl.blocks.attention.seqlen import SeqExtent, SeqInfo
from kernels_dsl.config.attention_backward import SumsOfTile


class RowTiles(NamedTuple):
    """Numbers of query tiles, in whose order log-sum-exp, row sums and sums of dQ lie in memory.

    A packed sequence begins with a tile of its own: there are T // tile + sequences of them a head.
    """

    per_head: Int32
    """Query tiles of one head: of one sequence, or of all where they are packed."""
    heads: Int32
    """Query heads."""

    def number(self, tile: int, varlen: bool, seq: SeqInfo, batch: Int32, head: Int32, block: Int32) -> Int32:
        """Number of query tile `block`, of `tile` rows, of a sequence and head."""
        if varlen:
            return head * self.per_head + seq.q_start // tile + batch + block
        return (batch * self.heads + head) * self.per_head + block


class Sums(NamedTuple):
    """Float32 numbers between the kernels of a backward, by query tiles in the order of `RowTiles`."""

    lse: cute.Tensor
    """(rows): log-sum-exp in base 2; +inf for rows without a key and after a sequence's last"""
    row_sums: cute.Tensor
    """(rows): sum of dO * O, less the gradient of the log-sum-exp"""
    dq: cute.Tensor
    """(elements): sums of dQ as the accumulators of a matrix product have them, see `SumsOfTile`"""
    turns: cute.Tensor | None
    """int32 (query tiles * shares): shares of dQ added so far; None where they come in any order"""


class BackwardWork(NamedTuple):
    """What every role needs to know of the problem. `lists` as in `Work`, but of query blocks a key tile."""

    tiles: KeyTiles
    extent: SeqExtent
    window: Window
    scores: ScoreOperands
    heads_per_kv: Int32
    rows: RowTiles
    sums: Sums


class KeyJob(NamedTuple):
    """The work of a CTA: a key tile, its sequence, and the query blocks that see it."""

    at: KeyTile
    seq: SeqInfo
    walk: QueryWalk


VECTOR = 4
"""Sums of dQ that a thread has side by side: two of each of its two rows in eight columns."""
SHARE_THREADS = 128
"""Threads that hold a share of a query tile's dQ: 64 rows, 16 a warp."""


def first_element(order: SumsOfTile, share: Int32, thread: Int32) -> tuple[Int32, Int32]:
    """Row and column, in its tile, of the first element of a thread's vectors of a share."""
    row = share // order.across * 64 + thread // 32 * 16 + thread % 32 // 4
    return row, share % order.across * order.columns + thread % 4 * 2


@cute.jit
def vector_pointer(order: cutlass.Constexpr, dq: cute.Tensor, share: Int32, thread: Int32) -> cute.Pointer:
    """A thread's first vector of share number `share` of all; the next is VECTOR * SHARE_THREADS on."""
    return dq.iterator + cutlass.Int64(share) * order.size + thread * VECTOR
