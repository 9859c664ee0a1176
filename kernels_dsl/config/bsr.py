"""Block-sparse products as plain frozen data, free of any compiler import: a call's layout and problem, the
configurations of the Hopper GEMM, and the choice of lists that are worked on in pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum
from typing import Any

from kernels_dsl.config.bsr_tiles import ROW, STAGE_K, tile_for_few, unit_along_k, unit_of_wide_tile
from kernels_dsl.config.family import FAMILIES
from kernels_dsl.config.gemm import Schedule
from lowering.records import NamedTuple, frozen

ALIGN = 16
"""Bytes at whose multiples factors begin, for loads of so many."""
MMA_K = 16
"""Elements of K of a WGMMA, the smallest block's."""
COPY_USES = 30
"""Kept blocks for each block along K from which on the dense matrix is worth a copy."""
SMALL_BLOCK = 64
"""Blocks with fewer rows than WGMMA's M go on its N."""
WIDE_ITEMS = 400
"""Tiles of 64 x 1024 from which on a CTA's tile may be 64 x 512; and of any two CTAs in a pair."""
MOST_IN_TURNS = 96 * 256
"""Elements of the largest tile that a warpgroup has for itself: 192 accumulators a thread."""
WIDE_ROUNDS = 2
"""Rounds of WIDE_CLUSTERS that are enough for 64 x 512 where hardly a cluster has nothing in the last one."""
WIDE_CLUSTERS = 66
"""Pairs of CTAs that an H200 runs at a time."""
PAIRED = {True: (32, 48), False: (48, 80)}
"""Rows of blocks on WGMMA's N that come in pairs, by whether the dense matrix is contiguous along K."""
PAIRED_ITEMS = {True: WIDE_ITEMS, False: 300}
"""Pairs' tiles from which on."""
KEPT_STAGES = 4
"""Stages of 64 x 64 of kept blocks in a ring of their own."""
LONG_LIST = 1400
"""Elements of K of a list from which on a large cooperative tile beats a ping-pong of smaller ones."""
PROMOTED_TILE = 192
"""Largest extent on WGMMA's N of a tile whose warpgroups hold a second set of accumulators for 64 rows."""
ITEM_K = 256
"""Elements of K that take as long as what a tile takes without any."""
SMALL_ITEM_K = 160
"""The same of tiles of 16 along a block, whose elements of K take longer."""
PIECE_K = 512
"""Elements of K that take as long as what a list in pieces takes whatever it has."""
SUM_ELEMENTS = 200
"""Elements of a tile that are read of a piece's sums while one element of K is multiplied."""
SUMS = 3
"""Pieces' sums that can be read while a piece writes its own and those of all are stored."""
TOGETHER = 8
"""Pieces whose sums are read at a time."""
LONGER = 1.25
"""Lists are cut that take so many times as long as everything when spread over all CTAs."""
GAIN = 0.7
"""They are to take at most so much of their time in pieces."""
MOST_SLOTS = 1023
"""Pieces of all lists together."""
PIECE = 1 << 30
"""Added to the panel of a work item that is a piece of a list; there are fewer panels than that."""
PAIR_ROWS = 1 << 15
"""Block rows, at most, that kernels take in pairs: a work item names two in one word."""
SECOND = 1 << 30
"""Added to that word: the item is the second tile of the pair along the dense mode."""
SHARED = 1 << 30
"""Added to a dense block's number in a list: both lists of the pair meet it there."""
PAIR_COLUMNS = 1 << 14
"""Block columns, at most, where pairs are looked for: each takes two words of shared memory."""
ROW_LISTS_HEADER = 4
"""Words before the table of lists: `blocks.schedule.block_lists.HEADER`."""
ARRIVALS = 4
"""Elements before counts of arrived pieces: the counter of work items, and what aligns them."""
MAX_TILE = {True: 128, False: 256}
"""Largest extent of a tile along a block, where it lies on WGMMA's M and on its N."""


NAN_WORD = 1
"""Of the words before counts of arrived pieces: not 0 where a launch found a sum that is NaN."""


class NanRule(Enum):
    """A launch's part in products of block rows that share tiles. There a block that a row does not keep is
    multiplied as zeros, which makes NaN of what is not finite in the dense matrix.

    TELL sets the word NAN_WORD where a sum is NaN. REDO, the product of the rows each for itself, works only
    where that word is set.
    """

    NONE = "none"
    TELL = "tell"
    REDO = "redo"


