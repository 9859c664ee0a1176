"""Gradients of attention as autograd sees them: the operator of the backward pass, and what it needs of the
forward one.

`torch.ops.kernels_dsl.attention_backward` gives the gradients of q, k, v, the sinks and the mask; those
that nobody asks for have no elements. It has no backward of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels_dsl.checks.eager_path import needs_dispatcher
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.attention.arguments import (
    NO_EXTRAS,
    AttentionArguments,
    OperatorArguments,
    longest_of,
)
from kernels_dsl.ops.attention.backward import BackwardPlan, Forward, Gradients, Needs, described
from kernels_dsl.ops.attention.backward_repeated import Run, repeated_run
from kernels_dsl.ops.attention.functions import function_of
from kernels_dsl.ops.operators import define, schema_of
from kernels_dsl.ops.sm_margin import with_margin
from kernels_dsl.ops.target import target_of
from lowering.records import frozen

_PLANS: dict[Any, BackwardPlan] = {}
_CALLS: dict[Any, Any] = {}
"""Plans of backward passes of q, k and v alone, found by their tensors."""


@frozen
class BackwardOperands(OperatorArguments):
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
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    full_counts: torch.Tensor | None = None
    full_indices: torch.Tensor | None = None
    aux: tuple[Any, ...] = ()
    layout: str = "bshd"
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    alignment: str = "bottom_right"
    scale: float | None = None
    softcap: float = 0.0
    block_q: int = 128
    block_k: int = 128
    mask_mod: str | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = -1
    deterministic: bool = True
    needs_q: bool = True
    needs_kv: bool = True
    needs_sinks: bool = False
    needs_mask: bool = False
    score_mod: str | None = None
    score_mod_bwd: str | None = None
    family: str | None = None

    outputs = ()

    def needs(self) -> Needs:
        """The gradients that are asked for."""
        return Needs(self.needs_q, self.needs_kv, self.needs_sinks, self.needs_mask)


_OWN = ("needs_q", "needs_kv", "needs_sinks", "needs_mask")
_SCALARS = tuple(name for name in BackwardOperands.choices if name not in _OWN)
"""Keywords of the forward operator that the backward one takes as they are."""
_DEFAULTS = {name: BackwardOperands.__dataclass_fields__[name].default for name in (*_SCALARS, *_OWN)}
_KEPT = (
    "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "mask", "sinks", "counts",
    "indices", "full_counts", "full_indices",
)  # fmt: skip
"""Tensors and results of the forward operator that the backward one takes, before `aux`."""
_FORWARD = (
    "q", "k", "v", "mask", "sinks", "counts", "indices", "full_counts", "full_indices", "cu_seqlens_q",
    "cu_seqlens_k", "seqused_k", "block_table", "aux",
)  # fmt: skip
"""Tensors of the forward operator."""
_LEAVES = ("q", "k", "v", "sinks", "mask")
"""Those that have gradients."""


def _operands(tensors: tuple[Any, ...], keywords: dict[str, Any]) -> BackwardOperands:
    named = dict(zip(BackwardOperands.tensors, tensors))
    return BackwardOperands(**{**named, "aux": tuple(named.get("aux") or ())}, **keywords)


def _settled(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords, `deterministic` where `torch.use_deterministic_algorithms` asks for it."""
    if keywords.get("deterministic", True) or not torch.are_deterministic_algorithms_enabled():
        return keywords
    return {**keywords, "deterministic": True}


def _plan_of(x: BackwardOperands, forward: Forward) -> BackwardPlan:
    key, target = with_margin(x.plan_key()), target_of(x.q, "q")
    plan = _PLANS.get(key)
    if plan is None:
        score_mod, mask_mod = function_of(x.score_mod), function_of(x.mask_mod)
        call = AttentionArguments(
            x.q, x.k, x.v, x.options(), x.layout, forward.extras, score_mod, mask_mod,
            score_mod_bwd=function_of(x.score_mod_bwd),
        )  # fmt: skip
        plan = BackwardPlan(described(call), forward, x.do, target, x.deterministic, x.needs(), x.family)
        if not target.emulated:
            call_cache.put(_PLANS, key, plan)
    return plan


