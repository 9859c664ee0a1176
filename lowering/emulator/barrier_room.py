"""Room for a CTA's mbarriers: the arrays of several in one piece, which compiled code can take from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .fast import opcodes as o
from .shadow import Domain
from .warpgroup import address

Array = np.ndarray
_USERS, _ARRIVED, _ROOM = 8, 16, 16


class Tables(NamedTuple):
    """The arrays of one mbarrier, whose numbers say where the others lie.

    ``clocks``: `vc` and `fc` of who arrives, and of the last phase. By the warps of the cluster ``tallied``
    has what each has arrived, ``waits`` the phase and step of its last wait, -1 for none; ``users`` the steps
    that used it, and which warps in each; ``arrived`` the arrivals of this phase.
    """

    numbers: Array
    tallied: Array
    users: Array
    arrived: Array
    waits: Array
    clocks: Array


class BarrierRoom:
    """Tables of mbarriers that are not initialised yet, for a cluster of so many warps."""

    def __init__(self, domain: Domain, warps: int) -> None:
        shapes = (1, o.M_COLUMNS), (warps, o.TALLY_COLUMNS), (_USERS, 1 + warps), (_ARRIVED, 2), (warps, 2)
        ends = np.cumsum([rows * columns for rows, columns in shapes])
        whole = np.zeros((_ROOM, ends[-1]), np.int64)
        parts = [
            part.reshape(_ROOM, *shape)
            for part, shape in zip(np.split(whole, ends[:-1], axis=1), shapes, strict=True)
        ]
        numbers, clocks = parts[0][:, 0], domain.clocks(4 * _ROOM).reshape(_ROOM, 4, -1)
        parts[-1][:] = -1
        first = address(whole) + whole.strides[0] * np.arange(_ROOM)
        numbers[:, [o.M_WARPS, o.M_USERS_ROOM, o.M_ARRIVED_ROOM]] = warps, _USERS, _ARRIVED
        columns = (o.M_TALLY_AT, o.M_USERS_AT, o.M_ARRIVED_AT, o.M_WAITS_AT)
        for column, end in zip(columns, ends[:-1].tolist(), strict=True):
            numbers[:, column] = first + 8 * end
        numbers[:, o.M_CLOCKS_AT] = address(clocks) + clocks.strides[0] * np.arange(_ROOM)
        self._parts = [numbers, *parts[1:], clocks]
        # Compiled code takes some, too.
        self.state = np.array([0, _ROOM, first[0], whole.strides[0]], np.int64)

    def full(self) -> bool:
        """True if all are taken."""
        return bool(self.state[o.R_USED] == self.state[o.R_SIZE])

    def take(self) -> int:
        """The number of the next one."""
        self.state[o.R_USED] += 1
        return int(self.state[o.R_USED]) - 1

    def tables(self, number: int) -> Tables:
        """The tables of one that is taken."""
        return Tables(*(part[number] for part in self._parts))
