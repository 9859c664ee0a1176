"""Gated products as plainly as they can be said: f(gate, up) of the alternating columns of a product z."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels_dsl.blocks.epilogue.gates import GATES
from reference.gemm import gemm, gemm_same_dtype


class Gated(NamedTuple):
    """The result (…, N / 2), and z (…, N)."""

    out: torch.Tensor
    preact: torch.Tensor


def gemm_gated(a: torch.Tensor, b: torch.Tensor, *, activation: str = "swiglu", **options: Any) -> Gated:
    """In float64; options: those of `reference.gemm.gemm`."""
    z = gemm(a, b, **options)
    return Gated(GATES[activation].of_pairs(z), z)


def gemm_gated_same_dtype(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    activation: str = "swiglu",
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Gated:
    """By PyTorch's operations on a product in float32, rounded at the end: a stricter yardstick than a
    product that is rounded before its gate."""
    z = gemm_same_dtype(a, b, **options, out_dtype=torch.float32)
    dtype = a.dtype if out_dtype is None else out_dtype
    return Gated(GATES[activation].of_pairs(z).to(dtype), z.to(dtype))
