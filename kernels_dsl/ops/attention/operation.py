"""`attention` in its three forms as an operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES, asks_gradients, check_tensor, watched
from kernels_dsl.ops.attention.arguments import (
    NO_EXTRAS,
    AttentionArguments,
    AttentionCall,
    describe,
)
from kernels_dsl.ops.attention.outputs import check_addresses_and_values, check_out, out_shape, repeated
from kernels_dsl.ops.attention.plan import Plan, build
from kernels_dsl.ops.operation import Operation

_grad_enabled = torch.is_grad_enabled


class _Attention(Operation[AttentionArguments, Plan]):
    def seen_as_operator(self, call: AttentionArguments) -> bool:
        """True if torch.compile, a mode, a transform, autograd or a tensor subclass must see the call."""
        if watched():
            return True
        tensors = [x for x in call.read().values() if x is not None]
        if asks_gradients(tensors):
            return True
        subclass = any(isinstance(x, torch.Tensor) and type(x) not in PLAIN_TYPES for x in tensors)
        return subclass and all(isinstance(x, torch.Tensor) for x in (call.q, call.k, call.v))

    def recorded(self, call: AttentionArguments, operator: Callable[[], Any]) -> Any:
        """Such calls as nodes of autograd; None for those that only operators can be, and say so."""
        numbers = any(not isinstance(x, torch.Tensor) for x in call.extras.aux)
        if call.out is not None or call.config is not None or numbers:
            return None
        from kernels_dsl.ops.attention.recorded import Recorded, all_keywords_of

        refuse_gradient(call)
        forward = replace(call, return_lse=True, score_mod_bwd=None)
        return Recorded(self.plan_of(forward), all_keywords_of(call))

    def entry(self, plan: Plan, call: AttentionArguments, tensors: tuple[Any, ...]) -> Any:
        """The entry of the call cache: the bare launch, where q, k and v alone are given."""
        functions = call.score_mod is call.mask_mod is None
        if call.extras is NO_EXTRAS and functions and call.config is None and call.family is None:
            if call.out is None and not call.return_lse:
                return plan.bare
        return repeated(plan, call.out, tensors)


def refuse_gradient(call: AttentionArguments) -> None:
    """RuntimeError where a gradient is asked for that is not there, TypeError for what is no mask."""
    grad = _grad_enabled()
    for name, x in call.read().items():
        if type(x) in PLAIN_TYPES:
            if grad and x.requires_grad:
                from kernels_dsl.ops.attention.backward import check_gradient  # imported by those who train

                check_gradient(call, name, ATTENTION.target_of(call))
        elif x is not None and isinstance(x, torch.Tensor):
            if hasattr(x, "seq_len_kv"):
                raise TypeError(f"mask is a {type(x).__name__}, must be None: say causal and alignment")
            check_tensor(name, x)


def _describe(call: AttentionArguments) -> AttentionCall:
    described = describe(call)
    if call.extras.aux and call.score_mod is call.mask_mod is None:
        raise ValueError("aux is given, must be empty without score_mod and mask_mod, whose arguments it is")
    check_out(call.out, out_shape(described), call.q.dtype, call.q.device)
    return described


def _follow(plan: Plan, call: AttentionArguments) -> Any:
    check_addresses_and_values(call)
    result, lse = plan.run(call.q, call.k, call.v, call.out, call.extras)
    return (result, lse) if call.return_lse else result


ATTENTION = _Attention("attention", AttentionArguments, _describe, build, _follow)
