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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import fast

if TYPE_CHECKING:
    from .ptx import Instruction

Array = np.ndarray
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

    def agent(self, kind: AgentKind, name: str) -> int:
        """Number of a new agent."""
        if len(self.agents) >= self.capacity:
            raise RuntimeError(
                f"more than {self.capacity} agents in a cluster: too many mbarriers were initialised"
            )
        self.agents.append(Agent(kind, name))
        return len(self.agents) - 1

    def clock(self) -> Array:
        """A vector clock that has seen nothing."""
        vc = np.zeros(self.capacity + 1, np.int32)
        vc[-1] = FOREVER
        return vc


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


class Shadow:
    """Last write and last reads of each byte of a CTA's shared memory. Indices: byte offsets, or a slice."""

    def __init__(self, size: int, domain: Domain) -> None:
        self.size, self.domain = size, domain
        self.writer = np.full(size, -1, np.int16)
        self.written_at = np.zeros(size, np.int32)
        self.ordinary = np.zeros(size, bool)
        self.undefined = np.ones(size, bool)
        self.readers: dict[int, Array] = {}
        self.strong: Array | None = None  # bytes last written by a strong access, where there are any
        # For reports: instructions by (agent, its clock, whether they wrote), and by their line.
        self.touched: dict[tuple[int, int, bool], dict[int, Touch]] = {}

    def _note(self, index: Array | slice, agent: int, clock: int, wrote: bool, ins: Instruction) -> None:
        if isinstance(index, slice):
            low, high = index.start, index.stop
        else:
            compiled = fast.kernels()
            low, high = compiled.bounds(index) if compiled is not None else (index.min(), index.max())
            low, high = int(low), int(high) + 1
        mine = self.touched.setdefault((agent, clock, wrote), {})
        last = mine.get(ins.line)
        if last is not None:
            low, high = min(low, last.low), max(high, last.high)
        mine[ins.line] = Touch(ins, low, high)

    def _instruction(self, agent: int, clock: int, wrote: bool, offset: int) -> Instruction | None:
        """The last instruction that touched byte ``offset``."""
        found = self.touched.get((agent, clock, wrote), {})
        return next((t.ins for t in reversed(found.values()) if t.low <= offset < t.high), None)

    def unwritten(self, index: Array | slice) -> int | None:
        """Offset of the first byte of ``index`` that was never written, or with an undefined value."""
        missing = self.undefined[index]
        return self._offset(index, missing) if missing.any() else None

    def read(
        self, index: Array | slice, agent: int, clock: int, vc: Array, ins: Instruction, strong: bool = False
    ) -> Conflict | None:
        """Note a read by ``ins``; returns the write that it does not follow. Strong ones do not race."""
        compiled = self._compiled(index)
        conflict = self._early(index, vc, compiled, strong)
        if strong:
            return conflict
        self._note(index, agent, clock, False, ins)
        mark = self.readers.get(agent)
        if mark is None:
            mark = self.readers[agent] = np.zeros(self.size, np.int32)
        if compiled is not None:
            compiled.note_read(mark, index, clock)
        else:
            mark[index] = clock
        return conflict

    def _compiled(self, index: Array | slice) -> Any:
        """The compiled functions, which look at no bounds; None where they cannot be used."""
        compiled = fast.kernels()
        if compiled is None or isinstance(index, slice) or len(index) == 0:
            return None
        low, high = compiled.bounds(index)
        return compiled if low >= 0 and high < self.size else None

    def _early(self, index: Array | slice, vc: Array, compiled: Any, strong: bool) -> Conflict | None:
        """The write that an access with these clocks does not follow."""
        if compiled is not None and not compiled.early(self.writer, self.written_at, vc, index):
            return None
        writer = self.writer[index]
        early = self.written_at[index] > vc[writer]
        if strong and self.strong is not None:
            early &= ~self.strong[index]
        return self._conflict(index, early, writer) if early.any() else None

    @staticmethod
    def _late(mark: Array, clock: int, index: Array | slice, compiled: Any) -> Array | None:
        """Bytes of ``index`` that were read after ``clock``."""
        if compiled is not None and not compiled.late(mark, clock, index):
            return None
        late = mark[index] > clock
        return late if late.any() else None

    def unfenced(self, index: Array | slice, fc: Array) -> Conflict | None:
        """The ordinary write that the async proxy cannot be sure to see."""
        ordinary = self.ordinary[index]
        if not ordinary.any():
            return None
        writer = self.writer[index]
        bad = ordinary & (self.written_at[index] > fc[writer])
        return self._conflict(index, bad, writer) if bad.any() else None

    def write(
        self, index: Array | slice, agent: int, clock: int, vc: Array, ordinary: bool, ins: Instruction,
        strong: bool = False,
    ) -> Conflict | None:  # fmt: skip
        """Note a write by ``ins``; returns an access that it does not follow."""
        compiled = self._compiled(index)
        conflict = self._early(index, vc, compiled, strong)
        if strong and self.strong is None:
            self.strong = np.zeros(self.size, bool)
        if self.strong is not None:
            self.strong[index] = strong
        for reader, mark in self.readers.items():
            late = self._late(mark, vc[reader], index, compiled)
            if late is not None:
                offset = self._offset(index, late)
                other = self._instruction(reader, int(mark[offset]), False, offset)
                at = int(mark[offset])
                conflict = Conflict(self.domain.agents[reader], False, offset, other, at)
                break
        self._note(index, agent, clock, True, ins)
        if compiled is not None:
            arrays = (self.writer, self.written_at, self.ordinary, self.undefined)
            compiled.note_write(*arrays, index, agent, clock, ordinary)
            return conflict
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


def byte_index(offsets: Array, size: int) -> Array | slice:
    """Bytes [o, o + size) of each offset; a slice where they are one run."""
    compiled = fast.kernels()
    if compiled is not None:
        start = compiled.one_run(offsets, size)
        return compiled.spread(offsets, size) if start < 0 else slice(start, start + len(offsets) * size)
    low, high = int(offsets.min()), int(offsets.max()) + size
    if high - low == len(offsets) * size and (len(offsets) == 1 or len(np.unique(offsets)) == len(offsets)):
        return slice(low, high)
    return (offsets[:, None] + np.arange(size)).reshape(-1)
