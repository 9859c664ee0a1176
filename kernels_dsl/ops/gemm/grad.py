"""Gradients of `gemm`, through the same kernels.

With z = alpha · A B + beta · C + bias, D = f(z) + R and G the gradient of D:

    dR = G,  dz = G · f'(z),  dA = alpha · dz Bᵀ,  dB = alpha · Aᵀ dz,  dC = beta · dz,  dbias = Σ dz

z is not kept from the forward pass, which would store it for inference-sized savings only: where f needs it,
the product is computed again, in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS

_INPUTS = 5  # a, b, c, bias, residual


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    """Keeps what `backward` needs. ValueError for a function without a derivative."""
    a, b, c, bias, residual, _epilogue_args = inputs
    refuse_functions(keyword_only_inputs["epilogue"], keyword_only_inputs["activation"])
    needs_product = keyword_only_inputs["activation"] is not None
    ctx.save_for_backward(a, b, c if needs_product else None, bias if needs_product else None)
    ctx.keywords = keyword_only_inputs
    ctx.shapes = {
        "a": a.shape,
        "b": b.shape,
        "c": None if c is None else c.shape,
        "bias": None if bias is None else bias.shape,
        "residual": None if residual is None else residual.shape,
    }
    ctx.dtypes = {
        "c": None if c is None else c.dtype,
        "bias": None if bias is None else bias.dtype,
        "residual": None if residual is None else residual.dtype,
    }


def refuse_functions(epilogue: Any, activation: str | None) -> None:
    """ValueError where gradients are asked for that do not exist: through a user's own epilogue, or an
    activation without a derivative."""
    if epilogue is not None:
        raise ValueError(
            "epilogue is given and an input requires grad, must not: PyTorch cannot differentiate a user's "
            "epilogue; use torch.no_grad(), or activation and the other arguments"
        )
    if activation is not None and ACTIVATIONS[activation].backward is None:
        raise ValueError(
            f"activation is {activation!r} and an input requires grad, must be one with a derivative: "
            f"{', '.join(sorted(name for name, row in ACTIVATIONS.items() if row.backward is not None))}"
        )


def through_activation(gradient: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """gradient · f'(z), float32."""
    backward = ACTIVATIONS[activation].backward
    assert backward is not None
    return backward(gradient.float(), z)


def _product(
    x: torch.Tensor, y: torch.Tensor, shape: torch.Size, alpha: float, family: str | None
) -> torch.Tensor:
    """alpha · x @ y, summed over the batch modes that `shape` does not have."""
    dtype = x.dtype
    reduced = len(shape) < max(x.dim(), y.dim()) or (
        len(shape) == 3 and shape[0] != max(x.shape[0], y.shape[0])
    )
    out_dtype = torch.float32 if reduced else dtype
    product = torch.ops.kernels_dsl.gemm(x, y, alpha=alpha, out_dtype=out_dtype, family=family)
    return product.sum_to_size(shape).to(dtype) if reduced else product


def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of (a, b, c, bias, residual), None for those that are not needed.

    As many as there were arguments: the dispatcher leaves out trailing ones that have their default value.
    """
    a, b, c, bias = ctx.saved_tensors
    keywords, shapes, dtypes = ctx.keywords, ctx.shapes, ctx.dtypes
    alpha, beta, family = keywords["alpha"], keywords["beta"], keywords["family"]
    count = len(ctx.needs_input_grad)
    needed = tuple(ctx.needs_input_grad) + (False,) * _INPUTS
    needs_a, needs_b, needs_c, needs_bias, needs_residual = needed[:_INPUTS]
    d_a = d_b = d_c = d_bias = d_residual = None
    if needs_residual:
        d_residual = gradient.sum_to_size(shapes["residual"]).to(dtypes["residual"])
    if not (needs_a or needs_b or needs_c or needs_bias):
        return (d_a, d_b, d_c, d_bias, d_residual, None)[:count]
    d_z = gradient
    if keywords["activation"] is not None:
        again = {name: keywords[name] for name in ("bias_axis", "alpha", "beta", "family")}
        z = torch.ops.kernels_dsl.gemm(a, b, c, bias, **again, out_dtype=torch.float32)
        d_z = through_activation(gradient, z, keywords["activation"])
    operand = d_z.to(a.dtype)
    if needs_a:
        d_a = _product(operand, b.mT, shapes["a"], alpha, family)
    if needs_b:
        d_b = _product(a.mT, operand, shapes["b"], alpha, family)
    if needs_c:
        d_c = (d_z * beta).sum_to_size(shapes["c"]).to(dtypes["c"])
    if needs_bias:
        along = -2 if keywords["bias_axis"] == "n" else -1
        rows = d_z.float().sum(along)
        d_bias = rows.reshape(-1, rows.shape[-1]).sum(0).to(dtypes["bias"])
    return (d_a, d_b, d_c, d_bias, d_residual, None)[:count]
