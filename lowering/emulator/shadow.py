"""Race detection: vector clocks of warps and asynchronous units, and a shadow of shared memory.

Every agent (a warp, the bulk copies that complete on one mbarrier, the ``cp.async`` groups of a warp, the
WGMMA groups of a warpgroup, the bulk stores of a warp) has a number and a clock. A warp's vector clock says
up to which clock of each agent it has synchronised. The shadow of shared memory keeps, for each byte, who
wrote it last and at which clock, and for each agent that reads, the clock of its last read of the byte. An
access that does not follow the last write (or, for a write, every last read) in these clocks is a race,
whatever order the emulated schedule happened to take. (The method of FastTrack, with clocks for the
asynchronous units of the GPU.)

Two vector clocks are kept: ``vc`` orders accesses; ``fc`` orders ordinary writes that their own thread has
made visible to the async proxy with ``fence.proxy.async``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import fast

if TYPE_CHECKING:
    from .program import Step
    from .ptx import Instruction

Array = np.ndarray
MOST_NOTES = 1 << 16
FOREVER = np.iinfo(np.int32).max


class AgentKind(enum.Enum):
    """Description of an agent."""

    WARP = "warp"
    BULK_LOAD = "bulk copy into shared memory"
    CP_ASYNC = "cp.async"
    WGMMA = "WGMMA"
    BULK_STORE = "bulk copy out of shared memory"


@dataclass(frozen=True)
class Agent:
    """An agent and its name for reports."""

    kind: AgentKind
    name: str


class Domain:
    """The agents of cluster ``number``. Clock arrays have a last entry more, for bytes nobody wrote."""

    def __init__(self, capacity: int, number: int = 0) -> None:
        self.capacity, self.number = capacity, number
        self.agents: list[Agent] = []
        self.numbers = np.array([0, capacity], np.int64)  # compiled code makes agents, named here later

    def agent(self, kind: AgentKind, name: str) -> int:
        """Number of a new agent."""
        if len(self.agents) >= self.capacity:
            raise RuntimeError(
                f"more than {self.capacity} agents in a cluster: too many mbarriers were initialised"
            )
        self.agents.append(Agent(kind, name))
        self.numbers[0] = max(self.numbers[0], len(self.agents))
        return len(self.agents) - 1

    def clock(self) -> Array:
        """A vector clock that has seen nothing."""
        return self.clocks(1)[0]

    def clocks(self, count: int) -> Array:
        """Several of them, as rows."""
        clocks = np.zeros((count, self.capacity + 1), np.int32)
        clocks[:, -1] = FOREVER
        return clocks


class Conflict(NamedTuple):
    """The other side of a race: its agent, whether it wrote, the first byte, the instruction, the clock."""

    agent: Agent
    wrote: bool
    offset: int
    ins: Instruction | None = None
    clock: int = 0


class Touch(NamedTuple):
    """Bytes [low, high) that an instruction read or wrote at one clock of its agent."""

    ins: Instruction
    low: int
    high: int


class Pieces(NamedTuple):
    """``size`` bytes at each of int64 ``offsets``."""

    offsets: Array
    size: int

    def bytes(self) -> Array:
        """The offset of every byte."""
        return (self.offsets[:, None] + np.arange(self.size)).reshape(-1)


Index = Array | slice | Pieces
"""Bytes of shared memory: their offsets, or a run, or pieces."""


class Readers:
    """The clock of the last read of each byte, of each agent that has read any: rows of one array."""

    def __init__(self, size: int, numbers: Array) -> None:
        self.numbers = numbers
        self.marks = np.zeros((2, size), np.int32)
        self.agents = np.zeros(2, np.int64)  # of the rows
        self.rows: dict[int, int] = {}

    @property
    def count(self) -> int:
        """Agents that have read."""
        return len(self.rows)

    def row(self, agent: int) -> int:
        """The number of an agent's row."""
        found = self.rows.get(agent)
        if found is None:
            found = self.rows[agent] = len(self.rows)
            self.numbers[0] = len(self.rows)
            if found == len(self.agents):
                self.marks = np.concatenate([self.marks, np.zeros_like(self.marks)])
                self.agents = np.concatenate([self.agents, self.agents])
            self.agents[found] = agent
        return found


