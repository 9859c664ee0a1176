"""Counts of an emulated launch, by source line: instructions, bytes copied, bank conflicts, matrix work."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .machine import Machine
    from .program import Step
    from .ptx import Instruction


class Stats:
    """``total[name]`` and ``by_line[(file, line)][name]``. Instructions are counted once for each warp.

    Names: ``instructions``, ``shared_bytes``, ``global_bytes``, ``bulk_bytes`` (TMA and bulk copies),
    ``cp_async_bytes``, ``bank_conflicts`` (extra passes of a shared access over the fewest possible),
    ``matrix_flops`` (two for each multiply-add of ``mma.sync`` and ``wgmma``).
    """

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.by_line: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
        self._steps: Counter[int] = Counter()
        self._of: dict[int, Step] = {}

    def arithmetic(self, machine: Machine, step: Step) -> None:
        """A compiled step ran."""
        key = id(step)
        self._steps[key] += 1
        self._of[key] = step

    def operation(self, machine: Machine, ins: Instruction) -> None:
        """An operation ran."""
        self.add(ins, "instructions", 1)

    def add(self, ins: Instruction, name: str, amount: int) -> None:
        """Count ``amount`` of ``name`` at the source line of ``ins``."""
        self.total[name] += amount
        self.by_line[ins.source][name] += amount

    def finish(self) -> None:
        """Fold the counts of compiled steps in."""
        for key, times in self._steps.items():
            for ins in self._of[key].instructions:
                self.add(ins, "instructions", times)
        self._steps.clear()
        self._of.clear()

    def shared_access(self, ins: Instruction, addresses: np.ndarray, size: int) -> None:
        """Count bytes and bank conflicts of one access of ``size`` bytes at each address.

        A pass serves 32 banks of 4 bytes; accesses of 8 and 16 bytes go in halves and quarters of a warp.
        """
        self.add(ins, "shared_bytes", len(addresses) * size)
        group = 32 if size <= 4 else 16 if size == 8 else 8
        extra = 0
        for start in range(0, len(addresses), group):
            words = (addresses[start : start + group, None] + np.arange(0, max(size, 4), 4)) >> 2
            distinct = np.unique(words)
            extra += int(np.bincount(distinct & 31).max()) - 1
        if extra:
            self.add(ins, "bank_conflicts", extra)
