"""Tiles in which the rows of several query heads alternate, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention import Sm90AttentionConfig
from reference.attention import Masking
from tests.ops.attention.attention_cases import inputs, run

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (72, 40)])
@pytest.mark.parametrize("queries", [1, 5, 70])
@pytest.mark.parametrize("pack", [2, 8])
def test_against_float64(pack, queries, dims, seed):
    tensors = inputs((2, queries, 16, dims[0]), (2, 300, 2, dims[0]), dims[1], seed, device="cuda")
    config = Sm90AttentionConfig(64, 64, *(-(-d // 64) * 64 for d in dims), pack=pack)
    run(tensors, Masking(right=0), causal=True, config=config)
    run(tensors, Masking(left=30, right=40), window=(30, 40), config=replace(config, tile_m=128))


@pytest.mark.parametrize("queries", [1, 4])
def test_chosen_for_decoding(queries, seed):
    """Many sequences and few queries, where the table packs heads; both layouts."""
    q, k, v = inputs((70, queries, 16, 128), (70, 200, 4, 128), 128, seed, device="cuda")
    run((q, k, v), Masking(right=0), causal=True)
    out = kernels_dsl.attention(q, k, v, causal=True)
    swapped = kernels_dsl.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True
    )
    if queries == 1:  # the only query sees every key
        assert torch.equal(out, swapped.transpose(1, 2))
