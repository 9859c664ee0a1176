"""Names for a kernel's shared memory: ``ring.full[1]`` for an mbarrier, ``b stage 2`` for a buffer.

They come from the Python source, see `call_stacks`: the variable that an mbarrier's initialisation is
assigned to, the fields of the struct that was allocated. Barriers that one statement initialises are numbered
by address; a buffer has as many stages as the barriers that its copies complete on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from . import call_stacks

if TYPE_CHECKING:
    from .call_stacks import CallStack
    from .machine import Machine
    from .ptx import Instruction
    from .state import Cta

_BARRIER = re.compile(r"\bmbarrier (0x[0-9a-f]+)")


class Buffer(NamedTuple):
    """Bytes [start, end) of shared memory."""

    name: str
    start: int
    end: int


class Names:
    """Names of one launch's shared memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.buffers = self._lay_out()
        self.filled: dict[Buffer, int] = {}  # an mbarrier that copies into the buffer complete on
        self.copies: dict[Buffer, dict[int, Instruction]] = {}  # into the buffer, by PTX line
        self._noted: set[tuple[int, int, int]] = set()  # offset, barrier, PTX line
        self.known: dict[int, str] = {}  # of mbarriers in clusters that have ended

    def _lay_out(self) -> list[Buffer]:
        """The buffers of the dynamic shared memory, in the order of their allocation."""
        dynamic = [v for v in self.machine.kernel.variables.values() if v.space == "shared" and v.size == 0]
        found: list[Buffer] = []
        if len(dynamic) != 1:
            return found
        base = dynamic[0].offset
        at = 0
        for made in self.machine.kernel.allocations:
            at = -(-at // made.alignment) * made.alignment
            fields = made.fields or ((made.name, made.size, 0),)
            found += [Buffer(n, base + at + o, base + at + o + size) for n, size, o in fields if n and size]
            at += made.size
        return found if at <= self.machine.launch.smem else []

    def note_copy(self, offset: int, barrier: int, ins: Instruction) -> None:
        """A bulk copy into ``offset`` completes on ``barrier``."""
        if (offset, barrier, ins.line) in self._noted:
            return
        self._noted.add((offset, barrier, ins.line))
        buffer = self._buffer(offset)
        if buffer is not None:
            self.filled.setdefault(buffer, barrier)
            self.copies.setdefault(buffer, {})[ins.line] = ins

    def copies_into(self, offset: int) -> list[Instruction]:
        """The bulk copies so far into the buffer of a shared address."""
        buffer = self._buffer(offset)
        return list(self.copies.get(buffer, {}).values()) if buffer is not None else []

    def _buffer(self, offset: int) -> Buffer | None:
        return next((b for b in self.buffers if b.start <= offset < b.end), None)

    def buffer(self, cta: Cta, offset: int) -> str:
        """The buffer of a shared address: ``b stage 2, byte 128``; empty where it is not known."""
        name = self.barrier(cta, offset & ~7)
        if name:
            return name
        found = self._buffer(offset)
        if found is None:
            return ""
        at, stages = offset - found.start, 1
        if found in self.filled:
            stages = len(self._group(cta, self.filled[found]))
        size = found.end - found.start
        if stages > 1 and size % stages == 0:
            size //= stages
            return f"{found.name} stage {at // size}, byte {at % size}"
        return f"{found.name}, byte {at}"

    def barrier(self, cta: Cta, offset: int) -> str:
        """The name of an mbarrier: ``ring.full[1]``; empty where it has none."""
        group = self._group(cta, offset)
        if not group:
            return ""
        stack = self._made(cta, offset)
        name = stack.label() if stack is not None else ""
        if not name:
            field = self._buffer(offset)
            return f"{field.name}[{(offset - field.start) // 8}]" if field is not None else ""
        return self._distinct(cta, name, stack) + (f"[{group.index(offset)}]" if len(group) > 1 else "")

    def _made(self, cta: Cta, offset: int) -> CallStack | None:
        barrier = cta.mbarriers.get(offset)
        return self.machine.call_stack(barrier.made) if barrier is not None and barrier.made else None

    def _group(self, cta: Cta, offset: int) -> list[int]:
        """The barriers that the same statement initialised, by address."""
        if offset not in cta.mbarriers:
            return []
        mine = self._made(cta, offset)
        return sorted(o for o in cta.mbarriers if o == offset or (mine and self._made(cta, o) == mine))

    def _distinct(self, cta: Cta, name: str, stack: CallStack | None) -> str:
        """``name``, and what sets its statement apart from others of that name."""
        made = [self._made(cta, offset) for offset in cta.mbarriers]
        others = {s for s in made if s is not None and s != stack and s.label() == name}
        if stack is None or not others:
            return name
        for depth, line in enumerate(stack.lines):
            if all(depth >= len(o.lines) or o.lines[depth] != line for o in others):
                outer = call_stacks.CallStack(stack.lines[depth : depth + 1], stack.role).label()
                return outer or f"{name} of line {line.line}"
        return name

    def remember(self, cta: Cta) -> None:
        """Keep the names of an ending CTA's mbarriers."""
        for offset in cta.mbarriers:
            if offset not in self.known:
                self.known[offset] = self.barrier(cta, offset)

    def replace(self, text: str, cta: Cta | None) -> str:
        """``text`` with names for the mbarriers whose addresses it has."""

        def named(match: re.Match[str]) -> str:
            offset = int(match[1], 16)
            ctas = [cta] if cta is not None else []
            ctas += [c for cluster in self.machine.clusters for c in cluster.ctas]
            name = next((n for c in ctas if (n := self.barrier(c, offset))), self.known.get(offset, ""))
            return f"mbarrier {name} ({match[1]})" if name else match[0]

        return _BARRIER.sub(named, text)
