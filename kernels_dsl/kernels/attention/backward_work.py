"""The problem of an attention backward as its kernels see it, of either family."""

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.attention.kv_blocks import Window, diagonal_shift
from kernels_dsl.blocks.attention.mask import ScoreOperands, ScoreOrigin
from kernels_dsl.blocks.attention.probabilities import ScoreStep
from kernels_dsl.blocks.attention.query_blocks import (
    Entry,
    KeyTile,
    KeyTiles,
    ListWalk,
    QueryLists,
    QueryWalk,
    entry_of,
    walk_list,
    walk_queries,
)
from kernels_dsl.blocks.attention.seqlen import SeqExtent, SeqInfo, SeqLens
from kernels_dsl.blocks.hw.dsl import inline_ptx
from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_backward import SumsOfTile


class BackwardSpec(Protocol):
    """Facts that the kernels of both families state of themselves."""

    @property
    def tile_q(self) -> int: ...
    @property
    def row_tile(self) -> int: ...
    @property
    def tile_k(self) -> int: ...
    @property
    def tile(self) -> tuple[int, int]: ...
    @property
    def variant(self) -> AttentionVariant: ...
    @property
    def from_last(self) -> bool: ...


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


class QueryGrid(NamedTuple):
    """Query tiles of a launch with a CTA for each: (blocks, heads, sequences), and where they lie."""

    shape: tuple[Int32, Int32, Int32]
    extent: SeqExtent
    tiles: RowTiles


def query_grid(mX: cute.Tensor, cu_q: cute.Tensor | None, max_q: Int32, tile: int) -> QueryGrid:
    """Tiles of `tile` rows of (rows, D, heads, B). `max_q`: rows of the longest sequence where packed."""
    rows, heads, batch, longest = mX.shape[0], mX.shape[2], mX.shape[3], mX.shape[0]
    if cu_q is not None:
        longest, batch = max_q, cute.size(cu_q) - 1
    return QueryGrid(
        (cute.ceil_div(longest, tile), heads, batch),
        SeqExtent(Int32(rows), Int32(rows), cu_q, cu_q, None),
        row_tiles(rows, heads, batch, tile, cu_q is not None),
    )


def row_tiles(rows: Int32, heads: Int32, batch: Int32, tile: int, varlen: bool) -> RowTiles:
    """Numbers of the tiles of `rows` rows of each sequence, or of all where they are packed."""
    per_head = rows // tile + batch if varlen else cute.ceil_div(rows, tile)
    return RowTiles(Int32(per_head), Int32(heads))


class Sums(NamedTuple):
    """Float32 numbers between the kernels of a backward, by query tiles in the order of `RowTiles`."""

    lse: cute.Tensor
    """(rows): log-sum-exp in base 2; +inf for rows without a key and after a sequence's last"""
    row_sums: cute.Tensor
    """(rows): sum of dO * O, less the gradient of the log-sum-exp"""
    dq: cute.Tensor | None
    """(elements): sums of dQ as the accumulators of a matrix product have them, see `SumsOfTile`; None where
    nobody asks for it"""
    turns: cute.Tensor | None
    """int32 (query tiles * shares): shares of dQ added so far; None where they come in any order"""


class CutTiles(NamedTuple):
    """So many tiles of keys of each of so many heads."""

    heads: Int32
    tiles: Int32

    @property
    def size(self) -> Int32:
        """Number of tiles in all."""
        return self.heads * self.tiles


class Cut(NamedTuple):
    """Tiles of keys whose walks are cut: the last `count` ones in the order of their start, in `pieces` each.
    Or the first ones of the first heads, in two pieces each, and the last ones of the last heads, others than
    those, in `pieces` each."""

    sums: cute.Tensor
    """float32 (pieces * elements of dK and dV of a tile)"""
    counts: cute.Tensor
    """int32 (tiles * warps), 0 before: pieces that are in `sums`"""
    first: CutTiles | None
    last: CutTiles | None
    count: Int32
    pieces: Int32


class Piece(NamedTuple):
    """Piece `number` of a tile's walk of so many pieces; number 0 of one where the tile is whole."""

    number: Int32
    pieces: Int32
    tile: Int32
    """Number of the tile among those that are cut."""
    place: Int32
    """Number of the tile's first piece among all."""


class BackwardWork(NamedTuple):
    """The problem, as every role sees it."""

    tiles: KeyTiles
    extent: SeqExtent
    window: Window
    scores: ScoreOperands
    heads_per_kv: Int32
    rows: RowTiles
    sums: Sums
    lists: QueryLists | None
    d_mask: cute.Tensor | None
    """(B, H, Sq, Sk): the gradient of the additive mask, of each head; None where nobody asks for it"""
    counter: cute.Tensor | None = None
    """int32 (1,), 0: that of `item_queue`; None where each CTA has one tile"""
    cut: Cut | None = None
    """None where each CTA has a whole tile or more"""


