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
from kernels_dsl.ops.operation import Arguments
from kernels_dsl.ops.operators import define, schema_of
from kernels_dsl.ops.target import target_of
from lowering.records import frozen

_PLANS: dict[Any, BackwardPlan] = {}


@frozen
class BackwardOperands(Arguments):
    """The arguments of the operator. Keywords are those of the forward one; a length below 0 is none."""

    do: torch.Tensor
    d_lse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    layout: str = "bshd"
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    alignment: str = "bottom_right"
    scale: float | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = -1
    deterministic: bool = True

    outputs = ()

    def options(self) -> AttentionOptions:
        """The options of the forward call."""
        window = (self.window_left, self.window_right)
        unlimited = window == (None, None)
        return AttentionOptions(self.causal, None if unlimited else window, self.alignment, self.scale, 0.0)

    def extras(self) -> Extras:
        """Its tensors beside q, k and v."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return NO_EXTRAS
        longest_k = None if self.max_seqlen_k < 0 else self.max_seqlen_k
        seqlens = Seqlens(self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k)
        return Extras(seqlens=seqlens, max_seqlens=MaxSeqlens(self.max_seqlen_q, longest_k))


_SCALARS = tuple(name for name in BackwardOperands.choices if name != "deterministic")
"""Keywords of the forward operator that the backward one takes as they are."""


def _backward(*tensors: torch.Tensor | None, **given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = BackwardOperands(*tensors, **given)  # type: ignore[arg-type]
    extras = x.extras()
    forward = Forward(x.q, x.k, x.v, x.out, x.lse, extras)
    key, target = x.plan_key(), target_of(x.q, "q")
    plan = _PLANS.get(key)
    if plan is None:
        call = describe(AttentionArguments(x.q, x.k, x.v, x.options(), x.layout, extras))
        plan = BackwardPlan(call, forward, x.do, target, x.deterministic)
        if not target.emulated:
            call_cache.put(_PLANS, key, plan)
    found = plan.run(forward, x.do, x.d_lse)
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


define(
    "attention_backward", f"({schema_of(BackwardOperands)}) -> (Tensor, Tensor, Tensor)", _backward,
    _backward_fake, "second derivative",
)  # fmt: skip


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
