"""Work tiles that a producer warp hands to a consumer warp, in the emulator: each is handed out once."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32

import lowering
from kernels_dsl.blocks.attention import tile_queue
from kernels_dsl.blocks.attention.kv_blocks import TileShape, Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.query_tiles import QueryTiles
from kernels_dsl.blocks.attention.seqlen import SeqExtent
from kernels_dsl.blocks.attention.tile_queue import ConsumedTiles, work_tile
from kernels_dsl.blocks.attention.work import Work
from kernels_dsl.blocks.hw.pipeline import producer_state
from kernels_dsl.config.attention import AttentionVariant
from lowering import emulator

ROWS, HEADS, BATCH = 300, 2, 2
TILE = TileShape(64, 32)
TILES = -(-ROWS // TILE.queries) * HEADS * BATCH


class Facts(NamedTuple):
    """The part of a kernel's spec that tiles depend on."""

    variant: AttentionVariant
    tile: TileShape


FACTS = Facts(AttentionVariant(right=True), TILE)


@cute.kernel
def _handed_out(out: cute.Tensor, count: cute.Tensor, counter: cute.Tensor | None):
    """Records m, head, batch and visited blocks of the tiles of warp 1, (CTAs, TILES, 4), and `count`."""
    warp, lane, cta = cute.arch.warp_idx(), cute.arch.lane_idx(), cute.arch.block_idx()[0]
    tiles = QueryTiles(Int32(-(-ROWS // TILE.queries)), Int32(HEADS), Int32(BATCH), Int32(1))
    extent = SeqExtent(Int32(ROWS), Int32(ROWS), None, None, None)
    scores = ScoreOperands(cutlass.Float32(1.0), cutlass.Float32(1.0), None, None)
    work = Work(
        tiles, extent, Window(Int32(0), Int32(0)), scores, lists=None, sinks=None, lse=None,
        heads_per_kv=Int32(1), v_dim=Int32(32), counter=counter, descales=None,
    )  # fmt: skip
    queue = None
    if cutlass.const_expr(counter is not None):
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * tile_queue.STAGES)
        slots = smem.allocate_array(Int32, tile_queue.WORDS * tile_queue.STAGES, byte_alignment=16)
        queue = tile_queue.make_tile_queue(barriers, slots, 32)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    if warp == 0:
        if cutlass.const_expr(counter is not None):
            number, state = Int32(cta), producer_state(tile_queue.STAGES)
            while number < tiles.size:
                tile_queue.send_tile(queue, state, work_tile(FACTS, work, number))
                state.advance()
                asked = tile_queue.ask_number(counter)
                number = tile_queue.number_of(asked, counter, tiles.size)
            tile_queue.send_end(queue, state)
    else:
        source, found = ConsumedTiles(FACTS, work, queue), Int32(0)
        position, size = source.first(), source.size()
        while source.more(position, size):
            tile, taken = source.decode(position)
            if lane == 0:
                out[cta, found, 0], out[cta, found, 1] = tile.at.m, tile.at.head
                out[cta, found, 2], out[cta, found, 3] = tile.at.batch, tile.visit.count
            found = found + 1
            position = source.next(taken)
        if lane == 0:
            count[cta] = found


@lowering.jit
def _hand_out(out: cute.Tensor, count: cute.Tensor, counter: cute.Tensor | None, stream):
    _handed_out(out, count, counter).launch(grid=(out.shape[0], 1, 1), block=(64, 1, 1), stream=stream)


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("ctas", [1, 3, TILES])
def test_each_tile_is_handed_out_once(ctas: int, queued: bool) -> None:
    """By two launches of one counter, which is 0 after each."""
    counter = torch.zeros(1, dtype=torch.int32) if queued else None
    visited = {m: -(-min((m + 1) * TILE.queries, ROWS) // TILE.keys) for m in range(-(-ROWS // TILE.queries))}
    for _ in range(2):
        out, count = torch.full((ctas, TILES, 4), -1, dtype=torch.int32), torch.zeros(ctas, dtype=torch.int32)
        with emulator.run(arch="sm_90a"):
            _hand_out(out, count, counter)
        tiles = [tuple(tile) for cta in range(ctas) for tile in out[cta, : int(count[cta])].tolist()]
        everything = {
            (m, head, batch, blocks)
            for m, blocks in visited.items()
            for head in range(HEADS)
            for batch in range(BATCH)
        }
        assert len(tiles) == TILES and set(tiles) == everything
        for cta in range(ctas):  # the longest first
            rows = out[cta, : int(count[cta]), 0].tolist()
            assert rows == sorted(rows, reverse=True)
        assert counter is None or int(counter) == 0
