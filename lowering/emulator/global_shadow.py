"""Race detection in global memory: who wrote each byte last, and who has read it.

The method is that of `shadow`, across the clusters of a launch. An access is an agent of a cluster at a clock
of that agent; a warp has synchronised with it where the warp's clocks, or what it knows of the other cluster,
have come that far. The last write of each unit (16 bytes, or as few as anyone has written at a time) is the
number of an access in one table. Reads go to a log, which is only looked at when someone writes to that
tensor: tensors that a kernel does not write cost next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .clocks import PREVIOUS, proxied
from .memory import GlobalMemory, Region
from .shadow import Agent, AgentKind, Domain
from .spans import Spans

if TYPE_CHECKING:
    from .ptx import Instruction
    from .state import Warp

Array = np.ndarray
MOST_READS = 1 << 16
MOST_STARTS = 1 << 22


class Access(NamedTuple):
    """An agent's access at its clock. ``strong``: an atomic, or relaxed or stronger in the memory model."""

    domain: Domain
    agent: int
    clock: int
    strong: bool
    ins: Instruction

    @property
    def who(self) -> Agent:
        """The agent."""
        return self.domain.agents[self.agent]

    @property
    def asynchronous(self) -> bool:
        """True if it goes through the async proxy."""
        return self.who.kind in (AgentKind.BULK_LOAD, AgentKind.BULK_STORE)

    def fenced(self, w: Warp) -> bool:
        """True if a ``fence.proxy.async`` lies between this access and what the warp does now."""
        clock = w.known.get(proxied(self.domain.number))
        return clock is not None and bool(clock[self.agent] >= self.clock)

    def before(self, w: Warp) -> bool:
        """True if the warp has synchronised with this access."""
        return _reached(self, w.cta.domain, w.vc, w.known)

    def seen(self, w: Warp) -> bool:
        """True if the warp has seen, by relaxed accesses too, something that its agent wrote afterwards."""
        return self.before(w) or _reached(self, w.cta.domain, w.vc, w.seen)


def _reached(access: Access, own: Domain, vc: Array, known: dict[int, Array]) -> bool:
    if access.domain is own and vc[access.agent] >= access.clock:
        return True
    clock = known.get(access.domain.number)
    return clock is not None and bool(clock[access.agent] >= access.clock)


class Clash(NamedTuple):
    """The other side of a race: its access (None: by the launch before), whether it wrote, the first address.

    ``proxy``: it is ordered, but the async proxy cannot be sure to see it.
    """

    other: Access | None
    wrote: bool
    address: int
    region: Region
    proxy: bool = False


