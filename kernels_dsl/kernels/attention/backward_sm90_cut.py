"""The last tiles of keys of the SM90 attention backward, cut in pieces where not every SM would have one.

A CTA has one tile, and CTAs of equal walks end together: the last of them may be few. So the walks of those
are cut, and a CTA has each piece. Pieces store float32 dK and dV in memory; each warp that finds itself the
last one with its 16 keys sums them, in the order of the pieces.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels_dsl.blocks.attention.query_blocks import QueryWalk
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.dsl import choose
from kernels_dsl.config.attention_backward import CUT_WARPS

from .backward_sm90_outputs import Outputs, store_rows
from .backward_sm90_spec import BackwardSpec
from .backward_sm90_visits import Site
from .backward_work import VECTOR, BackwardWork, Cut, KeyJob


class Piece(NamedTuple):
    """A CTA's work: tile number `tile`, of which it has piece `number` of so many."""

    tile: Int32
    number: Int32
    pieces: Int32
    is_cut: Boolean
    place: Int32
    """Number of the piece among all."""


def with_cut(work: BackwardWork, cut: tuple[cute.Tensor, cute.Tensor, Int32] | None) -> BackwardWork:
    """The problem with its last tiles cut. `cut`: sums, counts and pieces, see `Cut`."""
    if cut is None:
        return work
    sums, counts, pieces = cut
    return work._replace(cut=Cut(sums, counts, pieces, work.tiles.size - counts.shape[0] // CUT_WARPS))


def count_ctas(work: BackwardWork) -> Int32:
    """Tiles, and pieces of those that are cut."""
    cut = work.cut
    return work.tiles.size if cut is None else cut.whole + (work.tiles.size - cut.whole) * cut.pieces


def piece_of(work: BackwardWork, number: Int32) -> Piece:
    """The work of CTA number `number`, where tiles are cut."""
    cut = work.cut
    assert cut is not None
    place = number - cut.whole
    is_cut = place >= 0
    tile, piece = cut.whole + place // cut.pieces, place % cut.pieces
    return Piece(
        choose(is_cut, tile, number, Int32),
        choose(is_cut, piece, Int32(0), Int32),
        choose(is_cut, cut.pieces, Int32(1), Int32),
        is_cut,
        place,
    )


def job_of_piece(job: KeyJob, piece: Piece) -> KeyJob:
    """The part of a tile's query blocks that a piece has."""
    walk = job.walk
    assert isinstance(walk, QueryWalk)
    first = walk.first + walk.count * piece.number // piece.pieces
    end = walk.first + walk.count * (piece.number + 1) // piece.pieces
    return job._replace(walk=walk._replace(first=first, end=end))


@cute.jit
def store_piece(
    spec: cutlass.Constexpr,
    outputs: Outputs,
    dk: cute.Tensor,
    dv: cute.Tensor,
    site: Site,
):
    """Gives this warp's dK and dV of a piece. Stores those of the tile if all pieces are there."""
    cut = site.work.cut
    piece = piece_of(site.work, Int32(cute.arch.block_idx()[0]))
    tile = piece.tile - cut.whole
    warp = site.group * (WARPGROUP_THREADS // 32) + cute.arch.make_warp_uniform(site.thread // 32)
    of_dk, of_dv = (place_of(spec, x, site) for x in (dk, dv))
    size = spec.cta_keys * (spec.dim + spec.dim_v)
    start = cut.sums.iterator + piece.place * size
    put(dk, start + of_dk)
    put(dv, start + (spec.cta_keys * spec.dim + of_dv))
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    earlier = Int32(0)
    if cute.arch.lane_idx() == 0:
        count = cut.counts.iterator + (tile * CUT_WARPS + warp)
        earlier = cute.arch.atomic_add(count, Int32(1), sem="acq_rel", scope="gpu")
    earlier = cute.arch.shuffle_sync(earlier, 0)
    if earlier == cut.pieces - 1:
        cute.arch.fence_acq_rel_gpu()
        dk.fill(0.0)
        dv.fill(0.0)
        for number in cutlass.range(cut.pieces, unroll=1):
            begin = cut.sums.iterator + (tile * cut.pieces + number) * size
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
