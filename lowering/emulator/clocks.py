"""Clocks that one warp hands to others: of its own cluster, and what it knows of other clusters.

A warp's own vector clock covers the agents of its cluster. Knowledge of another cluster comes through global
memory alone, so it is kept as that cluster's vector clock at the time of its release, in a dictionary that
most kernels leave empty. Arrays and dictionaries that were handed over are never changed in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .shadow import Domain

Array = np.ndarray
Known = dict[int, Array]
"""Vector clocks of clusters by their number; also of what the async proxy sees, see `proxied`."""

NOTHING: Known = {}
PREVIOUS = -1
"""The number of the launch before this one, where the two may overlap."""
FINISHED: Known = {PREVIOUS: np.ones(1, np.int32)}
"""Known after ``griddepcontrol.wait``."""


def proxied(number: int) -> int:
    """The number that stands for what of a cluster's writes ``fence.proxy.async`` has covered."""
    return -2 - number


def through_proxy(known: Known) -> Known:
    """Knowledge of the async proxy after a fence by a warp that knows ``known``."""
    return {proxied(number): clock for number, clock in known.items() if number >= 0}


def fenced(number: int) -> int:
    """The number that stands for the ``fc`` of a cluster's own shared memory."""
    return -(1 << 40) - number


class Handover(NamedTuple):
    """Clocks that an arriving warp hands over: its cluster's ``vc`` and ``fc``, what it knows of others."""

    vc: Array
    fc: Array
    known: Known


def join_known(a: Known, b: Known) -> Known:
    """Union of what the two know."""
    if a is b or not b:
        return a
    if not a:
        return b
    joined = dict(a)
    for number, clock in b.items():
        mine = joined.get(number)
        joined[number] = clock if mine is None or mine is clock else np.maximum(mine, clock)
    return joined


NO_KNOWLEDGE, OF_FINISHED, OTHER = range(3)
"""Numbers of `NOTHING`, of `FINISHED`, and of any other knowledge."""


def number_of(known: Known) -> int:
    """The number by which compiled code knows what is known."""
    return NO_KNOWLEDGE if known is NOTHING else OF_FINISHED if known is FINISHED else OTHER


def known_of(number: int, other: Known) -> Known:
    """The inverse; ``other``: what it is where it has no number of its own."""
    return NOTHING if number == NO_KNOWLEDGE else FINISHED if number == OF_FINISHED else other


class Collected:
    """The clocks of all that arrived at a barrier.

    ``clocks``: where to keep them, the two rows of an array that holds a clean clock in each. ``place``: an
    array of one number, of what is known.
    """

    def __init__(self, domain: Domain, clocks: Array | None = None, place: Array | None = None) -> None:
        rows = clocks if clocks is not None else domain.clocks(2)
        self.vc: Array = rows[0]
        self.fc: Array = rows[1]
        self._place: Array = place if place is not None else np.zeros(1, np.int64)
        self._other = NOTHING

    @property
    def known(self) -> Known:
        """Knowledge of other clusters."""
        return known_of(self._place[0], self._other)

    @known.setter
    def known(self, known: Known) -> None:
        self._place[0], self._other = number_of(known), known

    def clear(self) -> None:
        """Forget all."""
        for clock in (self.vc, self.fc):
            clock[:-1] = 0
        self.known = NOTHING

    def add(self, other: Handover | Collected) -> None:
        """Take the clocks of an arriving warp, or of a phase."""
        np.maximum(self.vc, other.vc, out=self.vc)
        np.maximum(self.fc, other.fc, out=self.fc)
        self.known = join_known(self.known, other.known)
