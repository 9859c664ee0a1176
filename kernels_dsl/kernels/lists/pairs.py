"""Lists of kept blocks matched in pairs that share many of them, and the steps of each pair.

A greedy matching takes the heaviest edge, drops the edges that meet it, and so on: at least half the weight
of the best matching. An edge that is the heaviest at both of its ends is always among those that greedy
takes, so all such edges are taken at once, round by round (Preis, "Linear time 1/2-approximation algorithm
for maximum weighted matching in general graphs", 1999; Hoepman, "Simple distributed weighted matchings",
2004). Equal weights need an order: the smaller i ^ j first, so that identical lists are matched in one round.
Random patterns take about ten.

Lists are numbered by length, by their rows in the table of `sparse.lists.Lists`. A pair's steps lie at the
entries of its longer list, so nothing has to be counted beforehand.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, range_constexpr

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.schedule.block_lists import HEADER, LANES
from kernels_dsl.config.bsr import (
    PAIR_GROUP,
    PAIR_ROWS,
    PAIR_TILE,
    PAIR_TILE_WARPS,
    SECOND,
    SHARED,
    MatchRule,
)

from .totals import Warps, total

MOST_WEIGHT = (1 << 15) - 1
NONE = 0x7FFFFFFF
"""The value of a map without an entry."""


class Pattern(NamedTuple):
    """A sparse matrix's lists, and their matching; all int32."""

    table: cute.Tensor  # (lists, 3 or more): number, begin, end
    mates: cute.Tensor  # (lists,): partner of each, or itself
    across: cute.Tensor  # (entries): dense blocks
    kept: cute.Tensor  # (entries): kept blocks


class Entries(NamedTuple):
    """Entries [begin, end) of a list."""

    begin: Int32
    end: Int32


class Maps(NamedTuple):
    """First entries by dense block, NONE for none, of a list and of its partner."""

    own: cute.Tensor
    other: cute.Tensor


class Partner(NamedTuple):
    """The dense block of an entry, and the partner's first entry of it, or NONE."""

    block: Int32
    entry: Int32


class Step(NamedTuple):
    """Blocks of one list at a step."""

    dense: Int32
    kept: Int32


class Count(NamedTuple):
    """Lines of a list alone or of a pair, for its longer list, and its entries; 0 for others."""

    lines: Int32  # 1, and 1 << 16 more for a pair
    length: Int32


def pair_weights(
    table: cute.Tensor,
    across: cute.Tensor,
    weights: cute.Tensor,
    extent: cutlass.Int32,
    stream,
    rule: cutlass.Constexpr[MatchRule],
    most: cutlass.Constexpr,
):
    """Launch the weights of all edges in groups of lists: weights int16 (groups, members, members or more).

    A weight is -1 if the rule gives the pair less than nothing. `extent`: blocks that a list may name, at
    most `most`; a block named twice counts once, one that does not exist not at all.
    """
    tiles = cute.ceil_div(weights.shape[1], PAIR_TILE)
    weights_kernel(table, across, weights, extent, rule, most).launch(
        grid=[tiles, tiles, weights.shape[0]], block=[LANES * PAIR_TILE_WARPS, 1, 1], stream=stream
    )


