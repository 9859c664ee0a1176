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


def _scores(
    q: torch.Tensor, k: torch.Tensor, window: Any, scale: float | None, starts: Any = None
) -> torch.Tensor:
    scores = _heads(q, q.shape[2]) @ _heads(k, q.shape[2]).mT * (scale or 1 / math.sqrt(q.shape[-1]))
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    left, right = (None, None) if window is None else window
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    if left is not None:
        hidden |= j < i - left
    if right is not None:
        hidden |= j > i + right
    if starts is not None:  # of packed sequences; rows after the last one see nothing
        starts = torch.as_tensor(starts)
        sequence = torch.searchsorted(starts, i[:, 0], right=True)
        hidden |= (sequence[:, None] != sequence) | (i >= starts[-1])
    return scores.masked_fill(hidden, -math.inf)


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: Any = None,
    scale: float | None = None,
    starts: Any = None,
) -> Result:
    """Attention in float64, for autograd too."""
    scores = _scores(q, k, window, scale, starts)
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
    starts: torch.Tensor | None = None,
) -> Any:
    """In place of `attention`, with the arguments that ranks give."""
    assert alignment == "top_left" and softcap == 0.0
    found, lse = exact(q, k, v, window, scale, starts)
    found = found.to(q.dtype) if out is None else out.copy_(found)
    return (found, lse.float()) if return_lse else found


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    starts_k: torch.Tensor,
    longest: int,
    *,
    out: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """In place of `attention_varlen`."""
    assert starts is starts_k and longest == int(starts.diff().max())
    out = None if out is None else out[None]
    result = attention(q[None], k[None], v[None], out=out, starts=starts, **options)
    return tuple(x[0] for x in result) if options["return_lse"] else result[0]


def gradients_of(
    forward: Forward,
    do: torch.Tensor,
    d_lse: torch.Tensor | None = None,
    *,
    window_left: int | None,
    window_right: int | None,
    scale: float | None,
    layout: str = "bshd",
    **options: Any,
) -> Gradients:
    """In place of the operator of the backward pass: from the log-sum-exp and the output of the whole."""
    if layout == "thd":
        tensors = (forward.q, forward.k, forward.v, forward.out, forward.lse)
        found = gradients_of(
            Forward(*(x[None] for x in tensors), forward.extras), do[None],
            None if d_lse is None else d_lse[None], window_left=window_left, window_right=window_right,
            scale=scale,
        )  # fmt: skip
        return Gradients(*(x[0] for x in (found.q, found.k, found.v)), None)
    starts = None if forward.extras.seqlens is None else forward.extras.seqlens.q
    q, k, v, heads = forward.q, forward.k, forward.v, forward.q.shape[2]
    scale = scale or 1 / math.sqrt(q.shape[-1])
    probs = torch.exp(
        _scores(q, k, (window_left, window_right), scale, starts) - forward.lse.double()[..., None]
    )
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
    for module in ("launches", "ulysses"):
        monkeypatch.setattr(f"kernels_dsl.distributed.{module}.attention", attention)
        monkeypatch.setattr(f"kernels_dsl.distributed.{module}.attention_varlen", attention_varlen)
    monkeypatch.setattr("kernels_dsl.distributed.launches.gradients_of", gradients_of)