class Shadow:
    """Last write and last reads of each byte of a CTA's shared memory.

    The compiled functions check and note in one pass where nothing is wrong. Where something is, they note
    nothing, and the NumPy code finds out what.
    """

    def __init__(self, size: int, domain: Domain) -> None:
        self.size, self.domain = size, domain
        self.writer = np.full(size, -1, np.int16)
        self.written_at = np.zeros(size, np.int32)
        self.ordinary = np.zeros(size, bool)
        self.undefined = np.ones(size, bool)
        # Agents that read, notes in use, whether there are strong accesses: for compiled code too.
        self.numbers = np.zeros(3, np.int64)
        self.on_growth: Callable[[Shadow], None] | None = None  # told when arrays have moved
        self.readers = Readers(size, self.numbers)
        self.strong: Array | None = None  # bytes last written by a strong access, where there are any
        # For reports: instructions by (agent, its clock, whether they wrote), and by their line. What comes
        # is noted as numbers first, by compiled code too: the steps of `program`, or -1 - n for told[n].
        self.touched: dict[tuple[int, int, bool], dict[int, Touch]] = {}
        self.notes = np.empty((256, 6), np.int64)
        self.program: list[Step] = []
        self.told: list[Instruction] = []

    @property
    def used(self) -> int:
        """Notes that are in use."""
        return int(self.numbers[1])

    @used.setter
    def used(self, count: int) -> None:
        self.numbers[1] = count

    def keep_numbers(self, numbers: Array) -> None:
        """Keep the numbers there from now on."""
        numbers[:] = self.numbers
        self.numbers = self.readers.numbers = numbers

    def _grown(self) -> None:
        if self.on_growth is not None:
            self.on_growth(self)

    def row(self, agent: int) -> int:
        """The number of the row of an agent's reads."""
        room = len(self.readers.agents)
        found = self.readers.row(agent)
        if len(self.readers.agents) != room:
            self._grown()
        return found

    def _note(self, low: int, high: int, agent: int, clock: int, wrote: bool, ins: Instruction) -> None:
        if self.used == len(self.notes):
            self.make_room()
        if not self.told or self.told[-1] is not ins:
            self.told.append(ins)
        self.notes[self.used] = agent, clock, wrote, -len(self.told), low, high
        self.used += 1

    def make_room(self) -> None:
        """More room for notes, but for very many."""
        if self.used < MOST_NOTES:
            self.notes = np.concatenate([self.notes, np.empty_like(self.notes)])
            self._grown()
        else:
            self._sort_notes()

    def _sort_notes(self) -> None:
        for agent, clock, wrote, number, low, high in self.notes[: self.used].tolist():
            ins = self.program[number].first if number >= 0 else self.told[-1 - number]
            self._touched_by(low, high, agent, clock, bool(wrote), ins)
        self.used = 0
        self.told.clear()

    def _touched_by(self, low: int, high: int, agent: int, clock: int, wrote: bool, ins: Instruction) -> None:
        mine = self.touched.setdefault((agent, clock, wrote), {})
        last = mine.get(ins.line)
        if last is not None:
            if last.low <= low and high <= last.high:
                return
            low, high = min(low, last.low), max(high, last.high)
        mine[ins.line] = Touch(ins, low, high)

    def _instruction(self, agent: int, clock: int, wrote: bool, offset: int) -> Instruction | None:
        """The last instruction that touched byte ``offset``."""
        self._sort_notes()
        found = self.touched.get((agent, clock, wrote), {})
        return next((t.ins for t in reversed(found.values()) if t.low <= offset < t.high), None)

    def unwritten(self, index: Index) -> int | None:
        """Offset of the first byte of ``index`` that was never written, or with an undefined value."""
        compiled = fast.kernels()
        if compiled is not None:
            offsets, size = pieces_of(index)
            within = compiled.inside(offsets, size, self.size)
            if within and not compiled.any_of(self.undefined, offsets, size):
                return None
        index = _expanded(index)
        missing = self.undefined[index]
        return self._offset(index, missing) if missing.any() else None

    def read(
        self, index: Index, agent: int, clock: int, vc: Array, ins: Instruction, strong: bool = False
    ) -> Conflict | None:
        """Note a read by ``ins``; returns the write that it does not follow. Strong ones do not race."""
        compiled = None if strong else fast.kernels()
        if compiled is not None:
            offsets, size = pieces_of(index)
            row = self.row(agent)
            low, high = compiled.read(
                self.writer, self.written_at, vc, self.readers.marks, row, clock, offsets, size
            )
            if low >= 0:
                self._note(low, high, agent, clock, False, ins)
                return None
        index = _expanded(index)
        conflict = self._early(index, vc, strong)
        if strong:
            return conflict
        self._note(*_bounds(index), agent, clock, False, ins)
        row = self.row(agent)  # which may make room for more
        self.readers.marks[row, index] = clock
        return conflict

    def consume(
        self, compiled: Any, pieces: list[Array], clocks: tuple, agent: int, clock: int, ins: Instruction
    ) -> bool:
        """Note the async proxy's reads of 16-byte pieces, if all have been written, and follow the writes.

        ``clocks``: the vector clock, and that of proxy fences, of who asks for the read.
        """
        row = self.row(agent)
        held = (self.writer, self.written_at, self.ordinary, self.undefined)
        for offsets in pieces:
            if not compiled.may_consume(held, clocks, offsets):
                return False
        for offsets in pieces:
            compiled.mark(self.readers.marks, row, clock, offsets, 16)
            self._note(int(offsets[0]), int(offsets[-1]) + 16, agent, clock, False, ins)
        return True

    def _early(self, index: Array | slice, vc: Array, strong: bool) -> Conflict | None:
        """The write that an access with these clocks does not follow."""
        writer = self.writer[index]
        early = self.written_at[index] > vc[writer]
        if strong and self.strong is not None:
            early &= ~self.strong[index]
        return self._conflict(index, early, writer) if early.any() else None

    def unfenced(self, index: Index, fc: Array) -> Conflict | None:
        """The ordinary write that the async proxy cannot be sure to see."""
        compiled = fast.kernels()
        if compiled is not None:
            offsets, size = pieces_of(index)
            if compiled.fenced(self.ordinary, self.writer, self.written_at, fc, offsets, size):
                return None
        index = _expanded(index)
        ordinary = self.ordinary[index]
        if not ordinary.any():
            return None
        writer = self.writer[index]
        bad = ordinary & (self.written_at[index] > fc[writer])
        return self._conflict(index, bad, writer) if bad.any() else None

    def write(
        self, index: Index, agent: int, clock: int, vc: Array, ordinary: bool, ins: Instruction,
        strong: bool = False,
    ) -> Conflict | None:  # fmt: skip
        """Note a write by ``ins``; returns an access that it does not follow."""
        compiled = None if strong or self.strong is not None else fast.kernels()
        if compiled is not None:
            offsets, size = pieces_of(index)
            held = (self.writer, self.written_at, self.ordinary, self.undefined)
            read = (self.readers.marks, self.readers.agents, self.readers.count)
            low, high = compiled.write(held, read, vc, (agent, clock), offsets, size, ordinary)
            if low >= 0:
                self._note(low, high, agent, clock, True, ins)
                return None
        index = _expanded(index)
        conflict = self._early(index, vc, strong)
        if strong and self.strong is None:
            self.strong = np.zeros(self.size, bool)
            self.numbers[2] = 1
        if self.strong is not None:
            self.strong[index] = strong
        for reader, row in self.readers.rows.items():
            mark = self.readers.marks[row]
            late = mark[index] > vc[reader]
            if late.any():
                offset = self._offset(index, late)
                at = int(mark[offset])
                other = self._instruction(reader, at, False, offset)
                conflict = Conflict(self.domain.agents[reader], False, offset, other, at)
                break
        self._note(*_bounds(index), agent, clock, True, ins)
        self.writer[index] = agent
        self.written_at[index] = clock
        self.ordinary[index] = ordinary
        self.undefined[index] = False
        return conflict

    def _conflict(self, index: Array | slice, bad: Array, writer: Array) -> Conflict:
        agent, offset = int(writer.reshape(-1)[int(np.argmax(bad))]), self._offset(index, bad)
        clock = int(self.written_at[offset])
        other = self._instruction(agent, clock, True, offset)
        return Conflict(self.domain.agents[agent], True, offset, other, clock)

    @staticmethod
    def _offset(index: Array | slice, bad: Array) -> int:
        first = int(np.argmax(bad))
        return index.start + first if isinstance(index, slice) else int(np.asarray(index).reshape(-1)[first])


