"""Epilogue functions of a user, each beside the same in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def scaled(acc: Any, factor: Any) -> Any:
    """acc · factor."""
    return acc * factor


def clamped(acc: Any) -> Any:
    """Between -2 and 2, by selections."""
    import cutlass.cute as cute

    low = cute.where(acc < -2.0, cute.full_like(acc, -2.0), acc)
    return cute.where(low > 2.0, cute.full_like(low, 2.0), low)


def gated(acc: Any, gate: Any, shift: Any) -> Any:
    """acc · gate + shift."""
    return acc * gate + shift


def _clamped_in_torch(acc: torch.Tensor) -> torch.Tensor:
    return acc.clamp(-2.0, 2.0)


@dataclass(frozen=True)
class Function:
    """A traced function, what it does in PyTorch, and its arguments: "full", "row", "column" or "number"."""

    traced: Callable[..., Any]
    in_torch: Callable[..., Any]
    arguments: tuple[str, ...]


FUNCTIONS = {
    "scaled by a number": Function(scaled, scaled, ("number",)),
    "scaled by rows": Function(scaled, scaled, ("column",)),
    "clamped": Function(clamped, _clamped_in_torch, ()),
    "gated": Function(gated, gated, ("full", "row")),
}
