"""Faults in PTX: lines that synchronise, removed, weakened or shifted, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Fault(NamedTuple):
    """A kind of fault: lines that match `pattern` are replaced by `by`, or dropped if that is empty."""

    pattern: str
    by: str | Callable[[re.Match[str]], str] = ""


_WAIT = (
    r"mbarrier\.try_wait(?P<kind>[^\s]*)\s+(?P<done>\w+), (?P<at>\[[^]]*\]), "
    r"(?P<phase>%?\w+)(?P<rest>[^;]*);"
)
FAULTS = {
    "a wait on an mbarrier removed": Fault(_WAIT, r"setp.eq.u32 \g<done>, 0, 0;"),
    "a phase flipped": Fault(
        _WAIT,
        r"{ .reg .b32 MUT; xor.b32 MUT, \g<phase>, 1;"
        r" mbarrier.try_wait\g<kind> \g<done>, \g<at>, MUT\g<rest>; }",
    ),
    "an arrival removed": Fault(r"(@\S+\s+)?mbarrier\.arrive\.shared[^;]*;"),
    "an arrive count too large": Fault(
        r"mbarrier\.init(?P<kind>\S*)\s+(?P<at>\[[^]]*\]), (?P<count>%?\w+);",
        r"{ .reg .b32 MUT; add.s32 MUT, \g<count>, 1; mbarrier.init\g<kind> \g<at>, MUT; }",
    ),
    "an mbarrier not initialised": Fault(r"mbarrier\.init[^;]*;"),
    "a byte count off": Fault(
        r"mbarrier\.arrive\.expect_tx(?P<kind>\S*)\s+(?P<state>\S+), (?P<at>\[[^]]*\]), (?P<count>%?\w+);",
        r"{ .reg .b32 MUT; add.s32 MUT, \g<count>, 16;"
        r" mbarrier.arrive.expect_tx\g<kind> \g<state>, \g<at>, MUT; }",
    ),
    "a barrier removed": Fault(r"(bar\.sync|barrier\.(sync|cluster))[^;]*;"),
    "a proxy fence dropped": Fault(r"fence\.proxy\.async[^;]*;"),
    "fence.mbarrier_init dropped": Fault(r"fence\.mbarrier_init[^;]*;"),
    "wgmma.fence dropped": Fault(r"wgmma\.fence[^;]*;"),
    "a wait on a group removed": Fault(
        r"(wgmma|cp\.async|cp\.async\.bulk)\.wait_(group|all)(\.read|\.sync|\.aligned)*\b[^;]*;"
    ),
    "a wait on a group one short": Fault(
        r"(?P<wait>(wgmma|cp\.async|cp\.async\.bulk)\.wait_group\S*)\s+(?P<n>\d+);",
        lambda found: f"{found['wait']} {int(found['n']) + 1};",
    ),
    "a commit removed": Fault(r"(wgmma|cp\.async|cp\.async\.bulk)\.commit_group[^;]*;"),
    "a release or acquire relaxed": Fault(
        r"(?P<op>(ld|st|atom|red)\S*)\.(release|acquire|acq_rel)\b", r"\g<op>.relaxed"
    ),
    "an arrive count too small": Fault(
        r"mbarrier\.init(?P<kind>\S*)\s+(?P<at>\[[^]]*\]), (?P<count>[2-9]|\d\d+);",
        lambda found: f"mbarrier.init{found['kind']} {found['at']}, {int(found['count']) - 1};",
    ),
    "a stage shifted": Fault(
        r"(?P<op>cp\.async\.bulk\S*shared::c\S*\.global\S*)\s+\[(?P<base>%\w+)(?P<off>[^]]*)\]",
        r"\g<op> [\g<base>\g<off>+4096]",
    ),
    "a flag or atomic dropped": Fault(r"(@\S+\s+)?(?<![\w.])(red|st\.release|st\.async)\b[^;]*;"),
    "griddepcontrol.wait dropped": Fault(r"griddepcontrol\.wait;"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault at one line (from 0) of one kernel's PTX."""

    subject: str
    fault: str
    line: int

    def apply(self, text: str) -> str:
        """PTX with the fault; lines keep their numbers."""
        lines = text.split("\n")
        fault = FAULTS[self.fault]
        lines[self.line] = _sums(re.sub(fault.pattern, fault.by, lines[self.line], count=1))
        return "\n".join(lines)

    def trapped(self, text: str) -> str:
        """PTX with a trap at the line, which tells whether it runs."""
        lines = text.split("\n")
        lines[self.line] = "trap; " + lines[self.line]
        return "\n".join(lines)


def _sums(line: str) -> str:
    """A line whose addresses have one offset each: ``[%r1+16+4096]`` is no PTX."""
    return re.sub(r"\+(\d+)\+(\d+)\]", lambda found: f"+{int(found[1]) + int(found[2])}]", line)
