"""Attention and its gradients by formula, in float64: what ranks launch where no kernel is to be tested."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from kernels_dsl.ops.attention.backward import Forward, Gradients
from kernels_dsl.ops.attention.functions import function_of
from kernels_dsl.sparse.block_lists import BlockLists


class Result(NamedTuple):
    """Output and log-sum-exp (B, H, S)."""

    out: torch.Tensor
    lse: torch.Tensor


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, H, S, D), float64."""
    return x.double().repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)


class Mask(NamedTuple):
    """All that hides keys, as `attention` takes it; `starts` of packed sequences."""

    window: Any = None
    starts: Any = None
    blocks: BlockLists | None = None
    mask_mod: Any = None
    aux: tuple[Any, ...] = ()
    tensor: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def visible(self, shape: torch.Size) -> torch.Tensor:
        """bool (B, H, Sq, Sk) or what broadcasts there; shape: of the scores."""
        b, h, i, j = (torch.arange(n).view([-1, *[1] * (3 - mode)]) for mode, n in enumerate(shape))
        left, right = (None, None) if self.window is None else self.window
        found = torch.ones(shape, dtype=torch.bool)
        if left is not None:
            found &= j >= i - left
        if right is not None:
            found &= j <= i + right
        if self.starts is not None:  # rows after the last sequence see nothing
            starts = torch.as_tensor(self.starts)
            sequence_of = (torch.searchsorted(starts, x.contiguous(), right=True) for x in (i, j))
            found &= (next(sequence_of) == next(sequence_of)) & (i < starts[-1])
        if self.tensor is not None and self.tensor.dtype == torch.bool:
            found &= self.tensor
        if self.mask_mod is not None:
            found &= self.mask_mod(b, h, i, j, *self.aux)
        if self.blocks is not None:
            masked, full = (self._listed(n, shape) for n in (0, 2))
            found = full | (masked & found)
        return found

    def _listed(self, first: int, shape: torch.Size) -> torch.Tensor:
        assert self.blocks is not None
        block_q, block_k = self.blocks.block
        counts, indices = self.blocks.tensors[first : first + 2]
        if counts is None or indices is None:
            return torch.zeros((), dtype=torch.bool)
        columns = -(-shape[3] // block_k)
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        grid = torch.zeros(*listed.shape[:3], columns + 1, dtype=torch.bool)
        grid.scatter_(-1, torch.where(listed, indices, columns).long(), True)
        grid = grid[..., :columns].repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)
        return grid[:, :, : shape[2], : shape[3]]


def _scores(q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float | None) -> torch.Tensor:
    scores = _heads(q, q.shape[2]) @ _heads(k, q.shape[2]).mT * (scale or 1 / math.sqrt(q.shape[-1]))
    if mask.tensor is not None and mask.tensor.dtype != torch.bool:
        scores = scores + mask.tensor
    return scores.masked_fill(~mask.visible(scores.shape), -math.inf)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float | None = None
) -> Result:
    """Attention in float64, for autograd too."""
    scores = _scores(q, k, mask, scale)
    if mask.sinks is not None:  # keys of no value
        sinks = mask.sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat((scores, sinks), -1), torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 1))
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
    **mask: Any,
) -> Any:
    """In place of `attention`, with the arguments that ranks give."""
    assert alignment == "top_left" and softcap == 0.0
    assert all(limit is None or limit >= 0 for limit in window)
    found, lse = exact(q, k, v, Mask(window, **mask), scale)
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
    mask_mod: str | None = None,
    **options: Any,
) -> Gradients:
    """In place of the operator of the backward pass: from the log-sum-exp and the output of the whole."""
    extras = forward.extras
    starts = None if extras.seqlens is None else extras.seqlens.q
    mask = Mask((window_left, window_right), starts, extras.blocks, function_of(mask_mod), extras.aux)
    if layout == "bshd":
        return gradients_by_formula(forward, do, d_lse, mask, scale)
    whole, d_lse = without_packing(forward), None if d_lse is None else d_lse[None]
    return with_packing(gradients_by_formula(whole, do[None], d_lse, mask, scale))


def without_packing(forward: Forward) -> Forward:
    """A forward pass of packed sequences as one of a batch."""
    x = forward
    return Forward(x.q[None], x.k[None], x.v[None], x.out[None], x.lse[None], x.extras)


def with_packing(found: Gradients) -> Gradients:
    """The gradients of its packed tensors."""
    assert found.q is not None and found.k is not None and found.v is not None
    return Gradients(found.q[0], found.k[0], found.v[0], found.sinks, found.mask)


def gradients_by_formula(
    forward: Forward, do: torch.Tensor, d_lse: torch.Tensor | None, mask: Mask, scale: float | None
) -> Gradients:
    """Gradients in the dtype of q."""
    q, k, v, heads = forward.q, forward.k, forward.v, forward.q.shape[2]
    scale = scale or 1 / math.sqrt(q.shape[-1])
    scores = _scores(q, k, mask, scale)
    probs = torch.exp(scores - forward.lse.double()[..., None]).nan_to_num(0.0)
    do_heads = _heads(do, heads)
    sums = (do_heads * _heads(forward.out, heads)).sum(-1)
    if d_lse is not None:
        sums = sums - d_lse.double()
    d_masked = probs * (do_heads @ _heads(v, heads).mT - sums[..., None])
    d_scores, d_sinks, d_mask = d_masked * scale, None, None
    if mask.sinks is not None:  # a key of the value 0
        d_sinks = -(torch.exp(mask.sinks.double()[:, None] - forward.lse.double()) * sums).sum((0, 2))
        d_sinks = d_sinks.to(mask.sinks.dtype)
    if mask.tensor is not None and mask.tensor.dtype != torch.bool:
        d_mask = d_masked.sum_to_size(mask.tensor.shape).to(mask.tensor.dtype)
    dq = (d_scores @ _heads(k, heads)).transpose(1, 2)
    dk, dv = d_scores.mT @ _heads(q, heads), probs.mT @ do_heads

    def of_group(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).unflatten(2, (k.shape[2], -1)).sum(3).to(q.dtype)

    return Gradients(dq.to(q.dtype), of_group(dk), of_group(dv), d_sinks, d_mask)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks launch these in place of kernels; results are merged by the kernel."""
    for module in ("launches", "ulysses"):
        monkeypatch.setattr(f"kernels_dsl.distributed.{module}.attention", attention)
        monkeypatch.setattr(f"kernels_dsl.distributed.{module}.attention_varlen", attention_varlen)
    monkeypatch.setattr("kernels_dsl.distributed.launches.gradients_of", gradients_of)
