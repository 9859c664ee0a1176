"""Gradients of `bsr_gemm`, through the same kernels and those of the sampled product.

With z = alpha · A B + beta · C + bias, D = f(z) + R and G the gradient of D, dz = G · f'(z): the dense factor
gets alpha · Aᵀ dz, the values the blocks of alpha · dz Bᵀ that A keeps, and so on for the other orientations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels_dsl.ops.gemm.grad import epilogue_gradients, matched, needed_of, operators_for, saved_of

FACTORS = 4  # crow, col, values, dense


def summed(found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient in like's shape and dtype: summed over batches that `like` does not have."""
    if found.dim() > like.dim():
        found = found.sum(0)
    return found.to(like.dtype)


def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of the positional arguments, None for those that are not needed."""
    crow, col, values, dense, c, bias = saved = saved_of(ctx)
    keywords, needed = ctx.keywords, needed_of(ctx, FACTORS)
    operators = operators_for(ctx, (gradient, *saved))

    def product() -> torch.Tensor:
        names = ("shape", "transposed", "dense_left", "bias_axis", "alpha", "beta", "family")
        again = {name: keywords[name] for name in names}
        found: torch.Tensor = operators.bsr_gemm(
            crow, col, values, dense, c, bias, **again, out_dtype=torch.float32
        )
        return found

    through = epilogue_gradients(ctx, gradient, needed, product)
    d_values = d_dense = None
    if needed[2] or needed[3]:
        d_z = through.d_z.to(values.dtype)
    if needed[2]:
        d_values = _values_gradient(operators, saved, d_z, keywords)
    if needed[3]:
        batched = d_z.dim() > dense.dim()
        found = operators.bsr_gemm(
            crow, col, values, d_z, shape=keywords["shape"], transposed=not keywords["transposed"],
            dense_left=keywords["dense_left"], alpha=keywords["alpha"], family=keywords["family"],
            out_dtype=torch.float32 if batched else dense.dtype,
        )  # fmt: skip
        d_dense = summed(found, dense)
    return matched(ctx, (None, None, d_values, d_dense, through.c, through.bias, through.residual))


def _values_gradient(
    operators: Any, saved: Sequence[Any], d_z: torch.Tensor, keywords: dict[str, Any]
) -> torch.Tensor:
    """The stored blocks of alpha · dz Bᵀ, or of its transpose, by orientation."""
    crow, col, values, dense = saved[:4]
    x, y = sampled_factors(dense, d_z, keywords["dense_left"], keywords["transposed"])
    batched = d_z.dim() == 3 and values.dim() == 3
    found = operators.bsr_sddmm(
        crow, col, x, y, shape=keywords["shape"], block=list(values.shape[-2:]), alpha=keywords["alpha"],
        out_dtype=torch.float32 if batched else values.dtype,
    )  # fmt: skip
    return summed(found, values)


def sampled_factors(
    dense: torch.Tensor, d_z: torch.Tensor, left: bool, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the stored blocks' gradient. `left`: the dense factor was the left one."""
    if transposed:
        return (d_z.mT, dense) if left else (dense, d_z.mT)
    return (dense.mT, d_z) if left else (d_z, dense.mT)
