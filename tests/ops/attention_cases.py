"""What the attention tests share: random calls, their reference, the tolerance."""

from __future__ import annotations

import torch

import kernels_dsl
from reference.attention import Masking, attention
from reference.inputs import normal
from reference.tolerance import check

LSE_TOLERANCE = 1e-3
"""Absolute, natural logarithms: scores are float32 sums, the exponentials the hardware's."""


def inputs(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dim_v: int,
    seed: int,
    dtype=torch.bfloat16,
    device="cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of `q_shape`, k of `k_shape`, v like k with another head dimension; (…, D)."""
    shapes = (q_shape, k_shape, (*k_shape[:-1], dim_v))
    q, k, v = (normal(shape, dtype, seed=seed + i, device=device) for i, shape in enumerate(shapes))
    return q, k, v


def check_close(
    found: tuple[torch.Tensor, torch.Tensor],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    masking: Masking,
    scale: float | None = None,
) -> None:
    """Output and log-sum-exp of `found` against float64; all (B, S, H, D)."""
    expected, lse = attention(*tensors, masking, scale=scale)
    peer, _ = attention(*tensors, masking, scale=scale, dtype=tensors[0].dtype)
    check(*(x.transpose(1, 2) for x in (found[0], expected, peer)), ulps=4.0)
    same = found[1].double() == lse  # -inf among them
    assert bool((same | ((found[1] - lse).abs() < LSE_TOLERANCE)).all())


def run(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], masking: Masking, **options) -> None:
    """Call `kernels_dsl.attention` with `options`, which must mean `masking`, and compare."""
    found = kernels_dsl.attention(*tensors, return_lse=True, **options)
    check_close(found, tensors, masking, options.get("scale"))