def describe_backward(
    spec: BackwardSpec,
    mQ: cute.Tensor,
    mK: cute.Tensor,
    seqlens: tuple[cute.Tensor, cute.Tensor, cute.Tensor | None] | None,  # `SeqLens`
    max_k: Int32,
    window: Window,
    scores: ScoreOperands,
    sums: Sums,
    lists: tuple[cute.Tensor, cute.Tensor] | None,  # `QueryLists`
    d_mask: cute.Tensor | None,
) -> BackwardWork:
    """The problem of q (Sq, D, H, B) and k (Sk, D, Hk, B). `max_k` counts where `seqlens` are given."""
    rows, keys, heads, batch = mQ.shape[0], mK.shape[0], mQ.shape[2], mQ.shape[3]
    lengths, longest = SeqLens(None, None, None), keys
    if seqlens is not None:
        lengths, longest = SeqLens(*seqlens), max_k
        batch = cute.size(lengths.cu_q) - 1
    return BackwardWork(
        tiles=KeyTiles(Int32(cute.ceil_div(longest, spec.tile_k)), Int32(mK.shape[2]), Int32(batch)),
        extent=SeqExtent(Int32(rows), Int32(keys), *lengths),
        window=window,
        scores=scores,
        heads_per_kv=heads // mK.shape[2],
        rows=row_tiles(rows, heads, batch, spec.row_tile, seqlens is not None),
        sums=sums,
        lists=None if lists is None else QueryLists(*lists),
        d_mask=d_mask,
    )


class KeyJob(NamedTuple):
    """The work of a CTA: a key tile, its sequence, and the query blocks that see it."""

    at: KeyTile
    seq: SeqInfo
    walk: QueryWalk | ListWalk
    piece: Piece | None = None
    """None where no walks are cut"""


def key_job(spec: BackwardSpec, work: BackwardWork, at: KeyTile, seq: SeqInfo) -> KeyJob:
    """The work of a key tile, whose query blocks are a range or are listed."""
    if work.lists is not None:
        return KeyJob(at, seq, walk_list(spec.variant, at, work.lists))
    return KeyJob(at, seq, walk_queries(spec.variant, spec.tile, at.n, seq, work.window))


class QueryBlock(NamedTuple):
    """A query block of a head, and its number in the lists; None where they are ranges."""

    head: Int32
    block: Int32
    place: Int32 | None = None


def entry_at(work: BackwardWork, job: KeyJob, place: Int32) -> Entry:
    """Entry number `place` of the lists."""
    assert work.lists is not None
    return entry_of(work.lists, job.at, place)


def listed_block(work: BackwardWork, job: KeyJob, place: Int32) -> QueryBlock:
    """The query block of entry number `place` of the lists."""
    entry = entry_at(work, job, place)
    return QueryBlock(job.at.kv_head * work.heads_per_kv + entry.head, entry.block, place)


def score_step(work: BackwardWork, job: KeyJob, query: QueryBlock, first: tuple[Int32, Int32]) -> ScoreStep:
    """Scores of a thread from its `first` query and key on, of a query block."""
    origin = ScoreOrigin(*first, query.head, job.at.batch)
    if query.place is None:
        masked = job.walk.masked(query.block)
    else:
        masked = entry_at(work, job, query.place).masked
    return ScoreStep(origin, job.seq, work.window, work.scores, masked)


def turn_of(spec: BackwardSpec, work: BackwardWork, job: KeyJob, query: QueryBlock) -> Int32:
    """Key tiles that add to dQ of a query block before this one."""
    if query.place is None:
        if spec.from_last:
            return last_tile_of(spec, work, job.seq, query.block) - job.at.n
        return job.at.n - first_tile_of(spec, work, job.seq, query.block)
    split = spec.variant.lists[1]
    return entry_at(work, job, query.place).turn * split + job.at.n % split


TURN_WORDS = 2
"""Words that count shares of dQ, of each warpgroup: those that were added, or whose adding began; and whether
the first is in memory, where they come in any order."""
VECTOR = 4
"""Sums of dQ that a thread has of eight columns: two of each of its two rows."""
SHARE_THREADS = 128
"""Threads that hold a share of a query tile's dQ: 64 rows, 16 a warp."""


def first_element(order: SumsOfTile, share: Int32, thread: Int32) -> tuple[Int32, Int32]:
    """Row of a thread's first vector of a share, in its tile, and the share's first column."""
    row = share // order.across * 64 + thread // 32 * 16 + thread % 32 // 4
    return row, share % order.across * order.columns


@cute.jit
def vector_pointer(order: cutlass.Constexpr, dq: cute.Tensor, share: Int32, thread: Int32) -> cute.Pointer:
    """A thread's first vector of share number `share` of all; the next is VECTOR * SHARE_THREADS on."""
    return dq.iterator + cutlass.Int64(share) * order.size + thread * order.vector


def first_tile_of(spec: BackwardSpec, work: BackwardWork, seq: SeqInfo, block: Int32) -> Int32:
    """The first key tile that adds to dQ of query block `block`."""
    if not spec.variant.left:
        return Int32(0)
    first_key = block * spec.tile_q + diagonal_shift(spec.variant, seq) - work.window.left
    return cutlass.max(first_key, 0) // spec.tile_k


def last_tile_of(spec: BackwardSpec, work: BackwardWork, seq: SeqInfo, block: Int32) -> Int32:
    """The last key tile that adds to dQ of query block `block`, under a mask with a right edge."""
    last_key = (block + 1) * spec.tile_q - 1 + diagonal_shift(spec.variant, seq) + work.window.right
    return cutlass.min(last_key, seq.k_len - 1) // spec.tile_k


@dsl_user_op
def add_vector(address: cute.Pointer, values: list[Float32], *, loc=None, ip=None) -> None:
    """`red.add` of one float32, or of four (sm_90 and later)."""
    kind, operands = ("", "$1") if len(values) == 1 else (".v4", "{$1, $2, $3, $4}")
    inline_ptx(
        None,
        (address.toint(loc=loc, ip=ip), *values),
        f"red.relaxed.gpu.global.add{kind}.f32 [$0], {operands};",
        "l" + ",f" * len(values),
        effects=True,
        loc=loc,
        ip=ip,
    )