@frozen
class BsrLayout:
    """Orientation of a call: part of the kernel's key.

    `block`: rows and columns of a block as it is stored.
    The lists go over the blocks of the result: `transposed` False, a list is a block row of the sparse
    matrix and its blocks are used as they are; True, a list is a block column and its blocks are
    transposed. `dense_left`: the dense matrix is the left factor, so the lists are those of the result's
    block columns. `operand_modes`: as in `kernels_dsl.config.gemm.EntryLayout`.
    `scaled`: a scale a kept block comes before the epilogue's operands. `nans`: see `NanRule`.
    """

    block: tuple[int, int]
    transposed: bool = False
    dense_left: bool = False
    operand_modes: tuple[str, ...] = ()
    scaled: bool = False
    nans: NanRule = NanRule.NONE


@frozen
class BsrProblem:
    """One product: D (m, n) over l batches, of nnz blocks of (block_mn, block_k) and a dense matrix.

    `block_mn` is a block's extent along D's blocked mode, `block_k` along the contraction, of extent k.
    `sparse_k_major`, `dense_k_major`: K is the contiguous mode. dtypes: "bf16", "fp16", "fp32", and "fp8" of
    the factors, which have a scale a block then.
    `d_align`: bytes that D's address and row pitch are aligned to. `operand_bytes`: of elementwise operands.
    """

    m: int
    n: int
    k: int
    nnz: int
    block_mn: int
    block_k: int
    l: int = 1
    dtype: str = "bf16"
    d_dtype: str = "bf16"
    sparse_k_major: bool = True
    dense_k_major: bool = False
    dense_left: bool = False
    d_align: int = 16
    operand_bytes: int = 0

    @property
    def other(self) -> int:
        """Extent of D's dense mode."""
        return self.m if self.dense_left else self.n

    @property
    def flops(self) -> int:
        """Useful floating-point operations: those of the kept blocks."""
        return 2 * self.nnz * self.block_mn * self.block_k * self.other * self.l


@frozen
class Sm90BsrConfig:
    """One instance of the TMA + WGMMA kernel over lists of kept blocks.

    `tile_s`: elements of a CTA's tile along the blocked mode of D, a divisor of the block's extent there;
    `tile_x`: along the dense mode. `sparse_on_m` puts the blocks on WGMMA's M (64 rows at least) and the
    dense matrix on its N, False the other way round. `cluster_s`, `cluster_x`: CTAs of a cluster along
    either mode; those along s share the dense tile, those along x the kept block. `unit_k`: elements of K of
    a block that one TMA load brings, `units` of them make a stage. `stages` 0 takes as many as fit.
    `epi_tma` False stores D with predicated stores, which any alignment and either order of D allow. A
    cooperative tile of 64 rows with an N above 256 is shared by two warpgroups along N. There kept blocks may
    have a ring of their own, of `kept_stages` parts of STAGE_K along K, beside stages of the dense matrix:
    CTAs that share kept blocks then wait for each other's progress along these only. `split`: lists may come
    in pieces. `pairs`: a cluster's two CTAs take two block rows that share columns, and multicast to each
    other what both need; or of a row without a partner two tiles along x, which is why `cluster_x` is 2.
    `rows_together`: so many block rows are one of 64 rows, with the columns that any of them keeps; the
    config is that of the product of such rows. `config.bsr_together` says where, and what for. `deep_boxes`:
    a TMA box has all columns of a tile that the dense matrix, contiguous along them, has in whole 128 bytes.
    """

    tile_s: int
    tile_x: int
    sparse_on_m: bool
    unit_k: int
    units: int = 1
    cluster_s: int = 1
    cluster_x: int = 1
    schedule: Schedule = Schedule.COOPERATIVE
    stages: int = 0
    epi_tma: bool = True
    kept_stages: int = 0
    split: bool = False
    pairs: bool = False
    rows_together: int = 1
    deep_boxes: bool = False

    family = "sm90"
    traits = FAMILIES[family]

    def with_plain_stores(self) -> Sm90BsrConfig:
        """The same without TMA stores, which unaligned results cannot have."""
        return replace(self, epi_tma=False)

    @property
    def tile(self) -> tuple[int, int]:
        """(M, N) of a tile in the kernel's sense."""
        return (self.tile_s, self.tile_x) if self.sparse_on_m else (self.tile_x, self.tile_s)

    @property
    def cluster(self) -> tuple[int, int]:
        """(M, N) of a cluster in the kernel's sense."""
        pair = (2, 1) if self.pairs else (self.cluster_s, self.cluster_x)
        return pair if self.sparse_on_m else (pair[1], pair[0])


