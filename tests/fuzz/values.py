"""Contents of operands, and the products that the tolerance rule compares a kernel's with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reference import gemm, inputs

_FEW = 256
_ORDERS = 16


def filler(
    shape: Sequence[int], dtype: torch.dtype, seed: int, device: str, exact: bool
) -> Callable[[int], torch.Tensor]:
    """`fill` for `Arena.input`: small integers if `exact`, else N(0, 1); others in each generation."""
    make = inputs.integers if exact else inputs.normal
    return lambda generation: make(shape, dtype, seed=seed + generation, device=device)


def peer(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, **epilogue: Any) -> torch.Tensor:
    """PyTorch's product in the operands' dtype; where the result is wider, as tensor cores add."""
    if out_dtype != torch.float32 or a.dtype == torch.float32:
        return gemm.gemm_same_dtype(a, b, out_dtype=out_dtype, **epilogue)
    parts = {"c": None, "bias": None, "residual": None, "alpha": 1.0, "beta": 1.0, "activation": None}
    return gemm.finish(_sums(a, b), **{**parts, **epilogue})


def _sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`tensor_core_sums`; where few elements say little about the error that is to be expected, each is the
    worst of the sums in several orders."""
    sums = gemm.tensor_core_sums(a, b)
    if sums.numel() >= _FEW or a.shape[-1] < 2:
        return sums
    exact = a.double() @ b.double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(_ORDERS):
        order = torch.randperm(a.shape[-1], generator=generator).to(a.device)
        other = gemm.tensor_core_sums(a[..., order], b[..., order, :])
        sums = torch.where((other - exact).abs() > (sums - exact).abs(), other, sums)
    return sums
