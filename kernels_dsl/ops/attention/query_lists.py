"""Block lists turned round for a backward pass: the query tiles that each block of keys visits.

All of it is torch operations without a wait for the GPU, of extents that follow from shapes alone; memory and
time grow with the entries that the lists have room for. What was made of lists is kept as long as they live.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

from kernels_dsl.ops.attention.arguments import AttentionCall, Extras
from kernels_dsl.sparse.block_lists import BlockLists
from lowering.records import NamedTuple

_MAX_KEPT = 256
"""Lists of so many patterns are kept; of more the oldest are forgotten."""
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None: PyTorch is a CPU build
_KEPT: OrderedDict[Any, _Kept] = OrderedDict()


class QueryLists(NamedTuple):
    """As `kernels_dsl.blocks.attention.query_blocks.QueryLists` has them."""

    first: torch.Tensor
    entries: torch.Tensor


class _Kept(NamedTuple):
    """Lists that were made, and what they were made of, whose memory nothing else can have meanwhile."""

    made: QueryLists
    versions: tuple[int, ...]
    sources: tuple[torch.Tensor, ...]
    watches: tuple[Any, ...]


def query_lists(call: AttentionCall, extras: Extras, tile_q: int) -> QueryLists:
    """The lists of a call's blocks for tiles of `tile_q` queries, for each sequence and KV head.

    A graph that is captured makes its own at each replay; so it sees changes of the lists in place.
    """
    blocks = extras.blocks
    assert blocks is not None
    cu_q = None if extras.seqlens is None else extras.seqlens.q
    sources = tuple(x for x in (*blocks.tensors, cu_q) if x is not None)
    device = sources[0].device
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or any(x.is_inference() for x in sources):  # which have no version
        return _expanded(_turned(call, blocks, cu_q, tile_q), call)
    # Another stream would have to wait for what this one makes.
    stream = _raw_stream(device.index) if device.type == "cuda" else None
    key = (
        stream, blocks.block, tile_q, call.batch, call.heads, call.kv_heads, call.longest_q, call.longest_k,
        *map(_place, (*blocks.tensors, cu_q)),
    )  # fmt: skip
    versions = tuple(x._version for x in sources)
    found = _KEPT.get(key)
    if found is None or found.versions != versions:
        made = _expanded(_turned(call, blocks, cu_q, tile_q), call)
        watches = tuple(weakref.ref(x, lambda _: _KEPT.pop(key, None)) for x in sources)
        found = _KEPT[key] = _Kept(made, versions, tuple(x.detach() for x in sources), watches)
        while len(_KEPT) > _MAX_KEPT:
            _KEPT.popitem(last=False)
    return found.made


def _place(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), x.device)


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
