"""Lists of key blocks that are a range of each query block: windows, causal masks, documents."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.config.lists import WARPS

LANES = 32


class Keys(NamedTuple):
    """Lengths of a window's sequences, what is added to a query for its diagonal, and the window's widths."""

    q_len: Int32
    k_len: Int32
    shift: Int32
    left: Int32
    right: Int32


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
    spec: cutlass.Constexpr,
):
    """Launch the lists of a window: counts (rows,), indices (rows, entries), int32, and those of whole
    blocks.

    `spec`: a `WindowSpec`. Entries behind a count go on numbering.
    """
    lists = (counts, indices, full_counts, full_indices)
    window_kernel(lists, Keys(q_len, k_len, shift, left, right), spec).launch(
        grid=[cute.ceil_div(counts.shape[0], WARPS), 1, 1], block=[LANES * WARPS, 1, 1], stream=stream
    )


@entry_name("window_lists")
@cute.kernel
def window_kernel(lists: tuple, keys: Keys, spec: cutlass.Constexpr):
    """Device side of `window_lists`: a warp for each query block."""
    counts, indices, full_counts, full_indices = lists
    lane = cute.arch.lane_idx()
    row = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if row < counts.shape[0]:
        begin, end, whole_begin, whole_end = window_of(row, keys, spec)
        before = whole_begin - begin
        if lane == 0:
            counts[row] = before + end - whole_end
            full_counts[row] = whole_end - whole_begin
        for entry in cutlass.range(lane, indices.shape[1], LANES, unroll=1):
            number = begin + entry
            if entry >= before:
                number = whole_end + entry - before
            indices[row, entry] = number
        for entry in cutlass.range(lane, full_indices.shape[1], LANES, unroll=1):
            full_indices[row, entry] = whole_begin + entry


@cute.jit
def window_of(row: Int32, keys: Keys, spec: cutlass.Constexpr) -> tuple[Int32, Int32, Int32, Int32]:
    """Blocks that query block `row` sees, [begin, end), and those of them in which all see all."""
    bq, bk = spec.block
    first = row * bq + keys.shift
    last = cutlass.min(row * bq + bq, keys.q_len) - 1 + keys.shift
    end, whole_end = keys.k_len, keys.k_len
    if const_expr(spec.right):
        end = cutlass.min(cutlass.max(last + keys.right + 1, 0), keys.k_len)
        whole_end = cutlass.min(cutlass.max(first + keys.right + 1, 0), keys.k_len)
    begin, whole_begin = Int32(0), Int32(0)
    if const_expr(spec.left):
        begin = cutlass.min(cutlass.max(first - keys.left, 0), keys.k_len)
        whole_begin = cutlass.min(cutlass.max(last - keys.left, 0), keys.k_len)
    first_block = begin // bk
    end_block = cutlass.max((end + bk - 1) // bk, first_block)
    whole_end_block = whole_end // bk
    if whole_end == keys.k_len:
        whole_end_block = (keys.k_len + bk - 1) // bk
    whole_first = cutlass.max(cutlass.min((whole_begin + bk - 1) // bk, end_block), first_block)
    whole_last = cutlass.max(cutlass.min(whole_end_block, end_block), whole_first)
    return first_block, end_block, whole_first, whole_last


def document_lists(
    documents: cute.Tensor, counts: cute.Tensor, indices: cute.Tensor, stream, spec: cutlass.Constexpr
):
    """Launch the lists of documents (B, S), integers that do not fall along S.

    counts int32 (B, rows), indices int32 (B, rows, entries), `spec` a `DocumentSpec`. A list that has no room
    is cut off; entries behind a count go on numbering.
    """
    rows = counts.shape[0] * counts.shape[1]
    document_kernel(documents, counts, indices, spec).launch(
        grid=[cute.ceil_div(rows, WARPS), 1, 1], block=[LANES * WARPS, 1, 1], stream=stream
    )


@entry_name("document_lists")
@cute.kernel
def document_kernel(
    documents: cute.Tensor, counts: cute.Tensor, indices: cute.Tensor, spec: cutlass.Constexpr
):
    """Device side of `document_lists`: a warp for each query block."""
    bq, bk = spec.block
    lane = cute.arch.lane_idx()
    number = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if number < counts.shape[0] * counts.shape[1]:
        batch, row = number // counts.shape[1], number % counts.shape[1]
        length = documents.shape[1]
        last = cutlass.min(row * bq + bq, length) - 1
        begin = place_of(documents[batch, None], documents[batch, row * bq], False)
        end = last + 1
        if const_expr(not spec.causal):
            end = place_of(documents[batch, None], documents[batch, last], True)
        begin = begin // bk
        if lane == 0:
            counts[batch, row] = cutlass.min((end + bk - 1) // bk - begin, indices.shape[2])
        for entry in cutlass.range(lane, indices.shape[2], LANES, unroll=1):
            indices[batch, row, entry] = begin + entry


@cute.jit
def place_of(values: cute.Tensor, wanted: cutlass.Numeric, behind: cutlass.Constexpr) -> Int32:
    """The first place in rising `values` (S,) of a value of at least `wanted`, of more with `behind`; or S.

    All lanes search for the same: each step reads 32 places between the bounds.
    """
    low, high = Int32(0), Int32(cute.size(values))
    while low < high:
        stride = (high - low + LANES - 1) // LANES
        place = low + cute.arch.lane_idx() * stride
        value = values[cutlass.min(place, high - 1)]
        below = value < wanted
        if const_expr(behind):
            below = value <= wanted
        smaller = cute.arch.popc(cute.arch.vote_ballot_sync((place < high) & below))
        # The answer lies behind the last place that is below, up to the next one.
        high = cutlass.min(low + smaller * stride, high)
        low = low + cutlass.max((smaller - 1) * stride + 1, 0)
    return cutlass.min(low, high)
