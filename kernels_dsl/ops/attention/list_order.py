"""Options for block lists, and the order in which query tiles begin with them: long lists before short ones.

Tiles are handed out as CTAs become free, so that a long one that begins late leaves the other SMs without
work at the end. Heads whose K and V fit in L2 are worked on together, as without lists, and within such a
group the longest lists come first. Before all groups come the heaviest tiles, with more than half of what an
SM has to do in their group. Made by torch operations without a wait for the GPU, once lists are seen for the
second time: it takes 0.1 ms of an H200, and 0.5 of the host.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels_dsl.config.attention import L2_BYTES
from kernels_dsl.config.attention_table import AttentionConfig
from kernels_dsl.ops.attention.arguments import AttentionCall, Extras
from kernels_dsl.ops.attention.kept import kept_when_seen_again
from kernels_dsl.sparse.block_lists import BlockLists

MOST_ENTRIES = (1 << 20) - 1
"""Longer lists count as lists of so many entries."""


def check_list_options(config: AttentionConfig, call: AttentionCall) -> None:
    """ValueError where a caller's configuration has options for lists and a call has none."""
    if config.joined > 1 and call.block is None:
        raise ValueError(
            f"config joins {config.joined} listed blocks in a step, must have block lists for it"
        )


def longest_first(call: AttentionCall, extras: Extras, config: AttentionConfig, ctas: int) -> torch.Tensor:
    """(work tiles,) int32: numbers of the tiles of a call, those of one head side by side, in the order in
    which they should begin on `ctas` CTAs. Empty: as without lists."""
    blocks = extras.blocks
    assert blocks is not None
    tiles = -(-call.longest_q // config.tile_m)
    split = blocks.block[0] // config.tile_m
    element = 2  # bytes: lists with fp8 operands have kernels of other configurations
    groups = _groups(call, call.longest_k * (call.dim + call.dim_v) * element)
    key = ("longest first", tiles, split, call.batch, call.heads, groups, ctas)
    counts = blocks.counts, blocks.full_counts
    order = kept_when_seen_again(key, counts, lambda: _ordered(call, blocks, (tiles, split), groups, ctas))
    return no_order(next(x for x in counts if x is not None).device) if order is None else order


@lru_cache(maxsize=64)
def no_order(device: torch.device) -> torch.Tensor:
    """An empty order."""
    return torch.empty(0, dtype=torch.int32, device=device)


def _groups(call: AttentionCall, kv_bytes: int) -> int:
    """Groups of heads of all sequences, as `blocks.attention.query_tiles.groups_for_l2` has them."""
    fitting = max(L2_BYTES // max(kv_bytes, 1), 1) * (call.heads // call.kv_heads)
    return -(-call.heads * call.batch // fitting)


def _ordered(
    call: AttentionCall, blocks: BlockLists, rows: tuple[int, int], groups: int, ctas: int
) -> torch.Tensor:
    tiles, split = rows
    lengths = sum(
        counts.clamp(0, indices.shape[-1]).long()
        for counts, indices in ((blocks.counts, blocks.indices), (blocks.full_counts, blocks.full_indices))
        if counts is not None and indices is not None
    )
    assert isinstance(lengths, torch.Tensor)
    lengths = lengths.clamp(max=MOST_ENTRIES).expand(call.batch, call.heads, -1).flatten(0, 1)
    lengths = lengths.repeat_interleave(split, dim=1)[:, :tiles]  # (heads of all sequences, tiles)
    group = torch.arange(lengths.shape[0], device=lengths.device) * groups // lengths.shape[0]
    totals = lengths.new_zeros(groups).index_add(0, group, lengths.sum(1))
    heavy = lengths * (2 * ctas) > totals[group][:, None]
    place = torch.where(heavy, 0, group[:, None] + 1)
    keys = place * (MOST_ENTRIES + 1) + (MOST_ENTRIES - lengths)
    return keys.flatten().argsort(stable=True).int()
