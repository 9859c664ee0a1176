"""One launch under several schedules: each starts from the same memory, and what they leave is compared."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .memory import GlobalMemory


class RegionCopy(NamedTuple):
    """The bytes of one region, and which of them were unwritten."""

    data: np.ndarray
    unwritten: np.ndarray | None


def copy(memory: GlobalMemory) -> list[RegionCopy]:
    """All of the launch's memory as it is now."""
    return [
        RegionCopy(r.data.copy(), None if r.unwritten is None else r.unwritten.copy()) for r in memory.regions
    ]


def restore(memory: GlobalMemory, copies: list[RegionCopy]) -> None:
    """Bring the memory back to a copy."""
    for region, kept in zip(memory.regions, copies, strict=True):
        region.data[:] = kept.data
        if region.unwritten is not None and kept.unwritten is not None:
            region.unwritten[:] = kept.unwritten


def difference(memory: GlobalMemory, copies: list[RegionCopy]) -> str | None:
    """The first byte in which the memory differs from a copy, in words; None where all are equal."""
    for region, kept in zip(memory.regions, copies, strict=True):
        different = region.data != kept.data
        if different.any():
            first, count = int(different.argmax()), int(different.sum())
            return f"{count} of {len(different)} bytes of {region.name}, the first at byte {first}"
    return None
