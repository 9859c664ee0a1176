"""Splits of the keys of a batch's sequences, found from lengths on the GPU.

The splits of a sequence depend on its own length alone (`config.decode.split_keys`). Work items are counted
sequence by sequence, in each by splits, in each by KV heads, whose keys are neighbours in memory.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.decode import DOUBLINGS, LONG_SPLIT, MAX_SPLITS, SPLITS_WANTED, STEP

LANES = 32


class Lengths(NamedTuple):
    """Lengths of a batch of sequences; `used` (B,) int32, None where all have `capacity` keys."""

    batch: Int32
    q_len: Int32
    capacity: Int32
    used: cute.Tensor | None


class Splits(NamedTuple):
    """The splits of a sequence: `count` of `keys` keys each from key `begin` on, a multiple of STEP.

    No query sees a key before `visible`.
    """

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
        keys = cutlass.min(cutlass.max(lengths.used[batch], Int32(0)), lengths.capacity)
    return keys


@cute.jit
def splits_of(
    variant: cutlass.Constexpr[AttentionVariant], lengths: Lengths, batch: Int32, left: Int32
) -> Splits:
    """The splits of a sequence; none where it has no keys."""
    k_len = length_of(lengths, batch)
    visible = Int32(0)
    if cutlass.const_expr(variant.left):
        visible = cutlass.max(k_len - lengths.q_len - left, Int32(0))
    begin = visible // STEP * STEP
    keys = k_len - begin
    short = cutlass.min((keys + SPLITS_WANTED - 1) // SPLITS_WANTED, Int32(LONG_SPLIT))
    wanted = cutlass.max((keys + MAX_SPLITS - 1) // MAX_SPLITS, short)
    size = Int32(STEP)
    for _ in cutlass.range_constexpr(DOUBLINGS):
        size = Int32(cutlass.select_(wanted > size, (size + size).ir_value(), size.ir_value()))
    return Splits(k_len, visible, begin, size, (keys + size - 1) // size)


@cute.jit
def find_item(
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
            own = splits_of(variant, lengths, block + lane, left).count * heads
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
