"""Tiles of keys of the SM90 attention backward whose walks are cut: CTAs start one after another, and end
together.

A CTA has one tile. CTAs that start together come to each query block together, and where shares of dQ are
added in a fixed order the last of them waits for all others there, and is that much later from then on. So
the first tiles are cut in two pieces of many lengths: SMs get their next tiles one after another, and go on
so to the end. There the last tiles are cut, and the SMs that are ahead take more of the pieces.

    CTAs | first tiles, shorter pieces first | whole tiles | last tiles: piece 0 of each, piece 1 ...

Where no first tiles are cut, the last ones are those of the usual order, and the pieces of one follow one
another.

The tiles that visit a query block start in the order of their keys: one that waits for its turn waits for
tiles that have started before it. Pieces store float32 dK and dV in memory; each warp that finds itself the
last one with its 16 keys sums them, in the order of the pieces.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.query_blocks import KeyTile, KeyTiles, QueryWalk
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.dsl import choose
from kernels_dsl.config.attention_backward import CUT_WARPS, FIRST_PIECES

from .backward_sm90_outputs import Outputs, store_rows
from .backward_sm90_spec import BackwardSpec
from .backward_sm90_tiles import job_of, tile_of
from .backward_sm90_visits import Site
from .backward_work import VECTOR, BackwardWork, Cut, CutTiles, KeyJob, Piece

Ends = tuple[tuple[Int32, Int32], tuple[Int32, Int32]]
CutArguments = tuple[cute.Tensor, cute.Tensor, Ends | None, Int32, Int32]
"""Sums, counts, (heads, tiles) of `Cut.first` and of `Cut.last`, `Cut.count` and pieces."""


class Part(NamedTuple):
    """Parts `begin` to `end` - 1 of a walk that has so many."""

    begin: Int32
    end: Int32
    parts: Int32


def with_cut(work: BackwardWork, cut: CutArguments | None) -> BackwardWork:
    """The problem with some of its tiles cut."""
    if cut is None:
        return work
    sums, counts, ends, count, pieces = cut
    first, last = (None, None) if ends is None else (CutTiles(*end) for end in ends)
    return work._replace(cut=Cut(sums, counts, first, last, count, pieces))


def count_ctas(work: BackwardWork) -> Int32:
    """Tiles, and pieces of those that are cut."""
    cut, tiles = work.cut, work.tiles.size
    if cut is None:
        return tiles
    ctas = tiles + cut.count * (cut.pieces - 1)
    return ctas if cut.first is None else ctas + cut.first.size * (FIRST_PIECES - 1)


def job_of_cta(spec: BackwardSpec, work: BackwardWork, number: Int32) -> KeyJob:
    """The work of CTA number `number`, where tiles are cut."""
    if work.cut.first is not None:
        return job_of_ends(spec, work, number)
    tile, piece = last_piece(work, number)
    job = job_of(spec, work, tile_of(spec, work, tile))
    assert isinstance(job.walk, QueryWalk)
    return job._replace(walk=part_of(job.walk, Part(piece.number, piece.number + 1, piece.pieces)))


def last_piece(work: BackwardWork, number: Int32) -> tuple[Int32, Piece]:
    """Tile and piece of CTA number `number`, where only the last tiles are cut."""
    cut = work.cut
    whole = work.tiles.size - cut.count
    place = number - whole
    is_cut, tile = place >= 0, place // cut.pieces
    return choose(is_cut, whole + tile, number, Int32), Piece(
        choose(is_cut, place % cut.pieces, Int32(0), Int32),
        choose(is_cut, cut.pieces, Int32(1), Int32),
        tile,
        tile * cut.pieces,
    )


def piece_of(work: BackwardWork, job: KeyJob) -> Piece:
    """The piece that a CTA has. It is found anew where that needs no registers meanwhile."""
    if job.piece is not None:
        return job.piece
    return last_piece(work, Int32(cute.arch.block_idx()[0]))[1]


@cute.jit
def job_of_ends(spec: cutlass.Constexpr, work: BackwardWork, number: Int32) -> KeyJob:
    """The same, where the first tiles are cut, too."""
    first, last, pieces = work.cut.first, work.cut.last, work.cut.pieces
    head, n, zero = Int32(0), Int32(0), Int32(0)
    piece, part = Piece(zero, Int32(1), zero, zero), Part(zero, Int32(1), Int32(1))
    place = number - FIRST_PIECES * first.size
    whole = work.tiles.size - first.size - last.size
    if place < 0:
        n = number // (FIRST_PIECES * first.heads)
        rank = number % (FIRST_PIECES * first.heads)  # by length
        head, parts = rank, FIRST_PIECES * FIRST_PIECES * first.heads
        part = Part(zero, 2 * rank + 1, parts)
        if rank >= first.heads:
            head = FIRST_PIECES * first.heads - 1 - rank
            part = Part(2 * head + 1, parts, parts)
        tile = head * first.tiles + n
        piece = Piece(Int32(rank >= first.heads), Int32(FIRST_PIECES), tile, FIRST_PIECES * tile)
    elif place < whole:
        head, n = whole_tile(spec, work, place)
    else:
        at = place - whole
        index, number = at % last.size, at // last.size
        head = work.tiles.kv_heads * work.tiles.batch - last.heads + index % last.heads
        n = work.tiles.n - last.tiles + index // last.heads
        part = Part(number, number + 1, pieces)
        tile, start = first.size + index, FIRST_PIECES * first.size + index * pieces
        piece = Piece(part.begin, pieces, tile, start)
    batch = head // work.tiles.kv_heads
    job = job_of(spec, work, KeyTile(n, head - batch * work.tiles.kv_heads, batch))
    assert isinstance(job.walk, QueryWalk)
    return job._replace(walk=part_of(job.walk, part), piece=piece)


@cute.jit
def whole_tile(spec: cutlass.Constexpr, work: BackwardWork, place: Int32) -> tuple[Int32, Int32]:
    """Head, of all sequences, and key tile of number `place` of those that are not cut."""
    tiles, first, last = work.tiles, work.cut.first, work.cut.last
    start, keys = Int32(0), KeyTiles(tiles.n - first.tiles, first.heads, Int32(1))
    skipped = first.tiles
    if place >= keys.size:
        place = place - keys.size
        start, skipped = first.heads, Int32(0)
        keys = KeyTiles(tiles.n, tiles.kv_heads * tiles.batch - first.heads - last.heads, Int32(1))
        if place >= keys.size:
            place = place - keys.size
            start = start + keys.kv_heads
            keys = KeyTiles(tiles.n - last.tiles, last.heads, Int32(1))
    found = tile_of(spec, work._replace(tiles=keys), place)
    return start + found.kv_head, skipped + found.n


def part_of(walk: QueryWalk, part: Part) -> QueryWalk:
    """A part of a tile's query blocks."""
    first = walk.first + walk.count * part.begin // part.parts
    return walk._replace(first=first, end=walk.first + walk.count * part.end // part.parts)


@cute.jit
def store_piece(
    spec: cutlass.Constexpr,
    outputs: Outputs,
    dk: cute.Tensor,
    dv: cute.Tensor,
    site: Site,
):
    """Gives this warp's dK and dV of a piece. Stores those of the tile if all pieces are there."""
    cut, piece = site.work.cut, piece_of(site.work, site.job)
    warp = site.group * (WARPGROUP_THREADS // 32) + cute.arch.make_warp_uniform(site.thread // 32)
    of_dk, of_dv = (place_of(spec, x, site) for x in (dk, dv))
    size = spec.cta_keys * (spec.dim + spec.dim_v)
    start = cut.sums.iterator + (piece.place + piece.number) * size
    put(dk, start + of_dk)
    put(dv, start + (spec.cta_keys * spec.dim + of_dv))
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    earlier = Int32(0)
    if cute.arch.lane_idx() == 0:
        count = cut.counts.iterator + (piece.tile * CUT_WARPS + warp)
        earlier = cute.arch.atomic_add(count, Int32(1), sem="acq_rel", scope="gpu")
    earlier = cute.arch.shuffle_sync(earlier, 0)
    if earlier == piece.pieces - 1:
        cute.arch.fence_acq_rel_gpu()
        dk.fill(0.0)
        dv.fill(0.0)
        for number in cutlass.range(piece.pieces, unroll=1):
            begin = cut.sums.iterator + (piece.place + number) * size
            add(dk, begin + of_dk)
            add(dv, begin + (spec.cta_keys * spec.dim + of_dv))
        store_rows(spec, outputs.dv, dv, Float32(1.0), site)
        store_rows(spec, outputs.dk, dk, site.work.scores.scale, site)


def place_of(spec: BackwardSpec, acc: cute.Tensor, site: Site) -> Int32:
    """Of the first vector that a thread has of a tile's dK or dV: threads of a warpgroup lie side by side."""
    return site.group * (cute.size(acc) * WARPGROUP_THREADS) + site.thread * VECTOR


def put(acc: cute.Tensor, start: cute.Pointer) -> None:
    """Stores a thread's accumulators in vectors, the first at `start`."""
    for i in range(cute.size(acc) // VECTOR):
        cute.autovec_copy(vector_of(acc, i), vector_at(start, i))


def add(acc: cute.Tensor, start: cute.Pointer) -> None:
    """Adds what `put` stored."""
    for i in range(cute.size(acc) // VECTOR):
        found = cute.make_rmem_tensor(VECTOR, Float32)
        cute.autovec_copy(vector_at(start, i), found)
        for j in range(VECTOR):
            acc[VECTOR * i + j] = acc[VECTOR * i + j] + found[j]


def vector_of(acc: cute.Tensor, i: int) -> cute.Tensor:
    """Vector number `i` of accumulators."""
    return cute.make_tensor(acc.iterator + VECTOR * i, cute.make_layout(VECTOR))


def vector_at(start: cute.Pointer, i: int) -> cute.Tensor:
    """Its place in memory."""
    place = (start + i * (VECTOR * WARPGROUP_THREADS)).align(16)
    return cute.make_tensor(place, cute.make_layout(VECTOR))
