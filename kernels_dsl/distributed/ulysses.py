"""Ulysses attention: all-to-all gives each rank the whole sequence of some heads, and the rows back.

Between the two, a rank's attention is that of one GPU: the same kernel, launched once, without a merge.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from kernels_dsl.distributed.launches import packing_of
from kernels_dsl.distributed.parts import PackedSharing
from kernels_dsl.distributed.ring import Call
from kernels_dsl.distributed.sequence import by_ranks, in_sequence
from kernels_dsl.ops.attention.attention import attention, attention_varlen
from kernels_dsl.ops.serving.merge_operation import Merged


def _sent(x: torch.Tensor, call: Call) -> torch.Tensor:
    """(ranks, …) by the rank that had it, from x (ranks, …) by the rank that gets it."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=call.ranks.group)
    return received


def _to_heads(x: torch.Tensor, call: Call) -> torch.Tensor:
    """(B, rows of all ranks, heads / ranks, D) from (B, rows, heads, D)."""
    batch, rows, heads, dim = x.shape
    size = call.ranks.size
    by_heads = x.view(batch, rows, size, heads // size, dim).permute(2, 1, 0, 3, 4)
    return in_sequence(_sent(by_heads, call), call.sharing.order).movedim(0, 1)


def _to_rows(x: torch.Tensor, call: Call) -> torch.Tensor:
    """The inverse of `_to_heads`."""
    by_rows = _sent(by_ranks(x.movedim(1, 0), call.ranks.size, call.sharing.order), call)
    size, rows, batch, heads, dim = by_rows.shape
    return by_rows.permute(2, 1, 0, 3, 4).reshape(batch, rows, size * heads, dim)


class _Exchange(torch.autograd.Function):
    """`_to_heads` or `_to_rows`, each of which is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, call: Call, to_heads: bool, x: torch.Tensor) -> torch.Tensor:
        """The tensor of the other layout."""
        ctx.call, ctx.to_heads = call, to_heads
        return _to_heads(x, call) if to_heads else _to_rows(x, call)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """The gradient in the layout of x."""
        back = _to_rows if ctx.to_heads else _to_heads
        return None, None, back(gradient, ctx.call)


def refuse_heads(heads: int, kv_heads: int, size: int) -> None:
    """ValueError where so many ranks cannot share the heads."""
    if heads % size:
        raise ValueError(f'q has {heads} heads, must have a multiple of {size}, the ranks, with "ulysses"')
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f'k has {kv_heads} heads, must have a multiple or a divisor of {size}, the ranks, with "ulysses"'
        )


def _packed(starts: tuple[int, ...], tensors: list[torch.Tensor], keywords: dict[str, Any]) -> Any:
    """`attention` of packed sequences; rows after the last one see nothing."""
    rows, end = tensors[0].shape[1], starts[-1]
    q, k, v = (x[0, :end] for x in tensors)
    packing = packing_of(starts, q.device)
    found = attention_varlen(q, k, v, packing.starts, packing.starts, packing.longest, **keywords)
    out, lse = found if keywords["return_lse"] else (found, None)
    out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, rows - end))[None]
    if lse is None:
        return out
    return out, torch.nn.functional.pad(lse, (0, rows - end), value=-math.inf)[None]


def ulysses(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool) -> Merged:
    """Output and log-sum-exp of a rank's queries; the latter is (0,) where nobody asks for it."""
    size, options = call.ranks.size, call.options
    if k.shape[2] % size:  # several ranks get the same head
        k, v = (x.repeat_interleave(size // x.shape[2], 2) for x in (k, v))
    whole = [_Exchange.apply(call, True, x) for x in (q, k, v)]
    keywords: dict[str, Any] = {
        "window": call.sharing.limits, "alignment": "top_left", "scale": options.scale,
        "softcap": options.softcap, "return_lse": with_lse, "deterministic": options.deterministic,
    }  # fmt: skip
    if options.masking is not None:
        heads = q.shape[2] // size
        masking = options.masking.of_heads(call.ranks.rank * heads, heads, q.device)
        keywords.update(blocks=masking.blocks, mask_mod=masking.mask_mod, aux=masking.aux)
    if isinstance(call.sharing, PackedSharing):
        result = _packed(call.sharing.starts, whole, keywords)
    else:
        result = attention(*whole, **keywords)
    if not with_lse:
        return Merged(_Exchange.apply(call, False, result), q.new_empty(0))
    out, lse = result
    rows: torch.Tensor = _Exchange.apply(call, False, lse.mT[..., None])
    return Merged(_Exchange.apply(call, False, out), rows[..., 0].mT.contiguous())
