"""Gradients of `gemm`, through the same kernels.

With z = alpha · A B + beta · C + bias, D = f(z) + R, or f of z's pairs of columns, and G the gradient of D:

    dR = G,  dz = G · f'(z),  dA = alpha · dz Bᵀ,  dB = alpha · Aᵀ dz,  dC = beta · dz,  dbias = Σ dz

For an activation's gradient z is computed again, in float32. A gate's z is kept, rounded as D is, by calls
past the dispatcher: their kernel stores it beside D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.checks.eager_path import needs_dispatcher
from lowering.records import NamedTuple

_FACTORS = 2  # a, b
Saved = tuple[torch.Tensor | None, ...]
_AGAIN = ("bias_axis", "alpha", "beta", "family", "batch_invariant")
"""Options with which a product is computed again."""


def derivative_of(activation: str) -> Callable[[Any, Any], Any] | None:
    """(gradient of D, z), both float32 -> the gradient of z, of an activation or a gate; None without one."""
    row = ACTIVATIONS.get(activation) or GATES[activation]
    return row.backward


def refuse_functions(epilogue: Any, activation: str | None) -> None:
    """ValueError where gradients are asked for that do not exist: through a user's own epilogue, or an
    activation without a derivative."""
    if epilogue is not None:
        raise ValueError(
            "epilogue is given and an input requires grad, must not: PyTorch cannot differentiate a user's "
            "epilogue; use torch.no_grad(), or activation and the other arguments"
        )
    if activation is not None and derivative_of(activation) is None:
        raise ValueError(
            f"activation is {activation!r} and an input requires grad, must be one with a derivative: "
            f"{', '.join(sorted(name for name, row in ACTIVATIONS.items() if row.backward is not None))}"
        )


def keep_for_backward(
    ctx: Any, inputs: Sequence[Any], keywords: dict[str, Any], factors: int, own: Saved = ()
) -> None:
    """Keeps what gradients need of an operator's call.

    `inputs`: so many factors, c, bias, residual and the epilogue's arguments. `keywords`: those of the
    operator. `own`: tensors to save after all others. ValueError for a function without a derivative.
    """
    refuse_functions(keywords.get("epilogue"), keywords["activation"])
    c, bias, residual = (*inputs[factors:], None, None, None)[:3]  # a gated product has no residual
    again = keywords["activation"] is not None  # the product is computed again
    ctx.save_for_backward(*inputs[:factors], c if again else None, bias if again else None, *own)
    ctx.keywords, ctx.call = keywords, None
    ctx.like = [None if x is None else (x.shape, x.dtype) for x in (c, bias, residual)]


def saved_of(ctx: Any) -> tuple[Any, ...]:
    """The tensors that were saved, behind the indices of a node, which its plan holds."""
    saved: tuple[Any, ...] = ctx.saved_tensors
    return saved if ctx.call is None else (*ctx.call.recorded.indices, *saved)


def operators_for(ctx: Any, tensors: Sequence[Any]) -> Any:
    """Products by the operators' names, for these tensors of a backward pass: the operators themselves, or
    what goes past the dispatcher where nothing must see a product."""
    call = ctx.call
    if call is None:
        return torch.ops.kernels_dsl
    if needs_dispatcher(tuple(tensors)):
        call.recorded.operator()  # registers them
        return torch.ops.kernels_dsl
    return call.recorded.products(call.calls)


def matched(ctx: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """As many gradients as the call had arguments."""
    if ctx.call is not None:
        return (None, *gradients[len(ctx.call.recorded.indices) :])
    return (*gradients, None)[: len(ctx.needs_input_grad)]


def summed_over(x: torch.Tensor, modes: Any, dtype: torch.dtype) -> torch.Tensor:
    """x summed over modes in float32, in `dtype`."""
    if x.dtype == dtype:
        return torch.sum(x, modes)  # PyTorch's kernel sums 16 bits in float32 and rounds once
    return x.sum(modes, dtype=torch.float32).to(dtype)


class EpilogueGradients(NamedTuple):
    """Gradients of c, bias and residual, None for those that are not needed, and of the product: dz."""

    c: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    d_z: torch.Tensor


def epilogue_gradients(
    ctx: Any,
    gradient: torch.Tensor,
    needed: Sequence[bool],
    product: Callable[[], torch.Tensor],
    through: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> EpilogueGradients:
    """Gradients through the epilogue. `needed`: of each factor, of c, bias and residual. `product`: computes
    z again, in float32. `through`: from the gradient of D to that of z, where z was kept."""
    *factors, needs_c, needs_bias, needs_residual = needed
    keywords, (like_c, like_bias, like_residual) = ctx.keywords, ctx.like
    d_c = d_bias = d_residual = None
    if needs_residual:
        shape, dtype = like_residual
        d_residual = gradient.sum_to_size(shape).to(dtype)
    d_z = gradient
    if keywords["activation"] is not None and (any(factors) or needs_c or needs_bias):
        backward = derivative_of(keywords["activation"])
        assert backward is not None
        d_z = backward(gradient.float(), product()) if through is None else through(gradient)
    if needs_c:
        shape, dtype = like_c
        d_c = (d_z * keywords["beta"]).sum_to_size(shape).to(dtype)
    if needs_bias:
        others = -2 if keywords["bias_axis"] == "n" else -1
        modes = (others,) if d_z.dim() == 2 else (0, others)
        d_bias = summed_over(d_z, modes, like_bias[1])
    return EpilogueGradients(d_c, d_bias, d_residual, d_z)


def needed_of(ctx: Any, factors: int) -> tuple[bool, ...]:
    """The factors, c, bias and residual that need gradients: the dispatcher leaves out trailing
    arguments that have their default value."""
    count = factors + 3
    if ctx.call is not None:
        return (*(False for _ in ctx.call.recorded.indices), *ctx.needs_input_grad[1:])
    return (*ctx.needs_input_grad, *(False,) * count)[:count]


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    """Keeps what `backward` needs."""
    keep_for_backward(ctx, inputs, keyword_only_inputs, _FACTORS)


def _product(
    operators: Any, x: Any, y: Any, shape: torch.Size, keywords: dict[str, Any], **options: Any
) -> torch.Tensor:
    """alpha · x @ y, summed over the batch modes that `shape` does not have."""
    dtype = x.dtype
    reduced = len(shape) < max(x.dim(), y.dim()) or (
        len(shape) == 3 and shape[0] != max(x.shape[0], y.shape[0])
    )
    out_dtype = torch.float32 if reduced else dtype
    alpha, family = keywords["alpha"], keywords["family"]
    product: torch.Tensor = operators.gemm(x, y, alpha=alpha, out_dtype=out_dtype, family=family, **options)
    return product.sum_to_size(shape).to(dtype) if reduced else product


def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of (a, b, c, bias, residual), None for those that are not needed, as many as there were
    arguments."""
    a, b, c, bias, *kept = saved_of(ctx)
    keywords, needed = ctx.keywords, needed_of(ctx, _FACTORS)
    operators = operators_for(ctx, (gradient, a, b, c, bias))

    def product() -> torch.Tensor:
        again = {name: keywords[name] for name in _AGAIN}
        found: torch.Tensor = operators.gemm(a, b, c, bias, **again, out_dtype=torch.float32)
        return found

    of_kept = getattr(operators, "gate_gradient", None) if kept else None  # none of the dispatcher's
    if of_kept is not None:
        of_kept = partial(of_kept, z=kept[0], activation=keywords["activation"], dtype=a.dtype)
    through = epilogue_gradients(ctx, gradient, needed, product, of_kept)
    operand = through.d_z.to(a.dtype) if any(needed[:2]) else None
    d_a = d_b = None
    if needed[0]:
        fixed = keywords["batch_invariant"]  # the rows are a's; those of b are summed over a's
        d_a = _product(operators, operand, b.mT, a.shape, keywords, batch_invariant=fixed)
    if needed[1]:
        d_b = _product(operators, a.mT, operand, b.shape, keywords)
    return matched(ctx, (d_a, d_b, through.c, through.bias, through.residual))
