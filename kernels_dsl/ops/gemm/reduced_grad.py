"""Gradients of `gemm_reduce`, through those of `gemm`.

With D the result, r its reduction, and G and g their gradients, the gradient of D's values is G + g for sums
and G + 2 g D for sums of squares, with D as it was rounded.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.blocks.reduce.reductions import REDUCTIONS
from kernels_dsl.ops.gemm import grad

_FACTORS = 2  # a, b


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[torch.Tensor, ...]
) -> None:
    """Keeps what `backward` needs."""
    result, name = output[0], keyword_only_inputs["reduce"]
    kept = result if name == "sum_squares" else None
    grad.keep_for_backward(ctx, inputs, keyword_only_inputs, _FACTORS, own=(kept,))
    ctx.set_materialize_grads(False)
    ctx.result_shape = result.shape


def backward(ctx: Any, gradient: torch.Tensor | None, of_reduced: torch.Tensor | None) -> tuple[Any, ...]:
    """Gradients of (a, b, c, bias, residual), None for those that are not needed, as many as there were
    arguments."""
    if of_reduced is not None:
        keywords, result = ctx.keywords, ctx.saved_tensors[-1]
        derivative = REDUCTIONS[keywords["reduce"]].backward
        assert derivative is not None
        lines = derivative(of_reduced.unsqueeze(keywords["dim"]), None if result is None else result.float())
        gradient = lines.expand(ctx.result_shape) if gradient is None else gradient + lines
    if gradient is None:
        return (None,) * len(ctx.needs_input_grad)
    return grad.backward(ctx, gradient)