def byte_index(offsets: Array, size: int) -> Index:
    """Bytes [o, o + size) of each offset."""
    if fast.kernels() is not None:
        return Pieces(offsets, size)
    low, high = int(offsets.min()), int(offsets.max()) + size
    if high - low == len(offsets) * size and (len(offsets) == 1 or len(np.unique(offsets)) == len(offsets)):
        return slice(low, high)
    return Pieces(offsets, size).bytes()


def first_byte(index: Index) -> int:
    """The offset of the first of these bytes, in their order."""
    if isinstance(index, slice):
        return int(index.start)
    return int(index.offsets[0] if isinstance(index, Pieces) else index[0])


def pieces_of(index: Index) -> tuple[Array, int]:
    """The same bytes as pieces."""
    if isinstance(index, Pieces):
        return index
    if isinstance(index, slice):
        return np.array([index.start], np.int64), index.stop - index.start
    return index, 1


def _expanded(index: Index) -> Array | slice:
    """The same bytes one by one, or as a run."""
    return index.bytes() if isinstance(index, Pieces) else index


def _bounds(index: Array | slice) -> tuple[int, int]:
    """The first byte, and the one after the last."""
    if isinstance(index, slice):
        return index.start, index.stop
    return int(index.min()), int(index.max()) + 1
