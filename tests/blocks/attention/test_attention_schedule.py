"""Tile numbers and key block visits of attention, run in the emulator and compared with plain Python."""

from __future__ import annotations

import itertools
import math

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32

import lowering
from kernels_dsl.blocks.attention.kv_blocks import TileShape, Window, visit_range
from kernels_dsl.blocks.attention.query_tiles import QueryTiles, decode_query_tile
from kernels_dsl.blocks.attention.seqlen import V_STEP, SeqExtent, SeqInfo, padded_start, seq_info
from kernels_dsl.blocks.attention.work import kv_head
from kernels_dsl.config.attention import AttentionVariant
from lowering import emulator


@cute.kernel
def _decode_kernel(out: cute.Tensor, tiles: QueryTiles):
    index = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
    if index < tiles.size:
        at = decode_query_tile(index, tiles)
        out[index, 0], out[index, 1], out[index, 2] = at.m, at.head, at.batch


@lowering.jit
def _decode(
    out: cute.Tensor, m: Int32, heads: Int32, batch: Int32, groups: Int32, lead: Int32 | None, stream
):
    """out (tiles, 3): (tile, head, batch) of each number."""
    tiles = QueryTiles(m, heads, batch, groups, lead)
    _decode_kernel(out, tiles).launch(
        grid=(cute.ceil_div(tiles.size, 32), 1, 1), block=(32, 1, 1), stream=stream
    )


@pytest.mark.parametrize(
    ("m", "heads", "batch", "groups", "lead"),
    [(5, 4, 3, 5, None), (1, 7, 1, 7, None), (3, 2, 2, 1, None), (4, 5, 1, 2, None),
     (4, 5, 1, 2, 1), (3, 4, 2, 1, 3), (2, 6, 1, 3, 2), (3, 5, 1, 2, 4)],
)  # fmt: skip
def test_each_tile_has_one_number(m, heads, batch, groups, lead):
    out = torch.full((m * heads * batch, 3), -1, dtype=torch.int32)
    with emulator.run(arch="sm_90a"):
        _decode(out, m, heads, batch, groups, lead)
    found = [tuple(row) for row in out.tolist()]
    assert sorted(found) == sorted(itertools.product(range(m), range(heads), range(batch)))
    # Within a group of heads the last tiles come first; a group ends where the tile number jumps up.
    starts = [n for n in range(1, len(found)) if found[n][0] > found[n - 1][0]]
    if lead is not None:
        width = -(-heads * batch // groups)
        if lead <= width:
            assert {b * heads + h for _, h, b in found[: lead * m]} == set(range(lead))
        groups += lead < width
    assert len(starts) == (groups - 1 if m > 1 else 0)


@cute.kernel
def _visit_kernel(
    out: cute.Tensor, seq: SeqInfo, window: Window, variant: cutlass.Constexpr, tile: cutlass.Constexpr
):
    m = Int32(cute.arch.thread_idx()[0])
    if m < cute.size(out, mode=[0]):
        visit = visit_range(variant, TileShape(*tile), m, seq, window)
        out[m, 0], out[m, 1], out[m, 2], out[m, 3] = visit.right, visit.whole, visit.left, visit.last


@lowering.jit
def _visit(
    out: cute.Tensor, q_len: Int32, k_len: Int32, left: Int32, right: Int32, stream,
    variant: cutlass.Constexpr, tile: cutlass.Constexpr,
):  # fmt: skip
    """out (query tiles, 4): the visit of each tile."""
    seq = SeqInfo(Int32(0), Int32(0), q_len, k_len)
    _visit_kernel(out, seq, Window(left, right), variant, tile).launch(
        grid=(1, 1, 1), block=(32, 1, 1), stream=stream
    )


def _allowed(lengths, left, right, variant) -> torch.Tensor:
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None]
    shift = 0 if variant.top_left else lengths[1] - lengths[0]
    allowed = torch.ones(lengths, dtype=torch.bool)
    if variant.right:
        allowed &= j <= i + shift + right
    if variant.left:
        allowed &= j >= i + shift - left
    return allowed


