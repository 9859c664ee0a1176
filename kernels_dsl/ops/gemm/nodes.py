"""Products as nodes of autograd; `recorded.Recorded` is the plan of a call that makes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.eager_path import needs_dispatcher
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.gemm import grad
from kernels_dsl.ops.gemm.arguments import GemmArguments
from kernels_dsl.ops.gemm.recorded import RecordedCall

_grad_enabled = torch.is_grad_enabled
Gradients = tuple[torch.Tensor | None, ...]
Both = tuple[torch.Tensor | None, torch.Tensor | None]
Factors = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Both]
"""(gradient, left, right) -> gradients of the factors, None for one that is not needed."""


def record(
    ctx: Any,
    call: RecordedCall,
    left: torch.Tensor,
    right: torch.Tensor,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Computes the product and keeps what its gradients need: the forward function of every node."""
    recorded, plan = call.recorded, call.recorded.plan
    kept = () if recorded.kept is None else (recorded.kept(),)
    if recorded.again:
        ctx.save_for_backward(left, right, c, bias, *kept)
    else:
        ctx.save_for_backward(left, right, None, None, *kept)
    ctx.call = call
    operands = None
    if plan.operands is not None:
        operands = plan.operands((call.alpha, call.beta, c, bias, residual, *kept))
    return plan.run(left, right, None, operands)


def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
    """The gradients of a call and its tensors. A pass like an earlier one finds all that it runs by one
    look-up, where no function lies between the product and its result."""
    call, needs, saved = ctx.call, ctx.needs_input_grad, ctx.saved_tensors
    recorded = call.recorded
    tensors, key = (gradient, saved[0], saved[1]), (call.alpha, needs)
    known = recorded.linear and not _grad_enabled()
    if known:
        found: Gradients | None = call_cache.served(recorded.gradients, key, tensors, tensors)
        if found is not None:
            return found
    ctx.keywords = {**recorded.keywords, "alpha": call.alpha, "beta": call.beta}
    ctx.like = recorded.like
    made: Gradients = recorded.node.general(ctx, gradient)
    if known and not needs_dispatcher(tensors):
        run = _run(call, needs, tensors)
        if run is not None:
            call_cache.keep(recorded.gradients, key, tensors, run)
    return made


def _run(
    call: RecordedCall, needs: tuple[bool, ...], tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> Callable[..., Gradients] | None:
    """The gradients of calls like this one, as a function of tensors like these; None where there is no short
    way."""
    gradient, _, right = tensors
    recorded, like_bias = call.recorded, call.recorded.like[1]
    by_rows = like_bias is not None and (recorded.keywords["bias_axis"] != "n" or len(like_bias[0]) != 1)
    if by_rows or gradient.dim() != 2 or right.dim() != 2 or gradient.dtype != right.dtype:
        return None
    factors = None if recorded.factors is None else recorded.factors(call, needs[1:3], tensors)
    if factors is None:
        return None
    bias_dtype = like_bias[1] if like_bias is not None and needs[4] else None

    def run(gradient: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Gradients:
        d_left, d_right = factors(gradient, left, right)
        d_bias = None if bias_dtype is None else grad.summed_over(gradient, 0, bias_dtype)
        return None, d_left, d_right, None, d_bias, None

    return run


def run_of(operation: Any, call: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The product of two factors like those of `call`, which has no operands but alpha."""
    plan = operation.plan_of(call)
    run, operands = plan.run, None
    if plan.operands is not None:
        operands = plan.operands(call.operand_values())
    return lambda x, y: run(x, y, None, operands)  # type: ignore[no-any-return]


class GatedGemm(torch.autograd.Function):
    """A call of `gemm_gated`."""

    forward = staticmethod(record)
    backward = staticmethod(backward)
    general = staticmethod(grad.backward)


class Gemm(torch.autograd.Function):
    """A call of `gemm`."""

    forward = staticmethod(record)
    backward = staticmethod(backward)
    general = staticmethod(grad.backward)


def factors_of_gemm(
    operation: Any,
    call: RecordedCall,
    needs: tuple[bool, ...],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> Factors | None:
    """`Recorded.factors` of `operation`, which is `gemm`, for matrices."""
    gradient, a, b = tensors
    keywords = call.recorded.keywords
    if a.dim() != 2 or operation.target_of(GemmArguments(a, b)).emulated:
        return None
    common = {"alpha": call.alpha, "out_dtype": a.dtype, "family": keywords["family"]}
    fixed = keywords["batch_invariant"]  # the rows are a's; those of b are summed over a's
    of_a = of_b = None
    if needs[0]:
        of_a = run_of(operation, GemmArguments(gradient, b.mT, batch_invariant=fixed, **common))
    if needs[1]:
        of_b = run_of(operation, GemmArguments(a.mT, gradient, **common))

    def run(gradient: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Both:
        d_a = None if of_a is None else of_a(gradient, b.mT)
        return d_a, None if of_b is None else of_b(a.mT, gradient)

    return run
