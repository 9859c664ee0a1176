"""The ring of `benchmarks.ring_peer` around PyTorch's attention, on gloo ranks."""

from __future__ import annotations

import math

import torch

from benchmarks.ring_peer import Kernels, RingAttention
from kernels_dsl.distributed import shard_sequence, unshard_sequence
from tests.distributed.ranks import Rank

Tensors = tuple[torch.Tensor, ...]


def _weights(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -torch.inf) if causal else scores


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _weights(q, k, causal)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, d_out: torch.Tensor,
    lse: torch.Tensor, causal: bool,
) -> Tensors:  # fmt: skip
    weights = (_weights(q, k, causal) - lse.unsqueeze(-1)).exp()
    delta = (out * d_out).sum(-1).mT.unsqueeze(-1)
    d_scores = weights * (torch.einsum("bqhd,bkhd->bhqk", d_out, v) - delta) / math.sqrt(q.shape[-1])
    dq, dk = torch.einsum("bhqk,bkhd->bqhd", d_scores, k), torch.einsum("bhqk,bqhd->bkhd", d_scores, q)
    return dq, dk, torch.einsum("bhqk,bqhd->bkhd", weights, d_out)


def equal(rank: Rank) -> None:
    """Output and gradients are those of one process."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 16 * rank.size, 3, 8)
    q, k, v, d_out = (torch.randn(shape, generator=generator) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    views = [x.transpose(1, 2) for x in whole]
    out = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True).transpose(1, 2)
    expected = (out, *torch.autograd.grad(out, whole, d_out))
    leaves = [shard_sequence(x, order="zigzag").requires_grad_() for x in (q, k, v)]
    mine = RingAttention.apply(*leaves, Kernels(_forward, _backward))
    found = (mine, *torch.autograd.grad(mine, leaves, shard_sequence(d_out, order="zigzag")))
    for x, y in zip(found, expected):
        torch.testing.assert_close(unshard_sequence(x.detach(), order="zigzag"), y.detach())
