"""Contents of operands, and the products that the tolerance rule compares a kernel's with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from reference import gemm, inputs

FEW = 256
"""Numbers below which their own errors say little about the error that is to be expected."""
_ORDERS = 16
_DRAWS = 16


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
    if sums.numel() >= FEW or a.shape[-1] < 2:
        return sums
    exact = a.double() @ b.double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(_ORDERS):
        order = torch.randperm(a.shape[-1], generator=generator).to(a.device)
        other = gemm.tensor_core_sums(a[..., order], b[..., order, :])
        sums = torch.where((other - exact).abs() > (sums - exact).abs(), other, sums)
    return sums


def scaled_draws(*groups: dict[str, Any]) -> Iterator[tuple[dict[str, Any], ...]]:
    """The same groups of arguments again, each float tensor times a number near 1 of its own.

    They are rounded otherwise, with errors of the same size. Elements that were equal stay so.
    """
    generator = torch.Generator().manual_seed(0)

    def scaled(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return x * (0.9 + 0.2 * torch.rand((), generator=generator).item())

    for _ in range(_DRAWS):
        yield tuple({name: scaled(x) for name, x in group.items()} for group in groups)


def at_worst(exact: torch.Tensor, peer: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """`peer`, or what is `error` away from the exact numbers where that is more."""
    return torch.where(error > (peer.double() - exact).abs(), exact + error, peer.double())
