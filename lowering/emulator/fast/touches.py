"""Accesses to shared memory by a warp's lanes, noted in compiled code until Python code asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import lanes
from ..ptx import Vector
from . import opcodes as o

if TYPE_CHECKING:
    from ..program import Step
    from ..state import Warp

Array = np.ndarray
_EVERY = np.ones(32, bool)


def arrays_of(warps: int, words: int) -> tuple[Array, ...]:
    """The arrays of several warps, a row each."""
    touches = np.empty((warps, lanes.MOST if words else 0, o.TOUCH), np.int64)
    words_of = np.zeros((2, warps, words), np.int64)
    return np.ones((warps, 1), np.int64), words_of[0], words_of[1], touches


class Touches:
    """``arrays``: the number of this interval between convergences, for each word who read and who wrote it
    and in which interval, and the accesses of this interval.

    ``known``: the arrays tell of all accesses since the lanes came together.
    """

    __slots__ = ("arrays", "known", "steps", "used")

    def __init__(self, steps: list[Step], arrays: tuple[Array, ...]) -> None:
        self.steps, self.used, self.known = steps, 0, True
        self.arrays = arrays

    def clear(self) -> None:
        """The lanes came together."""
        self.arrays[0][0] += 1
        self.used, self.known = 0, True

    def hand_over(self, warp: Warp) -> None:
        """Let the warp's own log tell of all accesses, and of those to come until the lanes come together."""
        log = warp.lanes["shared"]
        for number, wrote, *addresses in self.arrays[3][: self.used].tolist():
            ins = self.steps[number].first
            data = ins.operands[1 if wrote else 0]
            size = 4 * (len(data.items) if isinstance(data, Vector) else 1)
            touch = lanes.Touch(np.array(addresses, np.int64), size, _EVERY, ins)
            (log.writes if wrote else log.reads).add(touch)
        self.used, self.known = 0, False
