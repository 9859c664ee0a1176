"""WGMMA state of four consecutive warps, in arrays that compiled code works on too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .fast import opcodes as o
from .shadow import AgentKind

if TYPE_CHECKING:
    from .state import Cta, Warp

Array = np.ndarray
FEWEST = 16
"""Rows to begin with; a power of two, as later ones."""


def address(array: Array) -> int:
    """The place of the first element; the array must be kept."""
    return array.__array_interface__["data"][0]


class Accumulators:
    """One warp's accumulators that a WGMMA computes, pending until group number ``group`` is waited for.

    ``values`` is uint32 (registers, 32), and ``rows`` are what the registers hold. A WGMMA that goes on from
    pending accumulators computes in place. ``slot``: its number among those of the warp.
    """

    __slots__ = ("address", "numbers", "rows", "slot", "values")

    def __init__(self, count: int, slot: int) -> None:
        self.values = np.zeros((count, 32), np.uint32)  # read too early, it is the same in every run
        self.rows = list(self.values)
        self.slot, self.address = slot, address(self.values)
        self.numbers = np.array([self.address, count, 0], np.int64)

    @property
    def group(self) -> int:
        """The last group that computes them."""
        return int(self.numbers[o.B_GROUP])

    @group.setter
    def group(self, number: int) -> None:
        self.numbers[o.B_GROUP] = number

    def places(self) -> range:
        """A number for each row: the slot, and which one it is."""
        first = (self.slot << o.BLOCK_BITS) + 1
        return range(first, first + len(self.rows))


class Warpgroup:
    """WGMMAs not yet run, as rows of ``rows``, and the groups that are done.

    A WGMMA is complete when all four warps have issued it; ``clocks`` are the least of their two clocks.
    """

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta, self.number = cta, number
        self.agent = cta.domain.agent(AgentKind.WGMMA, f"WGMMA of warpgroup {number} of CTA {cta.index}")
        self.warps: list[Warp] = []
        self.waiters: list[Warp] = []
        self.blocks: dict[int, Array] = {}  # values of accumulators by their address
        # Of a WGMMA and a warp: accumulators that it starts from, and operand A, where these are registers.
        self.held: dict[tuple[int, int], tuple[list[Array] | None, Array | None]] = {}
        self.numbers = np.zeros(o.GROUP_COLUMNS, np.int64)
        self.numbers[o.GROUP_AGENT] = self.agent
        self.rows = np.zeros((0, o.W_COLUMNS), np.int64)
        self.clocks = np.zeros((0, 2, cta.domain.capacity + 1), np.int32)

    @property
    def done(self) -> int:
        """The number of groups that have run."""
        return int(self.numbers[o.DONE_GROUPS])

    def commits(self, warp: Warp) -> int:
        """Groups that a warp has committed."""
        return int(self.numbers[o.COMMITS + warp.number % 4])

    def commit(self, warp: Warp) -> int | None:
        """A warp commits a group; returns its number if all four have done so."""
        number = self.commits(warp)
        self.numbers[o.COMMITS + warp.number % 4] = number + 1
        return number if self.numbers[o.COMMITS : o.COMMITS + 4].min() > number else None

    def grow(self) -> None:
        """More room for WGMMAs, in a ring by their numbers."""
        old = len(self.rows)
        room = max(2 * old, FEWEST)
        rows = np.zeros((room, o.W_COLUMNS), np.int64)
        clocks = np.zeros((room, *self.clocks.shape[1:]), np.int32)
        for number in range(self.numbers[o.OLDEST], self.numbers[o.NEXT]):
            rows[number % room] = self.rows[number % old]
            clocks[number % room] = self.clocks[number % old]
        self.rows, self.clocks = rows, clocks
        self.numbers[[o.ROOM, o.ROWS_AT, o.CLOCKS_AT]] = room, address(rows), address(clocks)

    def row(self, number: int) -> Array:
        """A WGMMA's row."""
        return self.rows[number % len(self.rows)]

    def join(self, number: int, warp: Warp, block: Accumulators) -> bool:
        """A warp issues a WGMMA that computes these accumulators; returns whether all four have done so."""
        part, row, clocks = warp.number % 4, self.row(number), self.clocks[number % len(self.rows)]
        for least, mine in zip(clocks, (warp.vc, warp.fc), strict=True):
            least[:] = np.minimum(least, mine) if row[o.W_PARTS] else mine
        row[o.W_PARTS] |= 1 << part
        row[o.W_BLOCKS + part] = block.address
        self.blocks[block.address] = block.values
        if row[o.W_PARTS] != o.ALL_PARTS:
            return False
        row[o.W_GROUP] = self.commits(warp)
        return True

    def begin(self, step: int, words: tuple[int | None, int, bool]) -> None:
        """The first warp of four issues the WGMMA of this step."""
        numbers = self.numbers
        if numbers[o.NEXT] - numbers[o.OLDEST] == len(self.rows):
            self.grow()
        row = self.row(int(numbers[o.NEXT]))
        row[o.W_STEP :] = 0
        row[: o.W_PARTS] = step, signed(words[0] or 0), signed(words[1]), words[2]
        row[o.W_GROUP] = -1
        numbers[o.NEXT] += 1

    def of_group(self, group: int) -> list[int]:
        """Numbers of the complete WGMMAs of a group, which are to run now."""
        numbers = self.numbers
        found = [n for n in range(numbers[o.OLDEST], numbers[o.NEXT]) if self.row(n)[o.W_GROUP] == group]
        for number in found:
            self.row(number)[o.W_GROUP] = o.W_DONE
        oldest, end = numbers[o.OLDEST].item(), numbers[o.NEXT].item()
        while oldest < end and self.row(oldest)[o.W_GROUP] == o.W_DONE:
            oldest += 1
        numbers[o.OLDEST] = oldest
        return found


def signed(word: int) -> int:
    """64 bits as int64 holds them."""
    return word - (1 << 64) if word >> 63 else word


def unsigned(number: Any) -> int:
    """The 64 bits of an int64."""
    return int(number) & ((1 << 64) - 1)
