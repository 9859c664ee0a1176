"""Findings of the emulator: what a kernel did wrong, and where.

A :class:`Report` is one finding. It names the kernel, the PTX line, the Python source line (when the
kernel was compiled with line information), the CTA, the warp and the address. :class:`EmulatorError` is
raised where execution cannot go on, and at the end of a launch whose findings were not to be collected.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from . import statements

MOST_LINES = 6
"""A report, and the findings of a launch together, name no more lines to look at than these."""
OWN_LINES = 4  # of them that are of the first finding


class Severity(enum.Enum):
    """``ERROR`` is raised at the end of a launch; ``WARNING`` is collected in ``session.reports`` only."""

    ERROR = "error"
    WARNING = "warning"


class Kind(enum.Enum):
    """Kinds of findings. The value is the name printed in a report."""

    READ_BEFORE_ARRIVAL = "shared memory read before its copy arrived"
    OVERWRITE_IN_USE = "shared memory overwritten while an asynchronous unit may still read it"
    RACE = "two accesses to the same memory with no synchronisation between them"
    MISSING_PROXY_FENCE = "ordinary stores read by the async proxy with no fence.proxy.async"
    PENDING_REGISTER = "register of a pending WGMMA touched before its wait"
    MISSING_WGMMA_FENCE = "registers changed and used by WGMMA with no wgmma.fence between"
    ARRIVE_COUNT = "wrong arrive count on an mbarrier"
    TRANSACTION_COUNT = "wrong transaction count on an mbarrier"
    PHASE_WAITED_TWICE = "the same phase of an mbarrier waited for twice"
    BARRIER_STATE = "an mbarrier used before its initialisation is visible, or destroyed"
    PEER_ENDED = "a CTA's shared memory used with no promise that the CTA runs"
    DEADLOCK = "deadlock"
    OUT_OF_BOUNDS = "access out of bounds"
    MISALIGNED = "misaligned access"
    UNINITIALISED = "memory read that was never written"
    BARRIER_DIVERGENCE = "a barrier or warp-wide operation not executed by all threads it names"
    DESCRIPTOR = "descriptor or operand of an asynchronous operation is not valid"
    SCHEDULE_DEPENDENT = "the result depends on the schedule"
    UNKNOWN_OPCODE = "the emulator does not know this instruction"
    TRAP = "the kernel executed trap"


class SourceLine(NamedTuple):
    """A line of the Python source; ``function`` is empty where it is not known."""

    path: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" + (f" in {self.function}" if self.function else "")


def _called(stack: tuple[SourceLine, ...]) -> list[str]:
    """Lines of text for the callers of an instruction's own line."""
    if not stack or not stack[0].function:
        return []
    callers = [f"    called at {line}" for line in stack[1:]]
    return [f"    in {stack[0].function}", *callers]


@dataclass(frozen=True)
class Place:
    """One side of a finding: who did it, at which instruction. ``stack`` is innermost first."""

    who: str
    ptx_line: int = 0
    ptx_text: str = ""
    stack: tuple[SourceLine, ...] = ()

    def __str__(self) -> str:
        source = f", {self.stack[0].path}:{self.stack[0].line}" if self.stack else ""
        lines = [f"  other side: {self.who}, PTX line {self.ptx_line}{source}", f"  {self.ptx_text}"]
        return "\n".join(lines + _called(self.stack))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "who": self.who,
            "ptx_line": self.ptx_line,
            "ptx": self.ptx_text,
            "stack": [frame._asdict() for frame in self.stack],
        }


class Span(NamedTuple):
    """Lines of the PTX."""

    first: int
    last: int


NOWHERE = Span(0, 0)


class Suspect(NamedTuple):
    """A line to look at, or the lines of one function up to ``until``, and why."""

    what: str
    place: Place
    until: int = 0
    span: Span = NOWHERE  # its instructions are between these lines of the PTX

    def lines(self) -> set[tuple]:
        """Names for its lines, equal where they are the same; a statement over several lines is one."""
        if not self.place.stack:
            return {("PTX", self.place.ptx_line)}
        first, outer = self.place.stack[0], self.place.stack[1:]
        low = statements.number(first.path, first.line)
        high = statements.number(first.path, max(first.line, self.until))
        return {(first.path, line, outer) for line in range(low, high + 1)}

    def __str__(self) -> str:
        place = self.place
        if not place.stack:
            return f"PTX line {place.ptx_line}: {self.what}"
        first, outer = place.stack[0], place.stack[1:]
        where = f"{first.path}:{first.line}" + (f" to {self.until}" if self.until else "")
        calls = "".join(f" < {os.path.basename(line.path)}:{line.line}" for line in outer)
        return f"{where}{calls}: {self.what}"


def first_lines(suspects: Iterable[Suspect]) -> tuple[Suspect, ...]:
    """The first of them that are not named yet, as many as make `MOST_LINES` lines."""
    found: list[Suspect] = []
    named: set[tuple] = set()
    for suspect in suspects:
        lines = suspect.lines()
        if not lines <= named and len(lines | named) <= MOST_LINES:
            found.append(suspect)
            named |= lines
        if len(named) == MOST_LINES:
            break
    return tuple(found)


def where_to_look(reports: Sequence[Report]) -> tuple[Suspect, ...]:
    """Lines that the findings of a launch make suspect, likeliest first.

    The first finding is the closest to the cause as a rule, so most are its own; then those of each in turn.
    """
    own = [suspect for report in reports[:1] for suspect in report.suspects[:OWN_LINES]]
    rounds = zip_longest(*(report.suspects for report in reports))
    return first_lines([*own, *(suspect for each in rounds for suspect in each if suspect is not None)])


