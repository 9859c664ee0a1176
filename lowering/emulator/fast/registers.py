"""A warp's registers as rows of one array, for compiled code, and as arrays, for Python code."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_

import numpy as np

Array = np.ndarray
BYTES = {"pred": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16}
_DTYPES = {"pred": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
LANES = 32


class Layout:
    """Places of registers, and constants that instructions read as registers: offsets in bytes."""

    def __init__(self, classes: list[str]) -> None:
        self.classes = classes
        self.size = 0
        self.starts = [self.add(cls) for cls in classes]
        # Of each register of 32 bits its elements in the array of that width.
        lanes = np.arange(LANES)
        self.words = np.array([start // 4 for start in self.starts], np.int64)[:, None] + lanes

    def add(self, cls: str) -> int:
        """Room for one row more."""
        at = self.size
        self.size += LANES * BYTES[cls]
        return at

    def row(self, register: int) -> int:
        """The first element of a register in the array of its width."""
        return self.starts[register] // BYTES[self.classes[register]]


class Registers:
    """The value of ``w.R``. Arrays that are read must not be changed, and hold until compiled code runs next.

    An array that Python code assigns is the register until `settle` copies it to its row. Accumulators of a
    WGMMA that has not run yet stay apart, since it fills those arrays.

    ``whole``: the rows; ``away``: for each register the place of what a WGMMA has not filled yet, 0 for none.
    """

    __slots__ = ("_layout", "_views", "_waiting", "assigned", "file")

    def __init__(self, layout: Layout, whole: Array, away: Array) -> None:
        u32, u64 = whole.view(np.uint32), whole.view(np.uint64)
        self.file = (whole, whole.view(np.uint16), u32, u64, away)
        self._layout = layout
        self._views = {"pred": whole.view(np.bool_), "b16": self.file[1], "b32": u32, "b64": u64}
        self.assigned: dict[int, Array] = {}
        self._waiting: dict[int, Array] = {}

    def __getitem__(self, register: int) -> Array:
        found = self.assigned.get(register)
        if found is None and self._waiting:
            found = self._waiting.get(register)
        return self._row(register) if found is None else found

    def _row(self, register: int) -> Array:
        cls = self._layout.classes[register]
        if cls == "b128":
            first = self._layout.starts[register] // 8
            return self.file[3][first : first + 2 * LANES].reshape(LANES, 2)
        first = self._layout.starts[register] // BYTES[cls]
        return self._views[cls][first : first + LANES]

    def __setitem__(self, register: int, value: Array) -> None:
        self.assigned[register] = value
        if self._waiting and self._waiting.pop(register, None) is not None:
            self.file[4][register] = 0

    def holds(self, registers: list[int], values: list[Array]) -> bool:
        """True if these very arrays are in the registers."""
        found = self._waiting.get if self.assigned.keys().isdisjoint(registers) else self.__getitem__
        return all(map(is_, map(found, registers), values))

    def settle(self, pending: Mapping[int, int]) -> None:
        """Bring what was assigned to its rows, but for arrays that ``pending`` knows by identity."""
        assigned = self.assigned
        if not assigned:
            return
        ready = {}
        for register, value in assigned.items():
            if pending and id(value) in pending:
                self._waiting[register] = value
                self.file[4][register] = pending[id(value)]
            else:  # a view may be of a row that changes here
                ready[register] = value if value.base is None else value.copy()
        assigned.clear()
        for register, value in ready.items():
            self._row(register)[:] = value

    def await_values(self, registers: list[int], values: list[Array], places: range) -> None:
        """Assign arrays of 32 bits that a WGMMA fills; ``places``: their numbers."""
        if self.assigned:
            for register in registers:
                self.assigned.pop(register, None)
        self._waiting.update(zip(registers, values, strict=True))
        self.file[4][registers] = places

    def arrived(self, pending: Mapping[int, object]) -> None:
        """Some of the arrays that were waited for are complete."""
        waiting, classes = self._waiting, self._layout.classes
        complete = [register for register, value in waiting.items() if id(value) not in pending]
        if not complete:
            return
        values = [waiting.pop(register) for register in complete]
        self.file[4][complete] = 0
        if all(classes[register] == "b32" for register in complete):
            self.file[2][self._layout.words[complete]] = np.concatenate(values).reshape(-1, LANES)
            return
        self.assigned.update(zip(complete, values, strict=True))
