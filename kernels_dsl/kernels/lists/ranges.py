"""Lists of key blocks that form a range for each query block: windows, causal masks, documents."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.config.lists import WARPS, DocumentSpec, WindowSpec

LANES = 32


class Keys(NamedTuple):
    """The sequences of a window, and its widths."""

    q_len: Int32
    k_len: Int32
    shift: Int32  # from a query to the key on its diagonal
    left: Int32
    right: Int32


class WindowLists(NamedTuple):
    """Results, int32: blocks that are seen in part, and those in which all queries see all keys."""

    counts: cute.Tensor  # (rows,)
    indices: cute.Tensor  # (rows, entries)
    full_counts: cute.Tensor
    full_indices: cute.Tensor


class Blocks(NamedTuple):
    """Key blocks [begin, end) of a query block; of these, [full_begin, full_end) are seen in full."""

    begin: Int32
    end: Int32
    full_begin: Int32
    full_end: Int32


def window_lists(
    counts: cute.Tensor,
    indices: cute.Tensor,
    full_counts: cute.Tensor,
    full_indices: cute.Tensor,
    q_len: cutlass.Int32,
    k_len: cutlass.Int32,
    shift: cutlass.Int32,
    left: cutlass.Int32,
    right: cutlass.Int32,
    stream,
    spec: cutlass.Constexpr[WindowSpec],
):
    """Launch the lists of a window, `WindowLists`; the other arguments are `Keys`.

    Entries after a count continue the numbering.
    """
    lists = WindowLists(counts, indices, full_counts, full_indices)
    window_kernel(lists, Keys(q_len, k_len, shift, left, right), spec).launch(
        grid=[cute.ceil_div(counts.shape[0], WARPS), 1, 1], block=[LANES * WARPS, 1, 1], stream=stream
    )


@entry_name("window_lists")
@cute.kernel
def window_kernel(lists: WindowLists, keys: Keys, spec: cutlass.Constexpr[WindowSpec]):
    """Device side of `window_lists`: a warp for each query block."""
    counts, indices, full_counts, full_indices = lists
    lane = cute.arch.lane_idx()
    row = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if row < counts.shape[0]:
        begin, end, full_begin, full_end = window_of(row, keys, spec)
        before = full_begin - begin
        if lane == 0:
            counts[row] = before + end - full_end
            full_counts[row] = full_end - full_begin
        for entry in cutlass.range(lane, indices.shape[1], LANES, unroll=1):
            number = begin + entry
            if entry >= before:
                number = full_end + entry - before
            indices[row, entry] = number
        for entry in cutlass.range(lane, full_indices.shape[1], LANES, unroll=1):
            full_indices[row, entry] = full_begin + entry


@cute.jit
def window_of(row: Int32, keys: Keys, spec: cutlass.Constexpr[WindowSpec]) -> Blocks:
    """The key blocks of query block `row`."""
    bq, bk = spec.block
    first = row * bq + keys.shift
    last = cutlass.min(row * bq + bq, keys.q_len) - 1 + keys.shift
    end, full_end = keys.k_len, keys.k_len
    if const_expr(spec.right):
        end = cutlass.min(cutlass.max(last + keys.right + 1, 0), keys.k_len)
        full_end = cutlass.min(cutlass.max(first + keys.right + 1, 0), keys.k_len)
    begin, full_begin = Int32(0), Int32(0)
    if const_expr(spec.left):
        begin = cutlass.min(cutlass.max(first - keys.left, 0), keys.k_len)
        full_begin = cutlass.min(cutlass.max(last - keys.left, 0), keys.k_len)
    first_block = begin // bk
    end_block = cutlass.max((end + bk - 1) // bk, first_block)
    full_end_block = full_end // bk
    if full_end == keys.k_len:
        full_end_block = (keys.k_len + bk - 1) // bk
    full_first = cutlass.max(cutlass.min((full_begin + bk - 1) // bk, end_block), first_block)
    full_last = cutlass.max(cutlass.min(full_end_block, end_block), full_first)
    return Blocks(first_block, end_block, full_first, full_last)


def document_lists(
    documents: cute.Tensor,
    counts: cute.Tensor,
    indices: cute.Tensor,
    stream,
    spec: cutlass.Constexpr[DocumentSpec],
):
    """Launch the lists of documents (B, S), integers that do not fall along S.

    counts int32 (B, rows), indices int32 (B, rows, entries). A list that does not fit is cut off; entries
    after a count continue the numbering.
    """
    rows = counts.shape[0] * counts.shape[1]
    document_kernel(documents, counts, indices, spec).launch(
        grid=[cute.ceil_div(rows, WARPS), 1, 1], block=[LANES * WARPS, 1, 1], stream=stream
    )


@entry_name("document_lists")
@cute.kernel
def document_kernel(
    documents: cute.Tensor,
    counts: cute.Tensor,
    indices: cute.Tensor,
    spec: cutlass.Constexpr[DocumentSpec],
):
    """Device side of `document_lists`: a warp for each query block."""
    bq, bk = spec.block
    lane = cute.arch.lane_idx()
    number = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if number < counts.shape[0] * counts.shape[1]:
        batch, row = number // counts.shape[1], number % counts.shape[1]
        length = documents.shape[1]
        last = cutlass.min(row * bq + bq, length) - 1
        begin = position_of(documents[batch, None], documents[batch, row * bq], False)
        end = last + 1
        if const_expr(not spec.causal):
            end = position_of(documents[batch, None], documents[batch, last], True)
        begin = begin // bk
        if lane == 0:
            counts[batch, row] = cutlass.min((end + bk - 1) // bk - begin, indices.shape[2])
        for entry in cutlass.range(lane, indices.shape[2], LANES, unroll=1):
            indices[batch, row, entry] = begin + entry


@cute.jit
def position_of(values: cute.Tensor, wanted: cutlass.Numeric, above: cutlass.Constexpr) -> Int32:
    """The first position in rising `values` (S,) of a value >= `wanted`, with `above` > `wanted`; S for none.

    All lanes search for the same value: each step reads 32 positions between the bounds.
    """
    low, high = Int32(0), Int32(cute.size(values))
    while low < high:
        stride = (high - low + LANES - 1) // LANES
        position = low + cute.arch.lane_idx() * stride
        value = values[cutlass.min(position, high - 1)]
        below = value < wanted
        if const_expr(above):
            below = value <= wanted
        smaller = cute.arch.popc(cute.arch.vote_ballot_sync((position < high) & below))
        # The answer lies after the last position that is below, up to the next one read.
        high = cutlass.min(low + smaller * stride, high)
        low = low + cutlass.max((smaller - 1) * stride + 1, 0)
    return cutlass.min(low, high)
