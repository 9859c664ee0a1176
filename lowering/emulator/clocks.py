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


class Collected:
    """The clocks of all that arrived at a barrier."""

    def __init__(self, domain: Domain) -> None:
        self.vc, self.fc = domain.clock(), domain.clock()
        self.known = NOTHING

    def add(self, other: Handover | Collected) -> None:
        """Take the clocks of an arriving warp, or of a phase."""
        np.maximum(self.vc, other.vc, out=self.vc)
        np.maximum(self.fc, other.fc, out=self.fc)
        self.known = join_known(self.known, other.known)