class ReadLog:
    """Reads of one tensor, the latest ones where there are very many."""

    def __init__(self) -> None:
        self.entries: list[tuple[Spans, Access]] = []
        self.starts = 0
        self.bounds = np.empty((2, 64), np.int64)

    def add(self, spans: Spans, access: Access) -> None:
        """Note a read."""
        n = len(self.entries)
        if n == self.bounds.shape[1]:
            if n >= MOST_READS or self.starts > MOST_STARTS:
                n = self._forget(n // 2)
            else:
                self.bounds = np.concatenate([self.bounds, np.empty_like(self.bounds)], axis=1)
        self.bounds[0, n], self.bounds[1, n] = spans.low, spans.high
        self.entries.append((spans, access))
        self.starts += len(spans.starts)

    def _forget(self, count: int) -> int:
        del self.entries[:count]
        left = len(self.entries)
        self.bounds[:, :left] = self.bounds[:, count : count + left].copy()
        self.starts = sum(len(spans.starts) for spans, _ in self.entries)
        return left

    def clash(self, spans: Spans, access: Access, w: Warp) -> tuple[Access, int] | None:
        """A read of some of these bytes that the warp has not synchronised with, and where."""
        low, high = self.bounds[:, : len(self.entries)]
        for i in np.flatnonzero((low < spans.high) & (high > spans.low)):
            other, read = self.entries[i]
            if (read.strong and (access.strong or read.seen(w))) or read.before(w):
                continue
            address = other.meeting(spans)
            if address is not None:
                return read, address
        return None


class RegionShadow:
    """The accesses to one tensor: number of the last write of each unit, 0 for none, and the log of reads."""

    def __init__(self, region: Region) -> None:
        self.region, self.reads = region, ReadLog()
        self.unit = 16
        self.last: Array | None = None

    def units(self, spans: Spans) -> Array | slice:
        """Numbers of the units of some bytes."""
        return spans.units(self.unit, self.region.start)

    def fit(self, spans: Spans) -> None:
        """Make units small enough for a write of these bytes."""
        unit, region = spans.alignment(), self.region
        if self.last is not None and unit >= self.unit:
            return
        old, self.unit = self.unit, min(unit, self.unit)
        size = (region.end - 1) // self.unit - region.start // self.unit + 1
        if self.last is None:
            self.last = np.zeros(size, np.int32)
        else:
            first = region.start // self.unit - region.start // old * (old // self.unit)
            self.last = np.repeat(self.last, old // self.unit)[first : first + size]


class GlobalShadow:
    """The accesses of one launch to global memory."""

    def __init__(self, memory: GlobalMemory, before: GlobalShadow | None = None) -> None:
        self.memory = memory
        self.before = before  # accesses of the launch before, where this one may begin before its end
        self.accesses: list[Access | None] = [None]
        self.regions: dict[int, RegionShadow] = {}

    def _parts(self, spans: Spans) -> list[tuple[RegionShadow, Spans]]:
        """The bytes by tensor; those outside of all tensors are left out."""
        region = self.memory.find(spans.low)
        if region is not None and spans.high <= region.end:
            return [(self._of(region), spans)]
        out = []
        for region in self.memory.regions:
            inside = (spans.starts >= region.start) & (spans.starts + spans.size <= region.end)
            if inside.any():
                starts = spans.starts[inside]
                part = Spans(starts, spans.size, int(starts.min()), int(starts.max()) + spans.size)
                out.append((self._of(region), part))
        return out

    def _of(self, region: Region) -> RegionShadow:
        found = self.regions.get(region.start)
        if found is None:
            found = self.regions[region.start] = RegionShadow(region)
        return found

    def read(self, spans: Spans, access: Access, w: Warp) -> Clash | None:
        """Note a read, for which the warp's clocks count; returns a write that it does not follow."""
        clash = self._unfinished(spans, False, w)
        for shadow, part in self._parts(spans):
            if shadow.last is not None:
                clash = clash or self._late(shadow, part, access, w)
            shadow.reads.add(part, access)
        return clash

    def write(self, spans: Spans, access: Access, w: Warp) -> Clash | None:
        """Note a write, for which the warp's clocks count; returns an access that it does not follow."""
        clash = self._unfinished(spans, True, w)
        for shadow, part in self._parts(spans):
            if shadow.last is not None:
                clash = clash or self._late(shadow, part, access, w)
            if clash is None:
                read = shadow.reads.clash(part, access, w)
                if read is not None:
                    clash = Clash(read[0], False, read[1], shadow.region)
            shadow.fit(part)
            assert shadow.last is not None
            shadow.last[shadow.units(part)] = self._number(access)
        return clash

    def _unfinished(self, spans: Spans, writes: bool, w: Warp) -> Clash | None:
        """An access of the launch before that the warp has not waited for."""
        if self.before is None or PREVIOUS in w.known:
            return None
        for shadow, part in self.before._parts(spans):
            if shadow.last is not None and (shadow.last[shadow.units(part)] != 0).any():
                return Clash(None, True, part.low, shadow.region)
            if writes:
                for read, _ in shadow.reads.entries:
                    address = read.meeting(part)
                    if address is not None:
                        return Clash(None, False, address, shadow.region)
        return None

    def _number(self, access: Access) -> int:
        if self.accesses[-1] is not access:
            self.accesses.append(access)
        return len(self.accesses) - 1

    def _late(self, shadow: RegionShadow, spans: Spans, access: Access, w: Warp) -> Clash | None:
        """The last write of some of these bytes that the warp has not synchronised with."""
        assert shadow.last is not None
        index = shadow.units(spans)
        last = shadow.last[index]
        first = int(last.flat[0])
        numbers = [first] if (last == first).all() else np.unique(last).tolist()
        for number in numbers:
            other = self.accesses[number]
            if other is None:
                continue
            proxy = False
            if other.before(w):
                proxy = access.asynchronous and not other.asynchronous and not other.fenced(w)
                if not proxy:
                    continue
            elif other.strong and (access.strong or other.seen(w)):
                continue
            at = int(np.argmax(last == number))
            unit = index.start + at if isinstance(index, slice) else int(index[at])
            address = (shadow.region.start // shadow.unit + unit) * shadow.unit
            return Clash(other, True, max(address, shadow.region.start), shadow.region, proxy)
        return None