def _forward_of(x: BackwardOperands) -> Forward:
    return Forward(x.q, x.k, x.v, x.out, x.lse, x.extras())


def _repeated(
    key: Any, do: torch.Tensor, d_lse: torch.Tensor | None, results: Sequence[torch.Tensor]
) -> Gradients | None:
    """Gradients of q, k and v alone in a call like an earlier one of this key; None where there was none, or
    something watches this one. `results`: q, k, v, the output and the log-sum-exp."""
    tensors = _given(do, d_lse, results)
    gradients: Gradients | None = call_cache.served(_CALLS, key, tensors, (*results, do, d_lse))
    return gradients


def _given(do: torch.Tensor, d_lse: torch.Tensor | None, results: Sequence[Any]) -> tuple[Any, ...]:
    return (do, *results) if d_lse is None else (do, d_lse, *results)


def _eager(tensors: tuple[Any, ...], keywords: dict[str, Any], key: Any = None) -> Gradients:
    """Gradients of a call that nothing watches. `key`: what `_repeated` shall find it by."""
    do, d_lse, *results = tensors[:7]
    keywords = _settled(keywords)
    alone = all(x is None for x in tensors[7:])
    if alone and key is None:
        q, k, *_ = results
        key = (q.shape, k.shape, d_lse is None, *keywords.values())
        found = _repeated(key, do, d_lse, results)
        if found is not None:
            return found
    x = _operands(tensors, keywords)
    forward = _forward_of(x)
    plan = _plan_of(x, forward)
    gradients = plan.run(forward, do, d_lse)
    if alone and not target_of(x.q, "q").emulated:
        run = repeated_run(plan, x.q, x.k, x.v) or _run_alone(plan)
        call_cache.keep(_CALLS, key, _given(do, d_lse, results), run)
    return gradients


def _run_alone(plan: BackwardPlan) -> Run:
    """The run of a plan on (q, k, v, output, log-sum-exp, do, d_lse or None)."""

    return lambda q, k, v, out, lse, do, d_lse: plan.run(Forward(q, k, v, out, lse, NO_EXTRAS), do, d_lse)


def gradients_of(
    forward: Forward, do: torch.Tensor, d_lse: torch.Tensor | None = None, **options: Any
) -> Gradients:
    """Gradients of q, k and v for a forward pass without mask and sinks, by the operator's keywords.

    For callers that record calls themselves, below autograd.
    """
    extras = forward.extras
    seqlens = (None, None, None) if extras.seqlens is None else extras.seqlens[:3]
    longest = longest_of(extras)
    keywords = {**_DEFAULTS, **options, "max_seqlen_q": longest.q, "max_seqlen_k": longest.k}
    results = (forward.q, forward.k, forward.v, forward.out, forward.lse)
    if extras.blocks is None and not extras.aux:
        return _eager((do, d_lse, *results, *seqlens, None, None, None), keywords)
    lists: Any = (None, None, None, None)
    if extras.blocks is not None:
        lists = extras.blocks.tensors
        keywords["block_q"], keywords["block_k"] = extras.blocks.block
    return _eager((do, d_lse, *results, *seqlens, None, None, *lists, extras.aux or None), keywords)


def _in_order(found: Gradients) -> tuple[torch.Tensor | None, ...]:
    """Gradients in the order of `_LEAVES`."""
    return found.q, found.k, found.v, found.sinks, found.mask


def _backward(*tensors: torch.Tensor | None, **keywords: Any) -> tuple[torch.Tensor, ...]:
    x = _operands(tensors, _settled(keywords))
    forward = _forward_of(x)
    found = _plan_of(x, forward).run(forward, x.do, x.d_lse)
    none = x.q.new_empty(0)
    return tuple(none if y is None else y for y in _in_order(found))


