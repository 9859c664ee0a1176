"""Block lists turned round, by torch operations, against the same written out."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kernels_dsl.ops.attention import kept as module
from kernels_dsl.ops.attention.arguments import Extras, Seqlens
from kernels_dsl.ops.attention.query_lists import query_lists
from kernels_dsl.sparse.attention_blocks import topk_blocks
from kernels_dsl.sparse.block_lists import BlockLists


def _call(batch: int, heads: int, kv_heads: int, lengths: tuple[int, int], rows: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=rows, longest_q=lengths[0], longest_k=lengths[1]
    )


def _written_out(call, blocks: BlockLists, lengths_q: list[int], tile: int, b: int, kv_head: int, key: int):
    """Entries of one key block: (head, tile, masked, turn)."""
    group = call.heads // call.kv_heads
    for member in range(group):
        head = kv_head * group + member
        for t in range(-(-lengths_q[b] // tile)):
            seen = {}
            for masked, (counts, indices) in ((0, blocks.tensors[2:]), (1, blocks.tensors[:2])):
                if counts is None:
                    continue
                counts, indices = (x.expand(call.batch, call.heads, *x.shape[2:]) for x in (counts, indices))
                row = t * tile // blocks.block[0]
                for x in indices[b, head, row, : counts[b, head, row]].tolist():
                    seen[x] = masked
            if key in seen:
                yield [member, t, seen[key], sum(x < key for x in seen)]


def _check(call, blocks: BlockLists, lengths_q: list[int], extras: Extras, tile: int = 64) -> None:
    found = query_lists(call, extras, tile)
    assert found.first.shape[:2] == found.entries.shape[:2] == (call.batch, call.kv_heads)
    assert found.first.dtype == found.entries.dtype == torch.int32
    for b in range(call.batch):
        for h in range(call.kv_heads):
            for key in range(-(-call.longest_k // blocks.block[1])):
                begin, end = found.first[b, h, key : key + 2].tolist()
                expected = list(_written_out(call, blocks, lengths_q, tile, b, h, key))
                assert found.entries[b, h, begin:end].tolist() == expected


def _random(lead: tuple[int, int], rows: int, columns: int, block: tuple[int, int]) -> BlockLists:
    """Masked blocks among the first columns and whole ones after them, in no order."""
    generator = torch.Generator().manual_seed(rows)
    half, scores = columns // 2, torch.randn((*lead, rows, columns), generator=generator)
    scores[..., 0, :] = -torch.inf
    parts = [topk_blocks(x, 2, block=block).tensors[2:] for x in (scores[..., :half], scores[..., half:])]
    return BlockLists(parts[0][0], parts[0][1].flip(-1).contiguous(), parts[1][0], parts[1][1] + half, block)


def test_heads_and_sequences():
    for lead in ((2, 4), (1, 4), (2, 1), (1, 1)):
        blocks = _random(lead, 3, 5, (128, 64))
        _check(_call(2, 4, 2, (300, 310)), blocks, [300, 300], Extras(blocks=blocks))
    blocks = BlockLists(None, None, *blocks.tensors[2:], blocks.block)
    _check(_call(2, 4, 2, (300, 310)), blocks, [300, 300], Extras(blocks=blocks))


def test_packed_sequences_end_where_they_end():
    blocks = _random((1, 2), 3, 4, (128, 128))
    cu_q = torch.tensor([0, 60, 60, 350], dtype=torch.int32)
    extras = Extras(blocks=blocks, seqlens=Seqlens(cu_q, cu_q))
    _check(_call(3, 2, 2, (300, 400), 350), blocks, [60, 0, 290], extras)


def test_garbage_and_nothing():
    """Numbers outside of the key blocks list nothing; lists without room are lists."""
    counts, indices = torch.tensor([[[3]]]).int(), torch.tensor([[[[9, -5, 1, 0]]]]).int()
    blocks = BlockLists(counts, indices, block=(64, 64))
    found = query_lists(_call(1, 1, 1, (50, 128)), Extras(blocks=blocks), 64)
    assert found.first.tolist() == [[[0, 0, 1]]] and found.entries[0, 0, 0].tolist() == [0, 0, 1, 0]
    blocks = BlockLists(counts * 0, indices[..., :0], block=(64, 64))
    found = query_lists(_call(1, 1, 1, (50, 128)), Extras(blocks=blocks), 64)
    assert not found.first.any() and found.entries.numel() > 0


def test_made_once_and_again_after_a_change_in_place():
    blocks = _random((1, 1), 3, 4, (128, 128))
    call, extras = _call(1, 1, 1, (300, 512)), Extras(blocks=blocks)
    before = len(module._KEPT)
    first = query_lists(call, extras, 64)
    assert query_lists(call, extras, 64) is first and len(module._KEPT) == before + 1
    blocks.full_counts.zero_()
    _check(call, blocks, [300], extras)
    assert query_lists(call, extras, 64) is not first and len(module._KEPT) == before + 1
    del blocks, extras
    assert len(module._KEPT) == before
