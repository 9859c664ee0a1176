"""Lists of the key blocks of each query block's highest scores, in rising order.

A row of scores lies in the registers of a warp, or of a CTA if it is long. The k-th largest is found bit by
bit, from the sign down: each bit takes one count of the scores that are at least as large, and the search
ends as soon as a count is k. Then every score knows whether it is taken, and ballots give its place in the
list.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.hw.dsl import choose, entry_name
from kernels_dsl.config.lists import WARPS, TopkSpec

from .totals import Warps, total

LOWEST = -(2**31)
NEVER = -2139095041
"""The key of -inf: this and less is never taken."""
LANES = 32


class Lists(NamedTuple):
    """Results, int32."""

    counts: cute.Tensor  # (B, H, rows)
    indices: cute.Tensor  # (B, H, rows, k): columns in rising order, then the number of columns


class Diagonal(NamedTuple):
    """Queries of a causal choice, and the offset from a query to its last key."""

    q_len: Int32
    shift: Int32


def topk_lists(
    scores: cute.Tensor,
    counts: cute.Tensor,
    indices: cute.Tensor,
    q_len: cutlass.Int32,
    shift: cutlass.Int32,
    stream,
    spec: cutlass.Constexpr[TopkSpec],
):
    """Launch the choice of indices.shape[3] > 0 columns of each row of scores (B, H, rows, columns).

    counts, indices: `Lists`. NaN and -inf are not taken; of equal scores the first in the row are. q_len,
    shift: `Diagonal`, for a causal choice.
    """
    rows = scores.shape[0] * scores.shape[1] * scores.shape[2]
    together = WARPS if spec.row_warps == 1 else 1
    topk_kernel(scores, Lists(counts, indices), Diagonal(q_len, shift), spec).launch(
        grid=[cute.ceil_div(rows, together), 1, 1],
        block=[LANES * spec.row_warps * together, 1, 1],
        stream=stream,
    )


@entry_name("topk_lists")
@cute.kernel
def topk_kernel(scores: cute.Tensor, lists: Lists, diagonal: Diagonal, spec: cutlass.Constexpr[TopkSpec]):
    """Device side of `topk_lists`."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    scratch = None
    row = cute.arch.block_idx()[0]
    if const_expr(spec.row_warps == 1):
        row, warp = row * WARPS + warp, Int32(0)
    else:
        layout = cute.make_layout((spec.row_warps, 2), stride=(1, spec.row_warps))
        scratch = cutlass.memory.SmemAllocator().allocate_tensor(Int32, layout, 16)
    if row < scores.shape[0] * scores.shape[1] * scores.shape[2]:
        make_list(scores, lists, diagonal, spec, row, Warps(warp, scratch))


@cute.jit
def make_list(
    scores: cute.Tensor,
    lists: Lists,
    diagonal: Diagonal,
    spec: cutlass.Constexpr[TopkSpec],
    number: Int32,
    warps: Warps,
):
    """Makes the list of row `number`."""
    warp, (counts, indices) = warps.warp, lists
    heads, rows, columns = scores.shape[1], scores.shape[2], scores.shape[3]
    row, head, batch = number % rows, number // rows % heads, number // rows // heads
    limit = columns
    if const_expr(spec.causal):
        last = cutlass.min((row + 1) * spec.block[0], diagonal.q_len) - 1 + diagonal.shift
        limit = Int32(0)
        if last >= 0:
            limit = cutlass.min(last // spec.block[1] + 1, columns)
    first = warp * (LANES * spec.per_lane) + cute.arch.lane_idx()
    values = cute.make_rmem_tensor(spec.per_lane, Float32)
    for i in range_constexpr(spec.per_lane):
        column = first + i * LANES
        value = Float32(scores[batch, head, row, cutlass.min(column, columns - 1)])
        values[i] = choose((column < limit) & (value == value), value, -Float32.inf)
    keys = cute.recast_tensor(values, Int32)
    for i in range_constexpr(spec.per_lane):
        # Integers in the order of the numbers.
        keys[i] = keys[i] ^ ((keys[i] >> 31) & Int32(0x7FFFFFFF))

    wanted = indices.shape[3]
    smallest = kth_key(spec, keys, wanted, warps)
    count = store_list(spec, keys, indices[batch, head, row, None], smallest, first, warps)
    thread = warp * LANES + cute.arch.lane_idx()
    if thread == 0:
        counts[batch, head, row] = count
    for entry in cutlass.range(count + thread, wanted, LANES * spec.row_warps, unroll=1):
        indices[batch, head, row, entry] = columns


@cute.jit
def kth_key(spec: cutlass.Constexpr[TopkSpec], keys: cute.Tensor, k: Int32, warps: Warps) -> Int32:
    """The k-th largest key of the row, or a smaller one that lets as many through."""
    smallest = Int32(LOWEST)
    bit = Int32(31)
    while bit >= 0:
        candidate = smallest + (Int32(1) << bit)
        found = Int32(0)
        for i in range_constexpr(spec.per_lane):
            found += Int32(keys[i] >= candidate)
        found = total(spec.row_warps, found, warps, bit % 2).all
        if found >= k:
            smallest = candidate
        bit = bit - 1
        if found == k:
            bit = Int32(-1)
    return smallest


@cute.jit
def store_list(
    spec: cutlass.Constexpr[TopkSpec],
    keys: cute.Tensor,
    entries: cute.Tensor,
    smallest: Int32,
    first: Int32,
    warps: Warps,
) -> Int32:
    """Writes the row's list of keys from `smallest` up, and returns its length. first: the thread's
    column."""
    edge = cutlass.max(smallest, Int32(NEVER))
    larger, equal = Int32(0), Int32(0)
    for i in range_constexpr(spec.per_lane):
        larger += Int32(keys[i] > edge)
        equal += Int32((keys[i] == edge) & (smallest > Int32(NEVER)))
    # `kth_key` may have ended with either buffer.
    if const_expr(spec.row_warps > 1):
        cute.arch.sync_threads()
    larger, larger_before = total(spec.row_warps, larger, warps, Int32(0))
    equal, equal_before = total(spec.row_warps, equal, warps, Int32(1))
    quota = cute.size(entries) - larger
    at = larger_before + cutlass.min(equal_before, quota)
    lower = (Int32(1) << cute.arch.lane_idx()) - 1
    for i in range_constexpr(spec.per_lane):
        same = (keys[i] == edge) & (smallest > Int32(NEVER))
        sames = cute.arch.vote_ballot_sync(same)
        taken = (keys[i] > edge) | (same & (equal_before + cute.arch.popc(sames & lower) < quota))
        takens = cute.arch.vote_ballot_sync(taken)
        if taken:
            entries[at + cute.arch.popc(takens & lower)] = first + i * LANES
        equal_before += cute.arch.popc(sames)
        at += cute.arch.popc(takens)
    return larger + cutlass.min(equal, quota)
