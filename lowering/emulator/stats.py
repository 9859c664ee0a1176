"""Counts of an emulated launch, by source line: instructions, bytes copied, bank conflicts, matrix work."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from . import fast

if TYPE_CHECKING:
    from .program import Step
    from .ptx import Instruction


class Stats:
    """``total[name]`` and ``by_line[(path, line)][name]``. Instructions are counted once for each warp.

    The path is empty where a kernel was compiled without line information. Complete when a launch has ended.

    Names: ``instructions``, ``shared_bytes``, ``global_bytes``, ``bulk_bytes`` (TMA and bulk copies),
    ``cp_async_bytes``, ``bank_conflicts`` (extra passes of a shared access over the fewest possible),
    ``matrix_flops`` (two for each multiply-add of ``mma.sync`` and ``wgmma``).
    """

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.by_line: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        self._by_source: dict[tuple[int, int, int], Counter[str]] = defaultdict(Counter)
        self._steps: Counter[int] = Counter()
        self._of: dict[int, Step] = {}

    def ran(self, step: Step, times: int = 1) -> None:
        """A step ran."""
        key = id(step)
        self._steps[key] += times
        self._of[key] = step

    def add(self, ins: Instruction, name: str, amount: int) -> None:
        """Count ``amount`` of ``name`` at the source line of ``ins``."""
        self.total[name] += amount
        self._by_source[ins.source][name] += amount

    def finish(self, files: dict[int, str]) -> None:
        """Fold the counts of a launch in; ``files`` are its source files by number."""
        for key, times in self._steps.items():
            for ins in self._of[key].instructions:
                self.add(ins, "instructions", times)
        self._steps.clear()
        self._of.clear()
        for (number, line, _), counts in self._by_source.items():
            self.by_line[files.get(number, ""), line].update(counts)
        self._by_source.clear()

    def table(self, name: str, top: int = 10) -> str:
        """The source lines with the largest counts of ``name``, as text."""
        rows = sorted(((c[name], place) for place, c in self.by_line.items() if c[name]), reverse=True)
        return "\n".join(f"{count:>12} {path}:{line}" for count, (path, line) in rows[:top])

    def shared_access(self, ins: Instruction, addresses: np.ndarray, size: int) -> None:
        """Count bytes and bank conflicts of one access of ``size`` bytes at each address.

        A pass serves 32 banks of 4 bytes; accesses of 8 and 16 bytes go in halves and quarters of a warp.
        """
        self.add(ins, "shared_bytes", len(addresses) * size)
        compiled = fast.kernels()
        if compiled is not None and size <= 16:
            extra = compiled.bank_conflicts(addresses, size)
            if extra:
                self.add(ins, "bank_conflicts", extra)
            return
        group = 32 if size <= 4 else 16 if size == 8 else 8
        extra = 0
        for start in range(0, len(addresses), group):
            words = (addresses[start : start + group, None] + np.arange(0, max(size, 4), 4)) >> 2
            distinct = np.unique(words)
            extra += int(np.bincount(distinct & 31).max()) - 1
        if extra:
            self.add(ins, "bank_conflicts", extra)
