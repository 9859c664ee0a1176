"""Calls whose dQ has a kernel of its own, by tiles of queries, and those whose dQ is summed."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.problem import H200
from kernels_dsl.ops.attention.arguments import NO_EXTRAS, AttentionArguments, AttentionOptions
from kernels_dsl.ops.attention.backward import Needs, choose_dq, choose_tile, described
from kernels_dsl.sparse.attention_blocks import causal_blocks

ALL = Needs()


@pytest.mark.parametrize(
    ("dims", "block", "deterministic", "needs", "tile"),
    [
        ((128, 128), (128, 128), True, ALL, (128, 128)),
        ((128, 128), (64, 64), True, ALL, (64, 64)),
        ((128, 128), (128, 64), True, Needs(kv=False), (128, 64)),
        ((128, 128), (64, 64), False, ALL, None),
        ((128, 128), (64, 64), True, Needs(q=False), None),
        ((256, 256), None, True, ALL, (128, 64)),
        ((256, 256), None, False, ALL, None),
        ((256, 256), None, True, Needs(mask=True), None),
        ((192, 128), None, True, ALL, None),
        ((128, 128), None, True, ALL, None),
        ((64, 64), None, True, ALL, None),
    ],
)
def test_choice_on_hopper(dims, block, deterministic, needs, tile):
    q, k, v = (torch.empty(1, 256, 2, d, dtype=torch.bfloat16) for d in (dims[0], *dims))
    extras = NO_EXTRAS
    if block is not None:
        extras = extras._replace(blocks=causal_blocks(256, 256, block=block, device="cpu"))
    call = described(AttentionArguments(q, k, v, AttentionOptions(causal=True), extras=extras))
    config = choose_tile(call, H200, deterministic, needs, None)
    found = choose_dq(call, config, deterministic, needs)
    assert (None if found is None else (found.tile_m, found.tile_n)) == tile
    assert found is None or found.smem_bytes <= H200.smem_bytes // found.ctas_per_sm


def test_functions_of_scores_with_wide_heads_and_older_kernels():
    q, k, v = (torch.empty(1, 256, 2, 256, dtype=torch.bfloat16) for _ in range(3))
    call = described(AttentionArguments(q, k, v, AttentionOptions(softcap=3.0)))
    assert choose_dq(call, choose_tile(call, H200, True, ALL, None), True, ALL) is None
    call = described(AttentionArguments(q, k, v))
    assert choose_dq(call, choose_tile(call, H200, True, ALL, "sm80"), True, ALL) is None