@dataclass(frozen=True)
class Report:
    """One finding.

    ``address`` is an offset in shared memory (``space == "shared"``) or an address of the launch's
    memory (``space == "global"``), or None. ``count`` says how often this line did it.
    """

    kind: Kind
    message: str
    kernel: str = ""
    ptx_line: int = 0
    ptx_text: str = ""
    source: str = ""
    cta: tuple[int, int, int] = (0, 0, 0)
    warp: int = -1
    lanes: str = ""
    space: str = ""
    address: int | None = None
    step: int = 0
    warning: bool = False  # collected, but never raised
    stack: tuple[SourceLine, ...] = ()  # of `source`, innermost first
    other: Place | None = None  # the other side of a race
    buffer: str = ""  # of `address`: "b stage 2, byte 128"; row and column of a tensor
    hint: str = ""  # what usually mends it
    role: str = ""  # of the warp: producer, consumer 0…
    suspects: tuple[Suspect, ...] = ()  # lines to look at, likeliest first

    @property
    def severity(self) -> Severity:
        """A warning is collected, but never raised."""
        return Severity.WARNING if self.warning else Severity.ERROR

    @property
    def who(self) -> str:
        """CTA, warp and lanes."""
        role = f" ({self.role})" if self.role else ""
        return f"CTA {self.cta}, warp {self.warp}{role}" + (f", {self.lanes}" if self.lanes else "")

    @property
    def places(self) -> tuple[Place, ...]:
        """This access and, for a race, the other one."""
        here = Place(self.who, self.ptx_line, self.ptx_text, self.stack)
        return (here,) if self.other is None else (here, self.other)

    def as_dict(self) -> dict[str, Any]:
        """The finding for JSON: strings, numbers, lists and dictionaries only."""
        return {
            "kind": self.kind.name,
            "severity": self.severity.value,
            "message": self.message,
            "kernel": self.kernel,
            "places": [place.as_dict() for place in self.places],
            "stack": [frame._asdict() for frame in self.stack],
            "source": self.source,
            "space": self.space,
            "address": self.address,
            "buffer": self.buffer,
            "hint": self.hint,
            "suspects": [{"what": s.what, "until": s.until, **s.place.as_dict()} for s in self.suspects],
        }

    def __str__(self) -> str:
        place = f"kernel {self.kernel}" + (f", PTX line {self.ptx_line}" if self.ptx_line else "")
        if self.source:
            place += f", {self.source}"
        where = "" if self.address is None else f", {self.space} address {self.address:#x}"
        if self.buffer:
            where += f" ({self.buffer})"
        name = self.kind.name + (" (warning)" if self.warning else "")
        lines = [f"{name}: {self.kind.value}: {self.message}", f"  at {place}", f"  by {self.who}{where}"]
        if self.ptx_text:
            lines.append(f"  {self.ptx_text}")
        lines += _called(self.stack)
        if self.other is not None:
            lines += str(self.other).split("\n")
        shown = {place.ptx_line for place in self.places}
        others = [s for s in self.suspects if s.until or s.place.ptx_line not in shown]
        if others:
            lines += ["  look at:", *(f"    {suspect}" for suspect in others)]
        if self.hint:
            lines.append(f"  usually missing or wrong: {self.hint}")
        return "\n".join(lines)


class EmulatorError(RuntimeError):
    """Execution stopped, or a launch ended with findings. ``reports`` holds them."""

    def __init__(self, message: str, reports: tuple[Report, ...] = ()):
        super().__init__(message)
        self.reports = tuple(reports)


class PtxError(EmulatorError):
    """The PTX text uses something that the emulator does not know; the message names the line.

    ``ins``: the instruction, where the text could be read.
    """

    ins: Any = None


@contextmanager
def reading(ins: Any) -> Iterator[None]:
    """Whatever goes wrong inside is a :class:`PtxError` about the instruction ``ins``."""
    try:
        yield
    except Exception as error:
        if getattr(error, "ins", None) is not None:
            raise
        plain = isinstance(error, (EmulatorError, Unsupported))
        what = str(error) if plain else f"{type(error).__name__}: {error}"
        found = PtxError(f"a form of an instruction that is not modelled ({what})")
        found.ins = ins
        raise found from error


class Unsupported(Exception):
    """A form of an instruction that the emulator does not know; its reader adds the line."""


@dataclass
class ReportLog:
    """Collects findings, one for each (kind, PTX line, CTA-independent place), first occurrence kept."""

    limit: int = 100
    reports: list[Report] = field(default_factory=list)
    counts: dict[tuple, int] = field(default_factory=dict)

    def knows(self, kind: Kind, kernel: str, ptx_line: int, warning: bool) -> bool:
        """True if this line has made a finding of this kind."""
        return (kind, kernel, ptx_line, warning) in self.counts

    def add(self, report: Report) -> None:
        """Keep ``report`` unless the same line already made one of the same kind."""
        key = (report.kind, report.kernel, report.ptx_line, report.warning)
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] == 1 and len(self.reports) < self.limit:
            self.reports.append(report)

    def count(self, report: Report) -> int:
        """Number of findings of its kind that the place of ``report`` made."""
        return self.counts.get((report.kind, report.kernel, report.ptx_line, report.warning), 0)
