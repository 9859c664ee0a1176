"""Contents of operands: normal or integer, by a seed and a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from reference import inputs


def filler(
    shape: Sequence[int], dtype: torch.dtype, seed: int, device: str, exact: bool
) -> Callable[[int], torch.Tensor]:
    """`fill` for `Arena.input`: small integers if `exact`, else N(0, 1); others in each generation."""
    make = inputs.integers if exact else inputs.normal
    return lambda generation: make(shape, dtype, seed=seed + generation, device=device)
