"""Gradients of attention as autograd sees them: the operator of the backward pass, and what it needs of the
forward one.

`torch.ops.kernels_dsl.attention_backward` gives the gradients of q, k and v. It has no backward of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops import call_cache
from kernels_dsl.ops.attention.arguments import (
    NO_EXTRAS,
    AttentionArguments,
    AttentionOptions,
    Extras,
    MaxSeqlens,
    Seqlens,
    describe,
)
from kernels_dsl.ops.attention.backward import BackwardPlan, Forward
from kernels_dsl.ops.eager_path import signature
from kernels_dsl.ops.operators import define
from kernels_dsl.ops.target import target_of
from lowering.records import frozen

_SCHEMA = (
    "(Tensor do, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_k=None, *, str layout='bshd', "
    "bool causal=False, int? window_left=None, int? window_right=None, str alignment='bottom_right', "
    "float? scale=None, int max_seqlen_q=0, int max_seqlen_k=-1, bool deterministic=True) "
    "-> (Tensor, Tensor, Tensor)"
)
_SCALARS = (
    "layout", "causal", "window_left", "window_right", "alignment", "scale", "max_seqlen_q", "max_seqlen_k",
)  # fmt: skip
"""Keywords of the forward operator that the backward one takes as they are."""
_PLANS: dict[Any, BackwardPlan] = {}


@frozen
class _Options:
    """Keywords of the operator, as the forward one has them."""

    layout: str = "bshd"
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    alignment: str = "bottom_right"
    scale: float | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = -1
    deterministic: bool = True


def _backward(
    do: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options, extras = _Options(**given), NO_EXTRAS
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        longest_k = None if options.max_seqlen_k < 0 else options.max_seqlen_k
        seqlens = Seqlens(cu_seqlens_q, cu_seqlens_k, seqused_k)
        extras = Extras(seqlens=seqlens, max_seqlens=MaxSeqlens(options.max_seqlen_q, longest_k))
    forward = Forward(q, k, v, out, lse, extras)
    tensors = (do, q, k, v, out, lse, d_lse, cu_seqlens_q, cu_seqlens_k, seqused_k)
    key = (*map(signature, tensors), options)
    plan, target = _PLANS.get(key), target_of(q, "q")
    if plan is None:
        window = (options.window_left, options.window_right)
        scores = AttentionOptions(
            options.causal, None if window == (None, None) else window, options.alignment, options.scale, 0.0
        )
        call = describe(AttentionArguments(q, k, v, scores, options.layout, extras))
        plan = BackwardPlan(call, forward, do, target, options.deterministic)
        if not target.emulated:
            call_cache.put(_PLANS, key, plan)
    found = plan.run(forward, do, d_lse)
    return found.q, found.k, found.v


def _backward_fake(
    do: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *others: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


define("attention_backward", _SCHEMA, _backward, _backward_fake, "second derivative")


def setup_context(
    ctx: Any,
    inputs: tuple[torch.Tensor | None, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Keeps what the backward pass needs. RuntimeError for a call without the log-sum-exp."""
    if not keyword_only_inputs["return_lse"]:
        raise RuntimeError("return_lse is False, must be True for a gradient: it is computed from the output")
    seqlens = [x for x in inputs[9:12] if x is not None]
    ctx.save_for_backward(*inputs[:3], *output, *seqlens)
    ctx.given = {name: keyword_only_inputs[name] for name in _SCALARS}
    ctx.set_materialize_grads(False)


def backward(ctx: Any, do: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
    """Gradients of the forward operator's positional arguments."""
    q, k, v, out, lse, *seqlens = ctx.saved_tensors
    others = len(ctx.needs_input_grad) - 3
    if do is None and d_lse is None:
        return (None,) * (others + 3)
    if do is None:
        do = torch.zeros_like(out)
    found = torch.ops.kernels_dsl.attention_backward(do, d_lse, q, k, v, out, lse, *seqlens, **ctx.given)
    needed = (x if need else None for x, need in zip(found, ctx.needs_input_grad))
    return (*needed, *(None,) * others)
