"""Attention in float64, written out: scores, masks, softmax, sum. Slow and obvious; torch only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reference.quantize import from_fp8, to_fp8


@dataclass(frozen=True)
class Masking:
    """Options that change or hide scores, with the meaning of `kernels_dsl.attention`'s arguments.

    left, right: widths of the window, None for no limit; causal is right = 0. allowed: booleans
    (B or 1, H or 1, Sq, Sk) or None. bias: numbers to add. score_mod(score, b, h, i, j) and
    mask_mod(b, h, i, j) work on broadcast index tensors.
    """

    left: int | None = None
    right: int | None = None
    top_left: bool = False
    softcap: float = 0.0
    allowed: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masking: Masking = Masking(),
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Sq, H, Dv) and log-sum-exp (B, H, Sq); q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv).

    Products are taken in `dtype`, with 16-bit ones rounded as PyTorch's operators do; the softmax in float32
    or better. A row that attends to nothing gives 0 and -inf.
    """
    batch, q_len, heads, dim = q.shape
    repeat = heads // k.shape[2]
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    queries = q.to(dtype).transpose(1, 2)
    keys, values = (x.to(dtype).transpose(1, 2).repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = (queries @ keys.transpose(-1, -2)).to(inner) * scale
    scores = _masked(scores, masking)
    lse = scores
    if masking.sinks is not None:
        sink = masking.sinks.to(inner).view(1, heads, 1, 1).expand(batch, heads, q_len, 1)
        lse = torch.cat([scores, sink], dim=-1)
    lse = torch.logsumexp(lse, dim=-1) if lse.shape[-1] else lse.new_full(lse.shape[:-1], -math.inf)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return (weights.to(dtype) @ values).transpose(1, 2), lse


def attention_fp8_weights(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masking: Masking, *, scale: float | None = None
) -> torch.Tensor:
    """The output of `attention` in float64, but with weights as e4m3: what fp8 attention cannot do better.

    A weight is exp(score - the maximum of the row's scores and its sink) · 256, rounded to
    e4m3; the sum that divides is that of weights that were not rounded.
    """
    values = v.double().transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = masked_scores(q, k, masking, scale)
    top = scores.amax(-1, keepdim=True)
    sinks = None if masking.sinks is None else masking.sinks.double().view(1, -1, 1, 1)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - torch.where(top == -math.inf, 0.0, top)) * 256
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + 256 * torch.exp(sinks - top)
    rounded = from_fp8(to_fp8(weights, torch.float8_e4m3fn))
    return (rounded @ values / torch.where(total == 0, 1.0, total)).transpose(1, 2)


def masked_scores(
    q: torch.Tensor, k: torch.Tensor, masking: Masking, scale: float | None = None
) -> torch.Tensor:
    """Scores (B, H, Sq, Sk) in float64, -inf where hidden, of q (B, Sq, H, D) and k (B, Sk, Hk, D)."""
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    queries = q.double().transpose(1, 2)
    keys = k.double().transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    return _masked(queries @ keys.transpose(-1, -2) * scale, masking)


def _masked(scores: torch.Tensor, masking: Masking) -> torch.Tensor:
    """softcap, score_mod, bias, and -inf wherever a mask says so, on scores (B, H, Sq, Sk)."""
    batch, heads, q_len, k_len = scores.shape
    device = scores.device
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    i = torch.arange(q_len, device=device).view(1, 1, -1, 1)
    j = torch.arange(k_len, device=device).view(1, 1, 1, -1)
    if masking.softcap:
        scores = masking.softcap * torch.tanh(scores / masking.softcap)
    if masking.score_mod is not None:
        scores = masking.score_mod(scores, b, h, i, j)
    if masking.bias is not None:
        scores = scores + masking.bias.to(scores.dtype)
    shift = 0 if masking.top_left else k_len - q_len
    hidden = torch.zeros((1, 1, q_len, k_len), dtype=torch.bool, device=device)
    if masking.right is not None:
        hidden = hidden | (j > i + shift + masking.right)
    if masking.left is not None:
        hidden = hidden | (j < i + shift - masking.left)
    if masking.allowed is not None:
        hidden = hidden | ~masking.allowed
    if masking.mask_mod is not None:
        hidden = hidden | ~masking.mask_mod(b, h, i, j)
    return scores.masked_fill(hidden, -math.inf)


def allowed_by_lists(
    lists: tuple[torch.Tensor | None, ...],
    block: tuple[int, int],
    shape: tuple[int, int, int, int],
    hidden_in_partial: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask of the (b, h, i, j) of `shape` (B, H, Sq, Sk) that lists of key blocks allow.

    lists: (counts, indices, full counts, full indices), (B or 1, H or 1, query blocks[, entries]), either
    pair None. Elements of `hidden_in_partial` (broadcastable) are taken away from blocks of the first pair.
    """
    batch, heads = shape[:2]
    allowed = torch.zeros(shape, dtype=torch.bool)
    hidden = None if hidden_in_partial is None else hidden_in_partial.cpu().expand(shape)
    for (counts, indices), partial in ((lists[:2], True), (lists[2:], False)):
        if counts is None or indices is None:
            continue
        counts, indices = (x.expand(batch, heads, *x.shape[2:]).cpu() for x in (counts, indices))
        for b in range(batch):
            for h in range(heads):
                for row in range(counts.shape[2]):
                    rows = slice(row * block[0], (row + 1) * block[0])
                    for entry in range(int(counts[b, h, row])):
                        first = int(indices[b, h, row, entry]) * block[1]
                        columns = slice(first, first + block[1])
                        seen = torch.ones_like(allowed[b, h, rows, columns])
                        if partial and hidden is not None:
                            seen &= ~hidden[b, h, rows, columns]
                        allowed[b, h, rows, columns] |= seen
    return allowed
