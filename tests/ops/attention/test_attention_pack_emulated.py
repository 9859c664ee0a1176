"""Tiles in which the rows of several query heads alternate, in the emulator."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention import Sm90AttentionConfig
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.attention_cases import check_close, inputs, run


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_90a"):
        yield


def test_one_query_of_each_head(seed):
    """A decoding step: the sixteen heads of a KV head in one tile."""
    tensors = inputs((2, 1, 16, 64), (2, 90, 1, 64), 64, seed)
    config = Sm90AttentionConfig(64, 64, 64, 64, pack=16)
    run(tensors, Masking(right=0), causal=True, config=config)


def test_window_over_several_tiles(seed):
    """37 queries of four heads are more than one tile, ragged, with both edges of a window."""
    tensors = inputs((1, 37, 8, 64), (1, 150, 2, 64), 64, seed)
    config = Sm90AttentionConfig(64, 64, 64, 64, pack=4)
    run(tensors, Masking(left=20, right=3), window=(20, 3), config=config)


def test_half_of_a_group_in_packed_sequences(seed):
    """Two of four heads share a tile; a sequence's last rows go by another way than whole tiles."""
    q_lens, k_lens = (70, 0, 3), (80, 5, 60)
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, k_lens)]
    q, k, v = inputs((sum(q_lens), 4, 64), (sum(k_lens), 1, 64), 64, seed)
    config = Sm90AttentionConfig(64, 64, 64, 64, pack=2)
    out, lse = kernels_dsl.attention_varlen(q, k, v, *starts, 70, causal=True, return_lse=True, config=config)
    for n in (0, 2):
        rows, keys = (slice(int(s[n]), int(s[n + 1])) for s in starts)
        part = (q[None, rows], k[None, keys], v[None, keys])
        check_close((out[None, rows], lse[None, :, rows]), part, Masking(right=0))


@pytest.mark.parametrize(
    "options", [{"sinks": torch.zeros(8)}, {"mask": torch.zeros(1)}, {"score_mod": lambda s, b, h, i, j: s}]
)
def test_what_depends_on_the_head_is_not_packed(options):
    tensors = inputs((1, 8, 8, 64), (1, 64, 2, 64), 64, 0)
    config = Sm90AttentionConfig(64, 64, 64, 64, pack=2)
    with pytest.raises(ValueError, match="config packs 2 heads, must pack a divisor of the 4 query heads"):
        kernels_dsl.attention(*tensors, config=config, **options)


def test_heads_that_do_not_divide_a_group():
    tensors = inputs((1, 8, 6, 64), (1, 64, 2, 64), 64, 0)
    config = Sm90AttentionConfig(64, 64, 64, 64, pack=2)
    with pytest.raises(ValueError, match="config packs 2 heads, must pack a divisor of the 3 query heads"):
        kernels_dsl.attention(*tensors, config=config)
