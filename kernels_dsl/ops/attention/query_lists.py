"""Block lists turned round for a backward pass: the query tiles that each block of keys visits.

All of it is torch operations without a wait for the GPU, of extents that follow from shapes alone; memory and
time grow with the entries that the lists have room for. What was made of lists is kept as long as they live.
"""

from __future__ import annotations

import torch

from kernels_dsl.ops.attention.arguments import AttentionCall, Extras
from kernels_dsl.ops.attention.kept import kept
from kernels_dsl.sparse.block_lists import BlockLists
from lowering.records import NamedTuple


class QueryLists(NamedTuple):
    """As `kernels_dsl.blocks.attention.query_blocks.QueryLists` has them."""

    first: torch.Tensor
    entries: torch.Tensor


def query_lists(call: AttentionCall, extras: Extras, tile_q: int) -> QueryLists:
    """The lists of a call's blocks for tiles of `tile_q` queries, for each sequence and KV head."""
    blocks = extras.blocks
    assert blocks is not None
    cu_q = None if extras.seqlens is None else extras.seqlens.q
    key = (
        "query lists", blocks.block, tile_q, call.batch, call.heads, call.kv_heads, call.longest_q,
        call.longest_k,
    )  # fmt: skip
    return kept(key, (*blocks.tensors, cu_q), lambda: _expanded(_turned(call, blocks, cu_q, tile_q), call))


def _expanded(lists: QueryLists, call: AttentionCall) -> QueryLists:
    return QueryLists(*(x.expand(call.batch, call.kv_heads, *x.shape[2:]) for x in lists))


def _turned(call: AttentionCall, blocks: BlockLists, cu_q: torch.Tensor | None, tile_q: int) -> QueryLists:
    """Sorted by block of keys, query head among those of a KV head, query tile."""
    key_blocks, tiles = -(-call.longest_k // blocks.block[1]), -(-call.longest_q // tile_q)
    listed, masked = _listed(blocks, key_blocks)
    batch, heads, _, width = listed.shape
    turns = listed.argsort(dim=-1, stable=True).argsort(dim=-1)
    split = blocks.block[0] // tile_q
    listed, turns = (x.repeat_interleave(split, dim=2)[:, :, :tiles] for x in (listed, turns))
    if cu_q is not None:
        listed = torch.where(_inside(cu_q, call.q_len, tiles, tile_q), listed, key_blocks)
        batch, turns = call.batch, turns.expand(call.batch, -1, -1, -1)
    group = call.heads // call.kv_heads
    if heads == 1:
        listed, turns = (x.expand(-1, group, -1, -1) for x in (listed, turns))
    shape = (batch, max(heads // group, 1), group * tiles, width)
    listed, turns = listed.reshape(shape), turns.reshape(shape)
    rows = torch.arange(group * tiles, device=listed.device)[:, None]
    keys, order = (listed.long() * (group * tiles) + rows).flatten(2).sort(dim=-1, stable=True)
    bounds = torch.arange(key_blocks + 1, device=keys.device) * (group * tiles)
    first = torch.searchsorted(keys, bounds.expand(*shape[:2], -1).contiguous(), out_int32=True)
    row = keys % (group * tiles)
    columns = (row // tiles, row % tiles, masked[order % width], turns.flatten(2).gather(-1, order))
    return QueryLists(first, torch.stack([x.int() for x in columns], dim=-1))


def _listed(blocks: BlockLists, key_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B or 1, H or 1, query blocks, entries): listed blocks of keys, `key_blocks` where there is none; and
    (entries) whether they are masked."""
    pairs = [(blocks.counts, blocks.indices), (blocks.full_counts, blocks.full_indices)]
    found, widths = [], [0, 0]
    for i, (counts, indices) in enumerate(pairs):
        if counts is None or indices is None:
            continue
        widths[i] = indices.shape[-1]
        there = torch.arange(widths[i], device=indices.device) < counts[..., None]
        there = there & (indices >= 0) & (indices < key_blocks)
        found.append(torch.where(there, indices, key_blocks))
    rows = found[0].shape[2]
    if sum(widths) == 0:  # kernels get no empty tensors
        found, widths = [found[0].new_full((1, 1, rows, 1), key_blocks)], [1, 0]
    lead = torch.broadcast_shapes(*(x.shape[:2] for x in found))
    masked = torch.arange(sum(widths), device=found[0].device) < widths[0]
    return torch.cat([x.expand(*lead, -1, -1) for x in found], dim=-1), masked


def _inside(cu_q: torch.Tensor, rows: int, tiles: int, tile_q: int) -> torch.Tensor:
    """(sequences, 1, tiles, 1): tiles that hold queries of their sequence, of a length as kernels read it."""
    starts = cu_q.clamp(0, rows)
    first = torch.arange(tiles, device=cu_q.device) * tile_q
    return (first < starts.diff()[:, None])[:, None, :, None]
