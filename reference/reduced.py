"""Products with reductions beside them, as plainly as they can be said."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels_dsl.blocks.reduce.reductions import REDUCTIONS
from reference.gemm import gemm, gemm_same_dtype


class Reduced(NamedTuple):
    """The result (…, M, N), and a number for each of its rows (dim -1) or columns (dim -2)."""

    out: torch.Tensor
    reduced: torch.Tensor


def gemm_reduce(
    a: torch.Tensor, b: torch.Tensor, *, reduce: str = "sum", dim: int = -1, **options: Any
) -> Reduced:
    """In float64; options: those of `reference.gemm.gemm`."""
    d = gemm(a, b, **options)
    return Reduced(d, REDUCTIONS[reduce].exact(d, dim))


def gemm_reduce_same_dtype(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    reduce: str = "sum",
    dim: int = -1,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Reduced:
    """By PyTorch's operations in float32, D rounded after its reduction: a stricter yardstick than a
    reduction of the rounded D."""
    d = gemm_same_dtype(a, b, **options, out_dtype=torch.float32)
    return Reduced(d.to(a.dtype if out_dtype is None else out_dtype), REDUCTIONS[reduce].exact(d, dim))
