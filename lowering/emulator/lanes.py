"""Races between the lanes of one warp: what each lane touched since the lanes last came together.

Lanes need not run in step: nothing orders an access of one lane before that of another until a warp barrier,
a CTA barrier, a collective (a shuffle, a vote, ``ldmatrix``), or the wait for an mbarrier. PTX promises order
in memory for the barriers alone; collectives count here too, and order all lanes whatever lanes they name.
Strong accesses and atomics do not race.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .reports import Kind

if TYPE_CHECKING:
    from .machine import Machine
    from .ptx import Instruction
    from .state import Warp

Array = np.ndarray
MOST = 128
"""Accesses of each kind that are remembered, the latest ones."""
MOST_WORDS = 1 << 16
SEVERAL = -1


class Touch(NamedTuple):
    """``size`` bytes at the address of each lane of ``mask``."""

    addresses: Array
    size: int
    mask: Array
    ins: Instruction

    @property
    def lanes(self) -> Array:
        """The lane of each address."""
        return np.flatnonzero(self.mask)

    def overlaps(self, other: Touch) -> Array:
        """Pairs of these pieces (rows) and pieces of ``other`` that share bytes."""
        mine = self.addresses[:, None]
        return (mine < other.addresses + other.size) & (other.addresses < mine + self.size)

    def words(self, bits: int) -> list[tuple[int, int]]:
        """Numbers of the words of 2 ** ``bits`` bytes that it touches, each with its lane."""
        words, lanes = self.addresses >> bits, self.lanes
        count = self.size >> bits
        if count > 1:
            words, lanes = (words[:, None] + np.arange(count)).reshape(-1), np.repeat(lanes, count)
        return list(zip(words.tolist(), lanes.tolist(), strict=True))


class Clash(NamedTuple):
    """Two lanes, one access each; ``other`` came first."""

    lane: int
    other_lane: int
    other: Touch
    address: int


class Accesses:
    """Reads, or writes, since the lanes last came together: the latest ones, and the lane of each word.

    Words are so small that lanes seldom share one; where no other lane touched a word there is no race.
    """

    __slots__ = ("bits", "lane_of", "pending", "touches")

    def __init__(self) -> None:
        self.touches: list[Touch] = []
        self.pending: list[Touch] = []  # not in ``lane_of`` yet
        self.lane_of: dict[int, int] = {}
        self.bits = 2

    def __bool__(self) -> bool:
        return bool(self.touches)

    def clear(self) -> None:
        """Forget all."""
        self.touches, self.pending, self.lane_of, self.bits = [], [], {}, 2

    def add(self, touch: Touch) -> None:
        """Note an access."""
        self.touches.append(touch)
        self.pending.append(touch)
        if len(self.pending) > MOST:
            del self.pending[: MOST // 2]
        if len(self.touches) > MOST:
            del self.touches[: MOST // 2]

    def clash(self, touch: Touch, unordered: Callable[[Touch, Touch], Array]) -> Clash | None:
        """The latest access that ``unordered`` says races with ``touch``."""
        if not self.touches or not self._shares(touch):
            return None
        for other in reversed(self.touches):
            bad = unordered(touch, other)
            if bad.any():
                mine, theirs = np.unravel_index(int(np.argmax(bad)), bad.shape)
                address = max(int(touch.addresses[mine]), int(other.addresses[theirs]))
                return Clash(int(touch.lanes[mine]), int(other.lanes[theirs]), other, address)
        return None

    def _shares(self, touch: Touch) -> bool:
        """True if another lane touched a word that this access touches."""
        smallest = min([touch.size, *(other.size for other in self.pending)])
        if smallest >> self.bits == 0:
            self.bits = smallest.bit_length() - 1
            self.lane_of, self.pending = {}, list(self.touches)
        if len(self.lane_of) > MOST_WORDS:
            self.clear()
        table = self.lane_of
        for other in self.pending:
            for word, lane in other.words(self.bits):
                if table.setdefault(word, lane) != lane:
                    table[word] = SEVERAL
        self.pending = []
        return any(table.get(word, lane) != lane for word, lane in touch.words(self.bits))


class LaneLog:
    """The accesses of a warp's lanes to one memory since they last came together."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads, self.writes = Accesses(), Accesses()

    def clear(self) -> None:
        """The lanes came together."""
        self.reads.clear()
        self.writes.clear()

    def read(self, touch: Touch) -> Clash | None:
        """Note a read; returns the write by another lane that it does not follow."""
        found = self.writes.clash(touch, _unordered_read)
        self.reads.add(touch)
        return found

    def write(self, touch: Touch, differs: Callable[[], Array]) -> Clash | None:
        """Note a write; returns an access by another lane that it does not follow.

        ``differs`` tells for each lane whether it changes the memory: a value written twice does no harm.
        """
        found = self.reads.clash(touch, _unordered_write)
        if found is None:
            found = self.writes.clash(touch, lambda a, b: _unordered_write(a, b) & differs()[:, None])
        self.writes.add(touch)
        return found