@entry_name("pair_weights")
@cute.kernel
def weights_kernel(
    table: cute.Tensor,
    across: cute.Tensor,
    weights: cute.Tensor,
    extent: Int32,
    rule: cutlass.Constexpr[MatchRule],
    most: cutlass.Constexpr,
):
    """Device side of `pair_weights`: PAIR_TILE x PAIR_TILE edges, by the bits that two lists share."""
    pitch = most // 32 + 1  # odd: lanes meet different banks
    layout = cute.make_layout((2 * PAIR_TILE, pitch), stride=(pitch, 1))
    masks = cutlass.memory.SmemAllocator().allocate_tensor(Int32, layout, 16)
    tile_i, tile_j, group = cute.arch.block_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    words = (extent + 31) // 32
    for row in cutlass.range(warp, 2 * PAIR_TILE, PAIR_TILE_WARPS, unroll=1):
        for word in cutlass.range(lane, words, LANES, unroll=1):
            masks[row, word] = Int32(0)
    cute.arch.sync_threads()
    for row in cutlass.range(warp, 2 * PAIR_TILE, PAIR_TILE_WARPS, unroll=1):
        number = group * rule.group + tile_i * PAIR_TILE + row
        if row >= PAIR_TILE:
            number = group * rule.group + (tile_j - 1) * PAIR_TILE + row
        if number < table.shape[0]:
            for entry in cutlass.range(table[number, 1] + lane, table[number, 2], LANES, unroll=1):
                block = across[entry]
                if (block >= 0) & (block < extent):
                    word = masks.iterator + row * pitch + block // 32
                    cute.arch.atomic_or(word, Int32(1) << (block % 32))
    cute.arch.sync_threads()
    rows = cutlass.const_expr(PAIR_TILE // PAIR_TILE_WARPS)
    shared = cute.make_rmem_tensor(rows, Int32)
    shared.fill(0)
    for word in cutlass.range(words, unroll=1):
        mine = masks[PAIR_TILE + lane, word]
        for i in range_constexpr(rows):
            shared[i] = shared[i] + cute.arch.popc(masks[warp * rows + i, word] & mine)
    j = tile_j * PAIR_TILE + lane
    other = group * rule.group + j
    for i in range_constexpr(rows):
        row = tile_i * PAIR_TILE + warp * rows + i
        number = group * rule.group + row
        if (row < weights.shape[1]) & (j < weights.shape[1]):
            if (number < table.shape[0]) & (other < table.shape[0]):
                longer = table[number, 2] - table[number, 1] - table[other, 2] + table[other, 1]
                weight = rule.gain * shared[i] - rule.cost * cutlass.max(longer, -longer)
                weights[group, row, j] = Int16(cutlass.max(cutlass.min(weight, MOST_WEIGHT), -1))


def pair_match(
    table: cute.Tensor,
    weights: cute.Tensor,
    mates: cute.Tensor,
    stream,
    rule: cutlass.Constexpr[MatchRule],
    warps: cutlass.Constexpr,
):
    """Launch the matching of each group: mates (lists,) int32, the partner of each list, or itself.

    `warps`: warps of a CTA, which has a thread for each list of a group.
    """
    match_kernel(table, weights, mates, rule, warps).launch(
        grid=[weights.shape[0], 1, 1], block=[LANES * warps, 1, 1], stream=stream
    )


@entry_name("pair_match")
@cute.kernel
def match_kernel(
    table: cute.Tensor,
    weights: cute.Tensor,
    mates: cute.Tensor,
    rule: cutlass.Constexpr[MatchRule],
    warps: cutlass.Constexpr,
):
    """Device side of `pair_match`. Edges are (weight, smaller i ^ j): at one list, no two are alike."""
    group, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    threads = cutlass.const_expr(LANES * warps)
    smem = cutlass.memory.SmemAllocator()
    mate = smem.allocate_tensor(Int32, cute.make_layout(threads), 16)
    best = smem.allocate_tensor(Int32, cute.make_layout(threads), 16)
    done = smem.allocate_tensor(Int32, cute.make_layout(1), 16)
    base = group * rule.group
    rows = cutlass.min(table.shape[0] - base, Int32(rule.group))
    mate[thread] = Int32(-1)
    best[thread] = Int32(-1)
    if thread == 0:
        done[0] = Int32(0)
    cute.arch.sync_threads()
    left = rows
    while left > 0:
        for row in cutlass.range(warp, rows, warps, unroll=1):
            if mate[row] < 0:
                known = best[row]
                stale = known < 0
                if not stale:
                    stale = mate[known] >= 0
                if stale:
                    known = heaviest(weights[group, row, None], mate, row, rows)
                    cute.arch.sync_warp()
                    if lane == 0:
                        best[row] = known
        cute.arch.sync_threads()
        met = Boolean(False)
        if thread < rows:
            if mate[thread] < 0:
                met = best[best[thread]] == thread
        if met:
            mate[thread] = best[thread]
        found = cute.arch.popc(cute.arch.vote_ballot_sync(met))
        if (lane == 0) & (found > 0):
            cute.arch.atomic_add(done.iterator, found)
        cute.arch.sync_threads()
        left = rows - done[0]
    if thread < rows:
        mates[base + thread] = base + mate[thread]


@cute.jit
def heaviest(weights: cute.Tensor, mate: cute.Tensor, row: Int32, rows: Int32) -> Int32:
    """The free list at the other end of the heaviest edge of `row`, or `row` itself; the same in all
    lanes."""
    key = Int32(-1)
    for other in cutlass.range(cute.arch.lane_idx(), rows, LANES, unroll=8):
        found = Int32(weights[other]) * PAIR_GROUP + (PAIR_GROUP - 1 - (row ^ other))
        if (mate[other] < 0) & (other != row):
            key = cutlass.max(key, found)
    key = cute.arch.warp_redux_sync(key, "max")
    other = row
    if key >= 0:
        other = row ^ (PAIR_GROUP - 1 - key % PAIR_GROUP)
    return other


def pair_lines(
    table: cute.Tensor,
    mates: cute.Tensor,
    packed: cute.Tensor,
    stream,
    warps: cutlass.Constexpr,
    heavy: cutlass.Constexpr,
):
    """Launch the header and the table of the packed vector, see `schedule.block_lists`.

    A list alone has one line, a pair one for each of its two tiles. Lines `heavy` times longer than the mean
    come first, then those of first tiles and of lists alone, then those of second tiles, each longest first.
    """
    lines_kernel(table, mates, packed, warps, heavy).launch(
        grid=[1, 1, 1], block=[LANES * warps, 1, 1], stream=stream
    )


@entry_name("pair_lines")
@cute.kernel
def lines_kernel(
    table: cute.Tensor,
    mates: cute.Tensor,
    packed: cute.Tensor,
    warps: cutlass.Constexpr,
    heavy: cutlass.Constexpr,
):
    """Device side of `pair_lines`. Counts have lists alone and pairs in the lower 16 bits, pairs above."""
    threads = cutlass.const_expr(LANES * warps)
    layout = cute.make_layout((warps, 2), stride=(1, warps))
    scratch = cutlass.memory.SmemAllocator().allocate_tensor(Int32, layout, 16)
    thread, warp = cute.arch.thread_idx()[0], cute.arch.make_warp_uniform(cute.arch.warp_idx())
    cta, lists = Warps(warp, scratch), table.shape[0]
    work, heavies = Int32(0), Int32(0)
    for number in cutlass.range(thread, lists, threads, unroll=1):
        count, length = count_of(table, mates, number)
        work += length * ((count & 1) + (count >> 16))
    work = total(warps, work, cta, Int32(0)).all
    for number in cutlass.range(thread, lists, threads, unroll=1):
        count, length = count_of(table, mates, number)
        if Float32(length) * Float32(lists) > heavy * Float32(work):
            heavies += count
    heavies = total(warps, heavies, cta, Int32(1)).all
    leads, pairs = heavies & 0xFFFF, heavies >> 16
    if thread < HEADER:
        packed[thread] = (leads + pairs) * Int32(thread == 0)
    # Lines that are not those of second tiles: lists less pairs.
    second = Int32(0)
    for number in cutlass.range(thread, lists, threads, unroll=1):
        second += count_of(table, mates, number).lines & 1
    second = total(warps, second, cta, Int32(0)).all
    before, buffer = Int32(0), Int32(1)
    for start in cutlass.range(0, lists, threads, unroll=1):
        number = start + thread
        count, _ = count_of(table, mates, number)
        everything, warps_before = total(warps, count, cta, buffer)
        at = before + warps_before + lanes_before(count)
        lead, pair = at & 0xFFFF, at >> 16
        if count > 0:
            line, other = pairs + lead, second + pair
            if lead < leads:
                line, other = lead + pair, lead + pair + 1
            mate = mates[number]
            i, j = table[number, 0], table[mate, 0]
            word = cutlass.min(i, j) + cutlass.max(i, j) * PAIR_ROWS
            store_line(packed, line, word, table, number)
            if mate != number:
                store_line(packed, other, word + SECOND, table, number)
        before += everything
        buffer = 1 - buffer


@cute.jit
def count_of(table: cute.Tensor, mates: cute.Tensor, number: Int32) -> Count:
    """The count of a list."""
    count, length = Int32(0), Int32(0)
    if number < table.shape[0]:
        mate = mates[number]
        if mate >= number:
            length = table[number, 2] - table[number, 1]
            count = 1 + (Int32(mate > number) << 16)
    return Count(count, length)


@cute.jit
def lanes_before(count: Int32) -> Int32:
    """Sum of lines over the lanes before this one."""
    lower = (Int32(1) << cute.arch.lane_idx()) - 1
    leads = cute.arch.popc(cute.arch.vote_ballot_sync(count > 0) & lower)
    pairs = cute.arch.popc(cute.arch.vote_ballot_sync(count > 1) & lower)
    return leads + (pairs << 16)


@cute.jit
def store_line(packed: cute.Tensor, line: Int32, word: Int32, table: cute.Tensor, number: Int32):
    """Stores a line of the packed table for the entries of a list."""
    packed[HEADER + 4 * line] = word
    packed[HEADER + 4 * line + 1] = table[number, 1]
    packed[HEADER + 4 * line + 2] = table[number, 2]
    packed[HEADER + 4 * line + 3] = Int32(0)


def pair_steps(
    table: cute.Tensor,
    mates: cute.Tensor,
    across: cute.Tensor,
    kept: cute.Tensor,
    packed: cute.Tensor,
    extent: cutlass.Int32,
    stream,
    most: cutlass.Constexpr,
):
    """Launch the steps of all pairs, the part of the packed vector after its table.

    It has the dense blocks of the pairs' first lists and of their second ones, then the kept blocks of both.
    A step has an entry of the longer list, in stored order. If the other list keeps the same block, it is in
    that step; its other entries come in stored order, one in each other step. After its last one, and in
    steps that no pair has, numbers are those past the last block.
    """
    steps_kernel(Pattern(table, mates, across, kept), packed, extent, most).launch(
        grid=[table.shape[0], 1, 1], block=[LANES, 1, 1], stream=stream
    )


@entry_name("pair_steps")
@cute.kernel
def steps_kernel(pattern: Pattern, packed: cute.Tensor, extent: Int32, most: cutlass.Constexpr):
    """Device side of `pair_steps`: a warp for each list that is alone or the longer one of a pair."""
    table, mates, across, kept = pattern
    smem = cutlass.memory.SmemAllocator()
    maps = smem.allocate_tensor(Int32, cute.make_layout((2, most), stride=(most, 1)), 16)
    queue = smem.allocate_tensor(Int32, cute.make_layout(2 * LANES), 16)
    lane, number = cute.arch.lane_idx(), cute.arch.block_idx()[0]
    mate = mates[number]
    begin, end = table[number, 1], table[number, 2]
    steps = packed.iterator + HEADER + 4 * table.shape[0]
    layout = cute.make_layout((2, 2, kept.shape[0]), stride=(kept.shape[0], 2 * kept.shape[0], 1))
    vectors = cute.make_tensor(steps, layout)  # (which list, dense or kept, step)
    past = Step(extent, Int32(kept.shape[0]))
    if mate == number:
        for entry in cutlass.range(begin + lane, end, LANES, unroll=1):
            store_step(vectors, entry, Int32(0), Step(existing(across[entry], extent), kept[entry]))
            store_step(vectors, entry, Int32(1), past)
    if mate < number:
        for entry in cutlass.range(begin + lane, end, LANES, unroll=1):
            store_step(vectors, entry, Int32(0), past)
            store_step(vectors, entry, Int32(1), past)
    if mate > number:
        side = Int32(table[number, 0] > table[mate, 0])
        longer, other = Entries(begin, end), Entries(table[mate, 1], table[mate, 2])
        for block in cutlass.range(lane, extent, LANES, unroll=4):
            maps[0, block] = Int32(NONE)
            maps[1, block] = Int32(NONE)
        cute.arch.sync_warp()
        note_entries(maps[0, None], across, longer, extent)
        note_entries(maps[1, None], across, other, extent)
        cute.arch.sync_warp()
        store_pair(pattern, vectors, Maps(maps[0, None], maps[1, None]), queue, longer, other, extent, side)


@cute.jit
def store_pair(
    pattern: Pattern,
    vectors: cute.Tensor,
    maps: Maps,
    queue: cute.Tensor,
    longer: Entries,
    other: Entries,
    extent: Int32,
    side: Int32,
):
    """Stores the steps of one pair. side: 1 if the longer list has the larger number.

    `queue` has the next entries of the other list that share no block with the longer one: of these, `known`
    were looked up and `taken` stored.
    """
    across, kept = pattern.across, pattern.kept
    at, other_end = other
    lane = cute.arch.lane_idx()
    lower = (Int32(1) << lane) - 1
    taken, known = Int32(0), Int32(0)
    for start in cutlass.range(longer.begin, longer.end, LANES, unroll=1):
        entry = start + lane
        inside = entry < longer.end
        block, partner = partner_of(across, entry, longer.end, maps, extent)
        own = inside & (partner == NONE)
        owns = cute.arch.vote_ballot_sync(own)
        wanted = cute.arch.popc(owns)
        while (known - taken < wanted) & (at < other_end):
            _, found = partner_of(across, at + lane, other_end, Maps(maps.other, maps.own), extent)
            alone = (at + lane < other_end) & (found == NONE)
            votes = cute.arch.vote_ballot_sync(alone)
            if alone:
                queue[(known + cute.arch.popc(votes & lower)) % (2 * LANES)] = at + lane
            known += cute.arch.popc(votes)
            at += LANES
        cute.arch.sync_warp()
        if own:
            position = taken + cute.arch.popc(owns & lower)
            if position < known:
                partner = queue[position % (2 * LANES)]
        taken = cutlass.min(taken + wanted, known)
        cute.arch.sync_warp()
        if inside:
            other_block, value = extent, Int32(kept.shape[0])
            if partner != NONE:
                other_block, value = existing(across[partner], extent), kept[partner]
            mark = Int32(SHARED)
            if own:
                mark = Int32(0)
            store_step(vectors, entry, side, Step(block + mark, kept[entry]))
            store_step(vectors, entry, 1 - side, Step(other_block + mark, value))


@cute.jit
def note_entries(first: cute.Tensor, across: cute.Tensor, entries: Entries, extent: Int32):
    """Notes each block's first entry, by a warp."""
    for entry in cutlass.range(entries.begin + cute.arch.lane_idx(), entries.end, LANES, unroll=1):
        block = across[entry]
        if (block >= 0) & (block < extent):
            cute.arch.atomic_min(first.iterator + block, entry)


@cute.jit
def partner_of(across: cute.Tensor, entry: Int32, end: Int32, maps: Maps, extent: Int32) -> Partner:
    """The partner of an entry of a list that ends at `end`. Only a list's first entry of a block has one."""
    block, partner = extent, Int32(NONE)
    if entry < end:
        block = existing(across[entry], extent)
        if block < extent:
            if maps.own[block] == entry:
                partner = maps.other[block]
    return Partner(block, partner)


@cute.jit
def existing(block: Int32, extent: Int32) -> Int32:
    """`block`, or `extent` if there is no such block."""
    if (block < 0) | (block >= extent):
        block = extent
    return block


@cute.jit
def store_step(vectors: cute.Tensor, entry: Int32, side: Int32, step: Step):
    """Stores one list's part of the step at `entry`."""
    vectors[side, 0, entry] = step.dense
    vectors[side, 1, entry] = step.kept
