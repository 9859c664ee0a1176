"""Splits of the keys of a batch's sequences, found from lengths on the GPU.

The splits of a sequence depend on its own lengths alone (`config.decode.split_keys`). Work items are counted
sequence by sequence, in each by splits, in each by KV heads, whose keys are neighbours in memory, and in each
by tiles of query rows, which read the same keys.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention.seqlen import row_within
from kernels_dsl.blocks.hw.dsl import choose
from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.decode import (
    FIXED_SPLIT,
    ONE_SPLIT,
    SPLITTINGS,
    STEP,
    DecodeConfig,
)

LANES = 32


class Lengths(NamedTuple):
    """Lengths of a batch of sequences."""

    batch: Int32
    q_len: Int32
    """Queries of a sequence; of packed ones the most whose results are wanted."""
    capacity: Int32
    """The most keys of a sequence."""
    used: cute.Tensor | None
    """(B,) int32, keys of each sequence; None: `capacity`."""
    starts: cute.Tensor | None
    """(B + 1,) int32, packed queries before each sequence; None: all sequences have `q_len`."""
    tokens: Int32
    """Queries in all."""


class Unsettled(Lengths):
    """The same before the kernel that may write them has ended."""


class PartRoom(NamedTuple):
    """Room for the partial results of a sequence: `each` rows for each query row, and `more`."""

    each: Int32
    more: Int32


class Queries(NamedTuple):
    """The queries of a sequence: how many lie before them, their number, and the query rows of a KV head
    whose results are wanted."""

    start: Int32
    length: Int32
    rows: Int32


class Splits(NamedTuple):
    """The splits of a sequence: `count` of `keys` keys each from key `begin` on, a multiple of STEP.

    No query sees a key before `visible`.
    """

    queries: Queries
    k_len: Int32
    visible: Int32
    begin: Int32
    keys: Int32
    count: Int32


class Cursor(NamedTuple):
    """Sequence from which the search for a later item goes on, and the items before it."""

    block: Int32
    before: Int32


class Found(NamedTuple):
    """An item: its sequence, or the number of sequences past the last item, and its number in it."""

    batch: Int32
    number: Int32
    cursor: Cursor


@cute.jit
def length_of(lengths: Lengths, batch: Int32) -> Int32:
    """Keys of a sequence, within what its cache has room for."""
    keys = lengths.capacity
    if cutlass.const_expr(lengths.used is not None):
        if cutlass.const_expr(isinstance(lengths, Unsettled)):
            keys = cute.arch.load(lengths.used.iterator + batch, Int32, sem="relaxed", scope="gpu")
        else:
            keys = lengths.used[batch]
        keys = cutlass.min(cutlass.max(keys, Int32(0)), lengths.capacity)
    return keys


@cute.jit
def queries_of(config: cutlass.Constexpr[DecodeConfig], lengths: Lengths, batch: Int32) -> Queries:
    """The queries of a sequence, within the tensor of packed ones whatever `lengths.starts` holds."""
    start, length = batch * lengths.q_len, lengths.q_len
    if cutlass.const_expr(lengths.starts is not None):
        start = row_within(lengths.starts[batch], lengths.tokens)
        length = cutlass.max(row_within(lengths.starts[batch + 1], lengths.tokens) - start, Int32(0))
    return Queries(start, length, cutlass.min(length, lengths.q_len) * config.pack)


def tiles_of(config: DecodeConfig, lengths: Lengths, queries: Queries) -> Int32:
    """Tiles of a KV head's query rows."""
    if config.tiled:
        return (queries.rows + config.rows - 1) // config.rows
    return Int32(1) if lengths.starts is None else cutlass.min(queries.rows, Int32(1))


