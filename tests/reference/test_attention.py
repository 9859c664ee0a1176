"""The attention reference against PyTorch's float64 attention, and its masks against each other."""

from __future__ import annotations

import pytest
import torch

from reference.attention import Masking, allowed_by_lists, attention
from reference.inputs import normal


def _tensors(seed: int, heads: tuple[int, int] = (4, 2)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h, hk = heads
    shapes = ((2, 7, h, 8), (2, 9, hk, 8), (2, 9, hk, 6))
    q, k, v = (normal(shape, torch.float64, seed=seed + i) for i, shape in enumerate(shapes))
    return q, k, v


@pytest.mark.parametrize("kind", ["plain", "causal", "boolean", "additive"])
def test_against_torch(kind, seed):
    q, k, v = _tensors(seed)
    allowed = torch.rand((2, 1, 7, 9), generator=torch.Generator().manual_seed(seed)) < 0.7
    allowed[..., 0] = True
    bias = normal((4, 7, 9), torch.float64, seed=seed)
    masking, options = {
        "plain": (Masking(), {}),
        "causal": (Masking(right=0, top_left=True), {"is_causal": True}),
        "boolean": (Masking(allowed=allowed), {"attn_mask": allowed}),
        "additive": (Masking(bias=bias), {"attn_mask": bias}),
    }[kind]
    found, _ = attention(q, k, v, masking)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options
    )
    assert torch.allclose(found.transpose(1, 2), expected, atol=1e-12)


def test_window_softcap_and_functions_by_hand(seed):
    q, k, v = _tensors(seed, (2, 2))
    masking = Masking(
        left=2,
        right=1,
        softcap=3.0,
        score_mod=lambda s, b, h, i, j: s + h * j,
        mask_mod=lambda b, h, i, j: j != 4,
    )
    out, lse = attention(q, k, v, masking, scale=0.5)
    b, h, i = 1, 1, 3
    keys = [j for j in range(9) if i + 2 - 2 <= j <= i + 2 + 1 and j != 4]
    scores = torch.stack([3.0 * torch.tanh(0.5 * q[b, i, h] @ k[b, j, h] / 3.0) + h * j for j in keys])
    assert torch.allclose(lse[b, h, i], torch.logsumexp(scores, 0))
    assert torch.allclose(out[b, i, h], torch.softmax(scores, 0) @ v[b, keys, h])


def test_sinks_are_one_more_key_without_value(seed):
    q, k, v = _tensors(seed, (2, 2))
    sinks = torch.tensor([0.3, -2.0])
    out, lse = attention(q, k, v, Masking(sinks=sinks))
    plain, plain_lse = attention(q, k, v)
    expected = torch.logaddexp(plain_lse, sinks.double().view(1, 2, 1))
    assert torch.allclose(lse, expected)
    assert torch.allclose(out, plain * torch.exp(plain_lse - expected).transpose(1, 2)[..., None])


def test_a_row_without_keys(seed):
    q, k, v = _tensors(seed, (2, 2))
    out, lse = attention(q, k, v, Masking(right=-9))
    assert bool((out[:, :3] == 0).all()) and bool((lse[..., :3] == -torch.inf).all())
    out, lse = attention(q, k[:, :0], v[:, :0])
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


def test_lists(seed):
    counts = torch.tensor([1, 0]).view(1, 1, 2)
    indices = torch.tensor([[1, 7], [7, 7]]).view(1, 1, 2, 2)
    full = (torch.tensor([0, 1]).view(1, 1, 2), torch.tensor([[9], [0]]).view(1, 1, 2, 1))
    hidden = torch.zeros(1, 1, 4, 6, dtype=torch.bool)
    hidden[..., 3] = True
    hidden[..., 0] = True  # in a full block: stays
    allowed = allowed_by_lists((counts, indices, *full), (2, 3), (1, 1, 4, 6), hidden)
    assert allowed[0, 0].int().tolist() == [[0, 0, 0, 0, 1, 1]] * 2 + [[1, 1, 1, 0, 0, 0]] * 2
