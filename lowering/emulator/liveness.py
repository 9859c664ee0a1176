"""Registers that a kernel may read before it has written them.

Liveness at the entry, backwards over the steps. What an instruction with a predicate writes counts for those
with the same predicate alone; others may still read what was there before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from .ptx import Address, Instruction, registers

if TYPE_CHECKING:
    from .program import Step

_NO_TARGET = ("bar", "barrier", "brx", "setmaxnreg", "nanosleep")  # their first operand is read
_FLOW = ("alu", "op", "bra", "exit")
Guard = tuple[int, bool] | None


class _Effect(NamedTuple):
    """Masks of a step: what is live before it whatever comes after, and what it writes."""

    needs: int
    writes: int


class _Numbers:
    """A bit for each register under each predicate it is read with."""

    def __init__(self) -> None:
        self.bits: dict[tuple[int, Guard], int] = {}
        self.of_register: dict[int, int] = defaultdict(int)

    def read(self, register: int, guard: Guard) -> int:
        bit = self.bits.setdefault((register, guard), 1 << len(self.bits))
        self.of_register[register] |= bit
        return bit

    def written(self, register: int, guard: Guard) -> int:
        return self.of_register[register] if guard is None else self.bits.get((register, guard), 0)


def read_before_written(steps: list[Step]) -> frozenset[int]:
    """Numbers of the registers that are live at the entry."""
    if not steps or any(step.kind not in _FLOW for step in steps):
        return frozenset()
    numbers = _Numbers()
    for step in steps:
        for ins in step.instructions:
            _needs(ins, numbers)
    effects = [_effect(step, numbers) for step in steps]
    after = _successors(steps)
    live = [0] * (len(steps) + 1)
    changed = True
    while changed:
        changed = False
        for i in range(len(steps) - 1, -1, -1):
            out = 0
            for successor in after[i]:
                out |= live[successor]
            now = effects[i].needs | (out & ~effects[i].writes)
            if now != live[i]:
                live[i], changed = now, True
    return frozenset(register for (register, _), bit in numbers.bits.items() if live[0] & bit)


def _effect(step: Step, numbers: _Numbers) -> _Effect:
    needs = writes = 0
    for ins in reversed(step.instructions):
        guard = _guard(ins)
        for register in _targets(ins):
            written = numbers.written(register, guard)
            needs &= ~written
            writes |= written
        needs |= _needs(ins, numbers)
    return _Effect(needs, writes)


def _needs(ins: Instruction, numbers: _Numbers) -> int:
    needs = 0
    for register in _reads(ins):
        needs |= numbers.read(register, _guard(ins))
    if ins.pred is not None:
        needs |= numbers.read(ins.pred.index, None)
    return needs


def _guard(ins: Instruction) -> Guard:
    return None if ins.pred is None else (ins.pred.index, ins.pred.negated)


def _reads_first(ins: Instruction) -> bool:
    return isinstance(ins.operands[0], Address) or (ins.root in _NO_TARGET and not ins.has("red"))


def _targets(ins: Instruction) -> list[int]:
    return [] if not ins.operands or _reads_first(ins) else registers(ins.operands[0])


def _reads(ins: Instruction) -> list[int]:
    if not ins.operands or ins.root == "call":
        return []
    return [r for o in ins.operands[0 if _reads_first(ins) else 1 :] for r in registers(o)]


def _successors(steps: list[Step]) -> list[list[int]]:
    end = len(steps)
    out = []
    for i, step in enumerate(steps):
        conditional = step.first.pred is not None
        if step.kind == "bra":
            target = end if step.target < 0 else step.target
            out.append([target, i + 1] if conditional else [target])
        elif step.kind == "exit":
            out.append([end, i + 1] if conditional else [end])
        else:
            out.append([i + 1])
    return out