def _unordered_read(touch: Touch, write: Touch) -> Array:
    """Pieces that another lane wrote; not those that the reading lane wrote at the same time."""
    met = touch.overlaps(write)
    same = touch.lanes[:, None] == write.lanes
    return met & ~same & ~(met & same).any(axis=1)[:, None]


def _unordered_write(touch: Touch, other: Touch) -> Array:
    return touch.overlaps(other) & (touch.lanes[:, None] != other.lanes)


def _log(w: Warp, space: str) -> LaneLog:
    """The log of a warp, with what compiled code noted."""
    if space == "shared" and w.lane_touches is not None:
        w.lane_touches.hand_over(w)
    return w.lanes[space]


def note_read(
    m: Machine, w: Warp, ins: Instruction, space: str, addresses: Array, size: int, mask: Array
) -> None:
    """An ordinary read of ``space`` by the lanes of ``mask``."""
    log = _log(w, space)
    clash = log.read(Touch(addresses, size, mask, ins))
    if clash is not None:
        _report(m, w, ins, space, clash, "read")


def note_write(
    m: Machine, w: Warp, ins: Instruction, space: str, addresses: Array, data: Array, mask: Array,
    differs: Callable[[], Array],
) -> None:  # fmt: skip
    """An ordinary write of uint8 (n, size) ``data`` to ``space`` by the lanes of ``mask``."""
    touch = Touch(addresses, data.shape[1], mask, ins)
    clash = _log(w, space).write(touch, differs)
    if clash is not None:
        _report(m, w, ins, space, clash, "write")
    elif len(set(addresses.tolist())) < len(addresses):
        _check_one_store(m, w, touch, space, data)


def note_copied(w: Warp, touches: list[Touch]) -> None:
    """Lanes waited for copies of their own: the others do not know that these have arrived."""
    log = _log(w, "shared")
    for touch in touches:
        log.writes.add(touch)


def _check_one_store(m: Machine, w: Warp, touch: Touch, space: str, data: Array) -> None:
    _, first, which = np.unique(touch.addresses, return_index=True, return_inverse=True)
    different = (data != data[first[which]]).any(axis=1)
    if different.any():
        at = int(np.argmax(different))
        one, two = int(touch.lanes[first[which[at]]]), int(touch.lanes[at])
        m.report(
            Kind.RACE,
            f"lanes {one} and {two} write different values to the same address: any of them may stay",
            w,
            touch.ins,
            address=int(touch.addresses[at]),
            space=space,
            lanes=touch.mask,
        )


def _report(m: Machine, w: Warp, ins: Instruction, space: str, clash: Clash, verb: str) -> None:
    before = clash.other.ins
    kind = "read" if before.root == "ld" else "write"
    where = m.source(before) or f"PTX line {before.line}"
    other = f"the {kind} by lane {clash.other_lane} of the same warp at {where}"
    m.report(
        Kind.RACE,
        f"{verb} by lane {clash.lane} does not wait for {other}: lanes are ordered by bar.warp.sync",
        w,
        ins,
        address=clash.address,
        space=space,
        other=m.place(f"{kind} by lane {clash.other_lane} of {w.name}", before),
    )
