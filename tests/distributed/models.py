"""Attention and its gradients by formula, in float64: what ranks launch where no kernel is to be tested."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from kernels_dsl.ops.attention.backward import Forward, Gradients


class Result(NamedTuple):
    """Output and log-sum-exp (B, H, S)."""

    out: torch.Tensor
    lse: torch.Tensor


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, H, S, D), float64."""
    return x.double().repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)


def _scores(q: torch.Tensor, k: torch.Tensor, window: Any, scale: float | None) -> torch.Tensor:
    scores = _heads(q, q.shape[2]) @ _heads(k, q.shape[2]).mT * (scale or 1 / math.sqrt(q.shape[-1]))
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    left, right = (None, None) if window is None else window
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    if left is not None:
        hidden |= j < i - left
    if right is not None:
        hidden |= j > i + right
    return scores.masked_fill(hidden, -math.inf)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any = None, scale: float | None = None
) -> Result:
    """Attention in float64, for autograd too."""
    scores = _scores(q, k, window, scale)
    out = scores.softmax(-1).nan_to_num(0.0) @ _heads(v, q.shape[2])
    return Result(out.transpose(1, 2), scores.logsumexp(-1))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: Any,
    alignment: str,
    scale: float | None,
    softcap: float,
    return_lse: bool,
    out: torch.Tensor | None = None,
    deterministic: bool | None = None,
) -> Any:
    """In place of `attention`, with the arguments that ranks give."""
    assert alignment == "top_left" and softcap == 0.0
    found, lse = exact(q, k, v, window, scale)
    found = found.to(q.dtype) if out is None else out.copy_(found)
    return (found, lse.float()) if return_lse else found


def gradients_of(
    forward: Forward,
    do: torch.Tensor,
    d_lse: torch.Tensor | None = None,
    *,
    window_left: int | None,
    window_right: int | None,
    scale: float | None,
    **options: Any,
) -> Gradients:
    """In place of the operator of the backward pass: from the log-sum-exp and the output of the whole."""
    q, k, v, heads = forward.q, forward.k, forward.v, forward.q.shape[2]
    scale = scale or 1 / math.sqrt(q.shape[-1])
    probs = torch.exp(_scores(q, k, (window_left, window_right), scale) - forward.lse.double()[..., None])
    do_heads = _heads(do, heads)
    sums = (do_heads * _heads(forward.out, heads)).sum(-1)
    if d_lse is not None:
        sums = sums - d_lse.double()
    d_scores = probs * (do_heads @ _heads(v, heads).mT - sums[..., None]) * scale
    dq = (d_scores @ _heads(k, heads)).transpose(1, 2)
    dk, dv = d_scores.mT @ _heads(q, heads), probs.mT @ do_heads

    def of_group(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).unflatten(2, (k.shape[2], -1)).sum(3).to(q.dtype)

    return Gradients(dq.to(q.dtype), of_group(dk), of_group(dv), None)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks launch these in place of kernels; results are merged by the kernel."""
    for module in ("states", "ulysses"):
        monkeypatch.setattr(f"kernels_dsl.distributed.{module}.attention", attention)
    monkeypatch.setattr("kernels_dsl.distributed.states.gradients_of", gradients_of)
