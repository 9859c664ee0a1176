"""Products of rows in groups, each with a matrix of its own, as plainly as they can be said."""

from __future__ import annotations

from collections.abc import Callable

import torch


def rows_of_groups(offs: torch.Tensor) -> list[slice]:
    """The rows of each group: it ends before row offs[g] and starts where the one before ends."""
    ends = offs.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


def by_groups(offs: torch.Tensor, product: Callable[[int, slice], torch.Tensor]) -> torch.Tensor:
    """product(group, its rows), (rows, N), of all groups, one under the other: (offs[-1], N)."""
    return torch.cat([product(group, rows) for group, rows in enumerate(rows_of_groups(offs))])
