"""Warps that can run, for compiled code: addresses of their rows, in the order in which they became ready."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from .fast import opcodes as o
from .warpgroup import address

if TYPE_CHECKING:
    from .state import Warp


class Ready:
    """Does what the scheduler asks of a list. ``numbers``: of the scheduler, where compiled code finds it."""

    def __init__(self, numbers: memoryview) -> None:
        self.numbers, self.places = numbers, np.zeros(64, np.int64)
        numbers[o.T_READY_AT] = address(self.places)

    def __len__(self) -> int:
        return int(self.numbers[o.T_READY])

    def append(self, warp: Warp) -> None:
        """A warp can run."""
        count = self.numbers[o.T_READY]
        if count == len(self.places):
            self.places = np.concatenate([self.places, np.zeros_like(self.places)])
            self.numbers[o.T_READY_AT] = address(self.places)
        self.places[count] = warp.row.address
        self.numbers[o.T_READY] = count + 1

    def extend(self, warps: Iterable[Warp]) -> None:
        """Several can run."""
        for warp in warps:
            self.append(warp)

    def remove(self, warp: Warp) -> None:
        """A warp waits, or has ended."""
        count = self.numbers[o.T_READY]
        places = self.places[:count]
        at = int((places == warp.row.address).argmax())
        places[at:-1] = places[at + 1 :].copy()
        self.numbers[o.T_READY] = count - 1