def _backward_fake(*tensors: torch.Tensor | None, **keywords: Any) -> tuple[torch.Tensor, ...]:
    x = _operands(tensors, keywords)
    asked = (
        (x.q, x.needs_q), (x.k, x.needs_kv), (x.v, x.needs_kv), (x.sinks, x.needs_sinks),
        (x.mask, x.needs_mask),
    )  # fmt: skip
    return tuple(y.new_empty(y.shape) if y is not None and need else x.q.new_empty(0) for y, need in asked)


_RESULTS = f"-> ({', '.join(['Tensor'] * len(_LEAVES))})"
define(
    "attention_backward", f"({schema_of(BackwardOperands)}) {_RESULTS}", _backward,
    _backward_fake, "second derivative",
)  # fmt: skip


def setup_context(
    ctx: Any,
    inputs: tuple[torch.Tensor | None, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[torch.Tensor, torch.Tensor],
    call: Any = None,
) -> None:
    """Keeps what the backward pass needs. RuntimeError for a call without the log-sum-exp.

    `call`: the first argument of a node, before the inputs; None for the operator.
    """
    ctx.call, ctx.keywords = call, keyword_only_inputs
    ctx.set_materialize_grads(False)
    if call is not None and call.extras is NO_EXTRAS:
        ctx.save_for_backward(*inputs, *output)
        return
    if not keyword_only_inputs["return_lse"]:
        raise RuntimeError("return_lse is False, must be True for a gradient: it is computed from the output")
    named: dict[str, Any] = dict(zip(_FORWARD, inputs))
    asked = _asked(ctx)
    names = [*_FORWARD, *["aux"] * len(asked)]  # which has several tensors
    lacking = [name for name, needed in zip(names, asked) if needed and name not in _LEAVES]
    if lacking:
        raise RuntimeError(f"attention has no gradient with {lacking[0]} yet: call it under torch.no_grad()")
    named.update(zip(("out", "lse"), output))
    ctx.save_for_backward(*map(named.get, _KEPT), *(named.get("aux") or ()))


def _asked(ctx: Any) -> tuple[bool, ...]:
    """The inputs whose gradients are asked for, in the order of the operator's tensors."""
    needed: tuple[bool, ...] = ctx.needs_input_grad
    return needed if ctx.call is None else needed[1:]


def backward(ctx: Any, do: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
    """Gradients of the forward operator's positional arguments."""
    saved, key = ctx.saved_tensors, None
    if ctx.call is not None and ctx.call.extras is NO_EXTRAS and do is not None:
        _, needs_q, needs_k, needs_v = ctx.needs_input_grad
        ordered = torch.are_deterministic_algorithms_enabled()
        key = (ctx.call.recorded, needs_q, needs_k or needs_v, ordered, d_lse is None)
        alone = _repeated(key, do, d_lse, saved)
        if alone is not None:
            return None, alone.q, alone.k if needs_k else None, alone.v if needs_v else None
    kept, aux = dict(zip(_KEPT, saved)), saved[len(_KEPT) :]
    asked = dict(zip(_FORWARD, _asked(ctx)))
    lead = () if ctx.call is None else (None,)
    results: dict[str, Any] = dict.fromkeys(asked)  # fewer than _FORWARD where the last are not given
    if aux and ctx.call is None:
        results["aux"] = [None] * len(aux)
    if do is None and d_lse is None:
        return (*lead, *results.values())
    if do is None:
        do = torch.zeros_like(kept["out"])
    needs = {
        "needs_q": asked["q"], "needs_kv": asked["k"] or asked["v"],
        "needs_sinks": asked.get("sinks", False), "needs_mask": asked.get("mask", False),
    }  # fmt: skip
    tensors = (do, d_lse, *kept.values(), aux or None)
    keywords = {**{name: ctx.keywords[name] for name in _SCALARS}, **needs}
    found: Any
    if ctx.call is not None and not needs_dispatcher((do, d_lse, *saved)):
        found = _in_order(_eager(tensors, keywords, key))
    else:
        found = torch.ops.kernels_dsl.attention_backward(*tensors, **keywords)
    results.update((name, x) for name, x in zip(_LEAVES, found) if asked.get(name))
    return (*lead, *results.values())
