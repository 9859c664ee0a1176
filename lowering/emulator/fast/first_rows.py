"""Registers of the warps of a launch before their first steps: constants, and what tells threads apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .registers import LANES

if TYPE_CHECKING:
    from ..state import Warp

Array = np.ndarray


class Own(NamedTuple):
    """A row at an offset, of so many bytes a lane, that differs by warp, or by CTA alone."""

    at: int
    size: int
    value: Callable[[Warp], Array]
    of_cta: bool

    def write(self, files: Array, warp: Warp) -> None:
        """Write it into the files of some warps."""
        files[..., self.at : self.at + LANES * self.size].view(f"u{self.size}")[:] = self.value(warp)


class FirstRows:
    """Files of the warps of each CTA. ``rows``: of one warp, with constants; ``own``: what differs."""

    def __init__(self, rows: Array, own: Sequence[Own]) -> None:
        self._rows = rows
        self._of_warps = [row for row in own if not row.of_cta]
        self._of_cta = [row for row in own if row.of_cta]
        self._files: Array | None = None  # of the first CTA

    def of_cta(self, count: int) -> Array:
        """Files of so many warps."""
        return np.tile(self._rows, (count, 1)) if self._files is None else self._files.copy()

    def fill(self, files: Array, warp: Warp) -> None:
        """Write what differs as a warp begins, in the order of the warps; ``files``: of its CTA."""
        if warp.number == 0:
            for row in self._of_cta:
                row.write(files, warp)
        if self._files is None:
            for row in self._of_warps:
                row.write(files[warp.number], warp)
            if warp.number == len(files) - 1:
                self._files = files.copy()