@pytest.mark.parametrize("lengths", [(150, 200), (200, 150), (64, 64), (1, 130), (130, 1)])
@pytest.mark.parametrize("sides", [(True, False), (True, True), (False, True), (False, False)])
@pytest.mark.parametrize("widths", [(0, 0), (40, 10), (500, 3)])
def test_visits_cover_the_mask(lengths, sides, widths):
    """Every block with a key that counts is visited; blocks called whole are; at least one is visited."""
    tile, (left, right) = (32, 16), widths
    tiles = math.ceil(lengths[0] / tile[0])
    for top_left in (False, True):
        variant = AttentionVariant(right=sides[0], left=sides[1], top_left=top_left)
        out = torch.zeros((tiles, 4), dtype=torch.int32)
        with emulator.run(arch="sm_90a"):
            _visit(out, *lengths, left, right, variant=variant, tile=tile)
        allowed = _allowed(lengths, left, right, variant)
        for m, (n_right, n_whole, n_left, last) in enumerate(out.tolist()):
            assert min(n_right, n_whole, n_left) >= 0 and n_right + n_whole + n_left >= 1
            visited = [last - p for p in range(n_right + n_whole + n_left)]
            rows = allowed[m * tile[0] : (m + 1) * tile[0]]
            blocks = [
                rows[:, b * tile[1] : (b + 1) * tile[1]] for b in range(math.ceil(lengths[1] / tile[1]))
            ]
            assert all(b in visited for b, part in enumerate(blocks) if bool(part.any()))
            for b in visited[n_right : n_right + n_whole]:
                assert blocks[b].shape[1] == tile[1] and bool(blocks[b].all())
            missed = sum(blocks[b].shape[1] == tile[1] and bool(blocks[b].all()) for b in visited[:n_right])
            assert missed == 0 or n_whole == 0


@cute.kernel
def _places_kernel(out: cute.Tensor, dense: SeqExtent, packed: SeqExtent, heads_per_kv: Int32):
    n = Int32(cute.arch.thread_idx()[0])
    if n < cute.size(out, mode=[0]):
        seq, same = seq_info(packed, n), seq_info(dense, n)
        values = (*seq, *same, padded_start(seq.k_start, n), kv_head(n, heads_per_kv))
        for i, value in enumerate(values):
            out[n, i] = value


@lowering.jit
def _places(
    out: cute.Tensor, cu_q: cute.Tensor, cu_k: cute.Tensor, used: cute.Tensor, heads_per_kv: Int32, stream
):
    dense = SeqExtent(Int32(70), Int32(90), None, None, None)
    packed = SeqExtent(Int32(51), Int32(47), cu_q, cu_k, used)
    _places_kernel(out, dense, packed, heads_per_kv).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def test_places_of_sequences_and_heads():
    q_lens, k_lens, used = (3, 0, 1, 40, 7), (5, 8, 0, 33, 1), (5, 2, 4, 33, 0)
    starts = [[0, *itertools.accumulate(lens)] for lens in (q_lens, k_lens)]
    out = torch.full((5, 10), -1, dtype=torch.int32)
    with emulator.run(arch="sm_90a"):
        _places(out, *(torch.tensor(x).int() for x in (*starts, used)), 3)
    padded = 0  # room for each sequence, in steps of V_STEP: none begins before the end of the one before
    for n, row in enumerate(out.tolist()):
        assert row[:4] == [starts[0][n], starts[1][n], q_lens[n], min(used[n], k_lens[n])]
        assert row[4:8] == [0, 0, 70, 90]
        assert row[8] % V_STEP == 0 and row[8] >= padded
        padded = row[8] + k_lens[n]
        assert row[9] == n // 3


def test_places_stay_within_the_tensors_whatever_prefix_sums_say():
    cu_q, cu_k = [-7, 20, 10, 2**31 - 1, -(2**31)], [60, 3, 40, 99, 2]
    used = [4, -5, 2**31 - 1, 9]
    out = torch.full((4, 10), -1, dtype=torch.int32)
    with emulator.run(arch="sm_90a"):
        _places(out, *(torch.tensor(x).int() for x in (cu_q, cu_k, used)), 3)
    found = [tuple(row[:4]) for row in out.tolist()]
    assert found == [(0, 47, 20, 0), (20, 3, 0, 0), (10, 40, 41, 7), (51, 47, 0, 0)]