@frozen
class PiecesRule:
    """A list is cut from `least` entries on, into pieces of `length` at least.

    In p pieces n entries take as long as n / p + (p + SUMS) * each + all: reading each piece's sums, writing
    them, and what does not depend on their size.
    """

    least: float
    length: int
    each: float
    all: float

    def pieces(self, entries: int) -> int:
        """Pieces of a list of so many entries; `sparse.lists.pack_pieces` does the same on the GPU."""
        count = max(1, min(entries // self.length, int(math.sqrt(entries / self.each))))
        if count > TOGETHER:
            count -= count % TOGETHER
        time = entries / count + (count + SUMS) * self.each + self.all
        return count if entries >= self.least and time <= GAIN * entries else 1


def tiles_of_list(problem: BsrProblem, config: Sm90BsrConfig) -> int:
    """Cluster tiles of D that one list makes, in all batches."""
    along_block = problem.block_mn // (config.tile_s * config.cluster_s)
    return along_block * -(-problem.other // (config.tile_x * config.cluster_x)) * problem.l


def pieces_rule(
    problem: BsrProblem, config: Sm90BsrConfig, ctas: int, longest: int | None = None
) -> PiecesRule | None:
    """The cut of lists into pieces; None where no list can be worth it. `longest`: its entries, if known."""
    lists = (problem.n if problem.dense_left else problem.m) // problem.block_mn
    item_k = ITEM_K if config.tile_s > 16 else SMALL_ITEM_K
    work = (problem.nnz + lists * item_k / problem.block_k) * tiles_of_list(problem, config)
    share = work / max(1, ctas // (config.cluster_s * config.cluster_x))
    if longest is None:
        longest = min(problem.k // problem.block_k, problem.nnz)
    rule = PiecesRule(
        least=LONGER * share,
        length=max(math.ceil(share / 2), -(-problem.nnz // MOST_SLOTS)),
        each=config.tile_s * config.tile_x / SUM_ELEMENTS / problem.block_k,
        all=PIECE_K / problem.block_k,
    )
    return rule if rule.pieces(longest) > 1 else None


def pieces_memory(problem: BsrProblem, config: Sm90BsrConfig, rule: PiecesRule) -> tuple[int, int]:
    """Elements of (counters, workspace) for the sums of pieces: `blocks.reduce.partial_sums`."""
    tiles = problem.nnz // rule.length * tiles_of_list(problem, config) * config.cluster_s * config.cluster_x
    sharing = 1 if config.schedule is Schedule.PINGPONG else 3  # warpgroups, at most
    return ARRIVALS + sharing * tiles, config.tile_s * config.tile_x * tiles


def tile_along_block(extent: int, sparse_on_m: bool) -> int:
    """The largest tile that divides a block's extent, a multiple of WGMMA's M of 64, or of 16 on its N."""
    step = 64 if sparse_on_m else 16
    return max(t for t in range(step, MAX_TILE[sparse_on_m] + 1, step) if extent % t == 0)


def choose(problem: BsrProblem) -> Sm90BsrConfig | None:
    """The configuration for a problem; None where this family has none (the caller takes the SM80 one)."""
    if problem.dtype == "fp8":
        return _choose_fp8(problem)
    if problem.dtype not in ("bf16", "fp16"):
        return None
    on_m = problem.block_mn % SMALL_BLOCK == 0
    tile_s = tile_along_block(problem.block_mn, on_m)
    blocked = problem.n if problem.dense_left else problem.m
    kept_k = problem.nnz * problem.block_k * problem.block_mn // max(1, blocked)
    epi_tma = stores_by_tma(problem)
    if on_m and tile_s == 64 and _shares_wide_tiles(problem, blocked // tile_s):
        return Sm90BsrConfig(
            tile_s, 512, True, unit_of_wide_tile(problem.block_k), cluster_x=2, epi_tma=epi_tma,
            kept_stages=KEPT_STAGES,
            pairs=problem.block_mn == tile_s and goes_in_pairs(problem, blocked // tile_s),
        )  # fmt: skip
    tiles = _tiles(problem, on_m, tile_s, kept_k)
    unit_k = unit_along_k(problem.block_k, sum(tiles.tile), on_m, problem.dense_k_major)
    if not on_m and math.prod(tiles.tile) == MOST_IN_TURNS and problem.block_k > STAGE_K:
        unit_k = min(unit_k, STAGE_K // 2)  # with longer ones registers are spilled
    units = _units(min(problem.block_k, STAGE_K), on_m)
    deep = _has_deep_boxes(problem, on_m)
    chosen = replace(tiles, unit_k=unit_k, units=units, epi_tma=epi_tma, deep_boxes=deep)
    if _shares_columns(problem, chosen, blocked // tile_s):
        return replace(chosen, cluster_x=2, pairs=True)
    return chosen


def unpaired(config: Sm90BsrConfig) -> Sm90BsrConfig:
    """The configuration for the same problem with each list for itself."""
    if not config.pairs:
        return config
    return replace(config, pairs=False, cluster_x=2 if config.sparse_on_m else 1)


def _shares_wide_tiles(problem: BsrProblem, tiles: int) -> bool:
    """True where pairs of CTAs with 64 x 512 each beat 64 x 256 in turns: a block serves twice as much.

    3 to 8 % on an H200, and a fifth where rows of the dense matrix begin within a sector of 32 bytes, where
    there is work for six rounds, or for whole ones, and no more of it behind the dense mode's end.
    """
    if problem.dense_k_major or problem.block_k < STAGE_K or -(-problem.other // 512) % 2:
        return False
    items = tiles * -(-problem.other // 1024) * problem.l
    rounds = -(-items // WIDE_CLUSTERS)
    full = rounds >= WIDE_ROUNDS and items >= 0.9 * rounds * WIDE_CLUSTERS and -problem.other % 512 < ROW
    return items >= WIDE_ITEMS or full


def goes_in_pairs(problem: BsrProblem, rows: int) -> bool:
    """True where block rows can be looked through for pairs that share columns."""
    return problem.nnz > 0 and 2 <= rows <= PAIR_ROWS and problem.k // problem.block_k <= PAIR_COLUMNS


def _shares_columns(problem: BsrProblem, config: Sm90BsrConfig, rows: int) -> bool:
    """True where pairs of blocks on WGMMA's N gain: loads of the dense matrix are many, or all that counts.

    On an H200 6 to 16 % where it is contiguous along K, else 2 to 12 %; there blocks of 32 rows lose.
    """
    tiles = -(-problem.other // config.tile_x)
    if problem.block_mn not in PAIRED[problem.dense_k_major] or problem.block_k < 2 * MMA_K or tiles % 2:
        return False
    items = rows * (tiles // 2) * problem.l
    return goes_in_pairs(problem, rows) and items >= PAIRED_ITEMS[problem.dense_k_major]


def _has_deep_boxes(problem: BsrProblem, on_m: bool) -> bool:
    """True where blocks of 16 along K make boxes of 16 rows, of which few have more: 8 to 20 % on an H200."""
    if on_m or problem.block_k != MMA_K or problem.dense_k_major:
        return False
    return problem.other % ROW == 0


def stores_by_tma(problem: BsrProblem) -> bool:
    """True where D's rows have the alignment that TMA stores need."""
    row = problem.n * (4 if problem.d_dtype == "fp32" else 2)
    return problem.d_align >= 16 and row % 16 == 0


def _choose_fp8(problem: BsrProblem) -> Sm90BsrConfig:
    """Tiles of which a warpgroup holds two sets of accumulators; the fastest measured at 8192 x 8192 x 8192,
    25 % kept, with blocks where D's columns are the kernel's N.
    """
    on_m = problem.block_mn % SMALL_BLOCK == 0 and not problem.dense_left
    unit_k = min(-(-problem.block_k // 32) * 32, 2 * STAGE_K)
    steps = (64, 128) if on_m else range(16, PROMOTED_TILE + 1, 16)
    tile_s = max(t for t in steps if problem.block_mn % t == 0)
    units, schedule = 1, Schedule.COOPERATIVE
    if on_m:
        tile_x = 128 if problem.other <= 128 else PROMOTED_TILE
        schedule = Schedule.PINGPONG if tile_s == 64 else schedule
    else:
        tile_x = 128 if problem.other <= 128 or tile_s > 64 else 256
        # A set of accumulators for each block of a stage.
        units = 1 if problem.block_k > STAGE_K else max(1, min(4, 2 * STAGE_K // unit_k))
        while units > 1 and (units + 1) * tile_s * tile_x // 256 > PROMOTED_TILE:
            units //= 2
    pairs = on_m and problem.block_mn // tile_s % 2 == 0 and schedule is Schedule.COOPERATIVE
    return Sm90BsrConfig(
        tile_s, tile_x, on_m, unit_k, units, schedule=schedule, epi_tma=stores_by_tma(problem),
        cluster_s=2 if pairs else 1, cluster_x=2 if not on_m and problem.other >= 2 * tile_x else 1,
    )  # fmt: skip


def reads_other_order(problem: BsrProblem) -> bool:
    """True where a copy of a K-major dense matrix in the other order pays on Hopper.

    Blocks of 16 along K make rows of 32 bytes of it, which come at half the rate (74 against 149 TFLOPS of
    blocks of 16 x 16 on an H200). A copy takes as long as that costs where an element is used some 30 times.
    """
    if problem.dtype == "fp8" or not problem.dense_k_major or problem.block_k != MMA_K:
        return False
    return problem.nnz >= COPY_USES * (problem.k // problem.block_k)


def _units(unit_k: int, on_m: bool) -> int:
    """Blocks of a stage: what fills 128 bytes of K with 64 rows; of narrow ones two are quicker."""
    return STAGE_K // unit_k if on_m else min(2, STAGE_K // unit_k)


def _tiles(problem: BsrProblem, on_m: bool, tile_s: int, kept_k: int) -> Sm90BsrConfig:
    """Tile, cluster and schedule: the fastest measured on one H200 at 8192 x 8192 x 8192, 25 % and 10 % kept.

    `kept_k` is the mean length of a list along K. Where it is short the epilogue takes a large part of the
    time, and a ping-pong schedule hides it.
    """
    few = tile_for_few(problem.other, on_m)
    wide = problem.other > 256
    if not on_m:
        return _tiles_beside(problem, tile_s, few)
    if tile_s < 128:
        return Sm90BsrConfig(
            tile_s, few or 256, True, 0, cluster_x=2 if wide else 1, schedule=Schedule.PINGPONG
        )
    pairs = problem.block_mn // tile_s % 2 == 0
    cluster_s, cluster_x = (2, 1) if pairs else (1, 2 if wide else 1)
    if few is not None:
        return Sm90BsrConfig(tile_s, few, True, 0, cluster_s=cluster_s, schedule=Schedule.PINGPONG)
    long = Sm90BsrConfig(tile_s, 256, True, 0, cluster_s=cluster_s, cluster_x=cluster_x)
    if pairs or kept_k < LONG_LIST:
        return replace(long, tile_x=192, schedule=Schedule.PINGPONG)
    return long


def _tiles_beside(problem: BsrProblem, tile_s: int, few: int | None) -> Sm90BsrConfig:
    """Tiles with the blocks on WGMMA's N: both warpgroups share those that have too many accumulators."""
    if tile_s > 128:
        return Sm90BsrConfig(tile_s, 128, False, 0)
    tile_x = few or (128 if tile_s > 64 and problem.dense_k_major else 256)
    shared = tile_s * tile_x > MOST_IN_TURNS
    return Sm90BsrConfig(
        tile_s, tile_x, False, 0, schedule=Schedule.COOPERATIVE if shared else Schedule.PINGPONG
    )


PAIR_GROUP = 1024
"""Lists of a group, at most: an edge has ten bits for its place among equal ones."""
PAIR_TILE = 32
"""Lists, on either side, of which a CTA counts what they share."""
PAIR_TILE_WARPS = 4
_PAIR_COLUMNS = (2048, PAIR_COLUMNS)
_PAIR_WARPS = (4, 32)


@frozen
class MatchRule:
    """The choice of lists that are pairs.

    `group`: neighbours in the order of their lengths, PAIR_GROUP at most, among which pairs are looked for. A
    pair is worth `gain` times the blocks that both lists have, less `cost` times the difference of their
    lengths, and has to be worth 0.
    """

    group: int = PAIR_GROUP
    gain: int = 2
    cost: int = 5


def most_columns(extent: int) -> int:
    """Blocks that shared memory is set aside for where a list may name `extent`, PAIR_COLUMNS at most."""
    return next(most for most in _PAIR_COLUMNS if extent <= most)


def match_warps(lists: int) -> int:
    """Warps of a CTA that looks for pairs among so many lists: each list has a thread."""
    return next((warps for warps in _PAIR_WARPS if lists <= 8 * warps), _PAIR_WARPS[-1])


class RowListParts(NamedTuple):
    """Places in the one vector that `kernels.lists.rows` makes of a block-sparse format, in words.

    Before `first` lies the packed vector of `blocks.schedule.block_lists`. Then come where each list starts,
    the block of each entry along the other mode, and its number among the values, each 16-byte aligned.
    """

    first: Any
    across: Any
    kept: Any
    end: Any


def row_list_parts(rows: Any, entries: Any) -> RowListParts:
    """The places for so many lists and entries: integers, or the kernel's."""
    first = (ROW_LISTS_HEADER + 4 * rows + 2 * entries + 3) // 4 * 4
    across = first + (rows + 4) // 4 * 4
    kept = across + (entries + 3) // 4 * 4
    return RowListParts(first, across, kept, kept + entries)