@cute.jit
def splits_of(
    config: cutlass.Constexpr[DecodeConfig],
    variant: cutlass.Constexpr[AttentionVariant],
    lengths: Lengths,
    batch: Int32,
    left: Int32,
) -> Splits:
    """The splits of a sequence; none where it has no keys, or an empty one if CTAs merge."""
    k_len, queries = length_of(lengths, batch), queries_of(config, lengths, batch)
    visible = Int32(0)
    if cutlass.const_expr(variant.left):
        visible = row_within(k_len - queries.length - left, k_len)
    if cutlass.const_expr(config.fixed):
        begin, size_log2 = visible // FIXED_SPLIT * FIXED_SPLIT, Int32(FIXED_SPLIT.bit_length() - 1)
    else:
        begin = visible // STEP * STEP
        size_log2 = split_log2(k_len - begin, queries.rows)
    size = Int32(1) << size_log2
    count = (k_len - begin + size - 1) >> size_log2
    if cutlass.const_expr(config.merges):
        count = cutlass.max(count, Int32(1))
    return Splits(queries, k_len, visible, begin, size, count)


def split_log2(keys: Int32, rows: Int32) -> Int32:
    """Binary logarithm of `config.decode.split_keys`."""
    wanted_log2, long, most_log2 = (Int32(x) for x in ONE_SPLIT[1:])
    for found in reversed(SPLITTINGS[:-1]):
        pick = partial(choose, rows <= found.rows, kind=Int32)
        wanted_log2, long = pick(found.wanted_log2, wanted_log2), pick(found.long, long)
        most_log2 = pick(found.most_log2, most_log2)
    short = cutlass.min((keys + (Int32(1) << wanted_log2) - 1) >> wanted_log2, long)
    wanted = cutlass.max((keys + (Int32(1) << most_log2) - 1) >> most_log2, short)
    below = cutlass.max(wanted, Int32(STEP)) - 1
    return 32 - Int32(cute.arch.clz(below))


@cute.jit
def find_item(
    config: cutlass.Constexpr[DecodeConfig],
    variant: cutlass.Constexpr[AttentionVariant],
    index: Int32,
    lengths: Lengths,
    left: Int32,
    heads: Int32,
    cursor: Cursor,
) -> Found:
    """Item number `index`. All lanes of a warp take part, each looks at one of 32 sequences at a time."""
    lane = cute.arch.lane_idx()
    block, before = cursor.block, cursor.before
    number, in_block = lengths.batch, Int32(0)
    searching = block < lengths.batch
    while searching:
        own = Int32(0)
        if block + lane < lengths.batch:
            splits = splits_of(config, variant, lengths, block + lane, left)
            own = splits.count * heads * tiles_of(config, lengths, splits.queries)
        upto = own
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, offset=1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                upto = upto + other
        after = cute.arch.vote_ballot_sync(before + upto > index)
        if after != 0:
            first = cute.arch.popc(~after & (after - 1))  # the lowest bit that is set
            number = block + first
            in_block = cute.arch.shuffle_sync(upto - own, first)
            searching = cutlass.Boolean(False)
        else:
            before = before + cute.arch.shuffle_sync(upto, LANES - 1)
            block = block + LANES
            searching = block < lengths.batch
    uniform = cute.arch.make_warp_uniform
    block, before = uniform(block), uniform(before)
    return Found(uniform(number), index - before - uniform(in_block), Cursor(block, before))


@cute.jit
def sequence_of(lengths: Lengths, token: Int32) -> Int32:
    """The sequences that end before packed query `token`: the number of its own, `batch` past the last one.

    All lanes of a warp take part, each looks at the end of every n-th sequence of those that are left.
    """
    lane = cute.arch.lane_idx()
    first, left = Int32(0), lengths.batch
    while left > 0:
        step = (left + LANES - 1) // LANES
        last = (lane + 1) * step  # sequences up to the one that this lane looks at
        ended = cutlass.Boolean(False)
        if last <= left:
            ended = lengths.starts[first + last] <= token
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(ended)) * step
        first, left = first + passed, cutlass.min(step - 1, left - passed)
    return cute.arch.make_warp_uniform(first)


def first_part(room: PartRoom, queries: Queries, batch: Int32, heads: Int32, pack: int) -> Int32:
    """Number of the first row of a sequence's partial results, of `heads` KV heads."""
    return heads * (queries.start * pack * room.each + batch * room.more)
