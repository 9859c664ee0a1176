"""The order in which query tiles with listed key blocks begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.ops.attention.arguments import Extras
from kernels_dsl.ops.attention.list_order import longest_first
from kernels_dsl.sparse.block_lists import BlockLists

CONFIG = Sm90AttentionConfig(64, 64, 64, 64)


def _call(batch: int, heads: int, kv_heads: int, q_len: int, k_len: int) -> Any:
    return SimpleNamespace(
        batch=batch, heads=heads, kv_heads=kv_heads, longest_q=q_len, longest_k=k_len, dim=64, dim_v=64
    )


def _lists(lengths: torch.Tensor, block: tuple[int, int] = (64, 64)) -> BlockLists:
    counts = lengths.int()
    return BlockLists(None, None, counts, torch.zeros((*counts.shape, 1000), dtype=torch.int32), block)


def _order(call: Any, extras: Extras, config: Sm90AttentionConfig, ctas: int) -> torch.Tensor:
    """The order of lists that are seen again."""
    assert not longest_first(call, extras, config, ctas).numel()
    return longest_first(call, extras, config, ctas)


@pytest.mark.parametrize("k_len", [64, 1 << 17])  # 32 MB a head
def test_each_tile_once_and_long_ones_first(k_len, seed):
    lengths = torch.randint(0, 1000, (2, 3, 20), generator=torch.Generator().manual_seed(seed))
    lengths[1, 2, 7], lengths[0, 0, 0] = 5000, -3  # as 1000, the room there is, and as none
    order = _order(_call(2, 3, 3, 1280, k_len), Extras(blocks=_lists(lengths)), CONFIG, 4)
    assert order.dtype == torch.int32 and sorted(order.tolist()) == list(range(120))
    found = lengths.clamp(0, 1000).flatten()[order.long()]
    for group in [order] if k_len == 64 else [order[order // 20 == head] for head in range(6)]:
        inside = lengths.clamp(0, 1000).flatten()[group.long()]
        assert bool((inside.diff() <= 0).all())
    if k_len > 64:
        assert not bool((found.diff() <= 0).all())
        assert bool((order.diff() // 20 == 0).sum() > 50)


def test_a_heavy_tile_of_a_late_group_begins_first():
    lengths = torch.full((1, 4, 8), 3)
    lengths[0, 3, 5] = 700
    order = _order(_call(1, 4, 4, 512, 1 << 17), Extras(blocks=_lists(lengths)), CONFIG, 4)
    assert order[0] == 3 * 8 + 5 and order[1] // 8 == 0


def test_tiles_of_a_larger_block_and_lists_for_all_heads():
    lengths = torch.tensor([1, 9, 5]).view(1, 1, 3)
    order = _order(_call(1, 2, 1, 320, 64), Extras(blocks=_lists(lengths, (128, 64))), CONFIG, 4)
    assert order.tolist() == [2, 3, 7, 8, 4, 9, 0, 1, 5, 6]


def test_lists_that_change_have_no_order():
    """Until they stay as they are: to sort them takes as long as it saves in one call."""
    lists, call = _lists(torch.tensor([1, 9, 5]).view(1, 1, 3)), _call(1, 2, 1, 192, 64)
    assert _order(call, Extras(blocks=lists), CONFIG, 4).tolist() == [1, 4, 2, 5, 0, 3]
    assert lists.full_counts is not None
    lists.full_counts[0, 0, 0] = 700
    assert _order(call, Extras(blocks=lists), CONFIG, 4).tolist() == [0, 3, 1, 4, 2, 5]
