"""The log-sum-exp of fp8 attention is that of float32 weights, not of those that are rounded to e4m3."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention import Sm90AttentionConfig
from lowering import emulator

KEYS = 600
FLOAT32 = 1e-5
"""Absolute: of sums of 600 exponentials of the hardware's."""


def _logarithms(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of float64 scores, and what it would be of weights rounded to e4m3."""
    highest = scores.amax(dim=-1, keepdim=True)
    weights = 256 * (scores - highest).exp()
    rounded = weights.float().to(torch.float8_e4m3fn).double()
    exact, other = (x.sum(dim=-1).log() - torch.tensor(256.0).log() for x in (weights, rounded))
    return exact + highest[..., 0], other + highest[..., 0]


@pytest.mark.parametrize(
    ("arch", "config", "causal"),
    [
        ("sm_89", None, True),
        ("sm_90a", Sm90AttentionConfig(64, 128, 64, 64), False),  # keeps maxima
        ("sm_90a", Sm90AttentionConfig(64, 128, 64, 64, watch_sums=True, linear_exps=3), True),
    ],
    ids=["sm80", "maxima", "watched sums"],
)
def test_log_sum_exp_of_unrounded_weights(arch, config, causal, seed):
    """A query of one element has scores of one product, which tensor cores sum without loss."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, KEYS, 1, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    sizes = 8 * torch.randn(64, generator=generator)
    q = torch.diag(sizes)[None, :, None].to(torch.float8_e4m3fn)
    with emulator.run(arch=arch):
        _, lse = kernels_dsl.attention_fp8(q, k, v, causal=causal, return_lse=True, config=config)
    scores = q.double()[0, :, 0] @ k.double()[0, :, 0].T / 8
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(KEYS - 63) > 0, -torch.inf)
    exact, rounded = _logarithms(scores)
    assert float((rounded - exact).abs().max()) > 100 * FLOAT32
    assert float((lse[0, 0] - exact).abs().max()) < FLOAT32
