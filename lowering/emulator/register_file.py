"""``setmaxnreg``: how a CTA shares its registers out to its warps.

A CTA gets as many registers a thread as fit when it starts (a kernel with ``setmaxnreg`` is compiled for
that), and no more later: ``.inc`` waits until ``.dec`` of other warps has left enough. All four warps of a
warpgroup must execute it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .fast import opcodes as o
from .ptx import Imm, Instruction
from .reports import EmulatorError, Kind

if TYPE_CHECKING:
    from .machine import Machine
    from .state import Cta, Warp

REGISTERS = 65536
"""Of one SM."""
MOST = 255


class RegisterFile:
    """The registers of a CTA of ``warps`` warps, where an SM must hold ``ctas`` of them: counts a thread."""

    def __init__(self, warps: int, ctas: int) -> None:
        start = min(MOST, REGISTERS // (ctas * 32 * warps))
        self.numbers = np.zeros(o.L_HELD + warps, np.int64)  # for compiled code, too
        self.numbers[o.L_HELD :] = start // 8 * 8
        self.waiters: list[Warp] = []
        self.history: list[list[tuple[int, Instruction]]] = [[] for _ in range(warps)]

    @property
    def held(self) -> list[int]:
        """Registers of each warp."""
        return list(self.numbers[o.L_HELD :].tolist())

    @property
    def free(self) -> int:
        """Registers that no warp holds."""
        return int(self.numbers[o.L_FREE])

    def set(self, warp: int, count: int) -> None:
        """A warp's count changes."""
        self.numbers[o.L_FREE] -= count - self.numbers[o.L_HELD + warp]
        self.numbers[o.L_HELD + warp] = count

    def total(self) -> int:
        """Registers of the CTA."""
        return 32 * (self.free + sum(self.held))


def allowed(count: int) -> bool:
    """True for a count that ``setmaxnreg`` takes."""
    return 24 <= count <= 256 and count % 8 == 0


def set_limit(m: Machine, w: Warp, ins: Instruction, mask: np.ndarray) -> object:
    """``setmaxnreg.inc`` and ``.dec``."""
    count = ins.operands[0]
    assert isinstance(count, Imm)
    if not allowed(count.value):
        raise EmulatorError(f"PTX line {ins.line}: setmaxnreg {count.value} must be 24 to 256 in steps of 8")
    file = w.cta.registers
    more = count.value - file.held[w.number]
    if more > file.free:
        file.numbers[o.L_WAITING] = 1
        return m.block(
            w,
            f"setmaxnreg.inc to {count.value} registers a thread: warps hold {file.held} of the CTA's "
            f"{file.total()} registers, {32 * file.free} are free",
            file.waiters,
        )
    file.set(w.number, count.value)
    note(w, ins)
    if more < 0:
        file.numbers[o.L_WAITING] = 0
        m.wake(file.waiters)
    return None


def note(w: Warp, ins: Instruction) -> None:
    """Remember what a warp asked for."""
    count = ins.operands[0]
    assert isinstance(count, Imm)
    w.cta.registers.history[w.number].append((count.value, ins))


def check_end(m: Machine, cta: Cta) -> None:
    """Report a warpgroup whose warps did not all execute the same ``setmaxnreg``."""
    history = cta.registers.history
    for first in range(0, len(history), 4):
        group = history[first : first + 4]
        counts = [[count for count, _ in made] for made in group]
        if all(one == counts[0] for one in counts):
            continue
        at = max(range(len(group)), key=lambda i: len(group[i]))
        m.report(
            Kind.BARRIER_DIVERGENCE,
            f"warps {first} to {first + len(group) - 1} are a warpgroup, but executed setmaxnreg {counts}: "
            "all four must execute it, with the same count",
            cta.warps[first + at],
            group[at][-1][1],
        )
