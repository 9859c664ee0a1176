"""Few points of a space in which every value of an axis meets every value of every other axis."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from tests.config.spaces import Point, Space

TRIES = 24
"""Points drawn around a pair of values, before it counts as one that nothing accepts."""
CHOICES = 3
"""Accepted points among which the one that covers most is taken."""

Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs_of(point: Point) -> set[Pair]:
    """Every two axes with their values."""
    return set(itertools.combinations(sorted(point.items(), key=lambda item: item[0]), 2))


def all_pairs(space: Space) -> list[Pair]:
    """The same of all points of a space."""
    axes = sorted(space.axes.items())
    return [
        ((x, value), (y, other))
        for (x, values), (y, others) in itertools.combinations(axes, 2)
        for value in values
        for other in others
    ]


def covering(space: Space, accepts: Callable[[Point], bool], seed: int, seconds: float) -> list[Point]:
    """Accepted points that cover every pair of values that some point near the common one has.

    A greedy search of at most so many seconds: around each pair not met yet, points whose other axes have
    their common value with falling odds.
    """
    generator = random.Random(seed)
    missing = all_pairs(space)
    generator.shuffle(missing)
    covered: set[Pair] = set()
    points: list[Point] = []
    end = time.monotonic() + seconds
    for pair in missing:
        if pair in covered:
            continue
        if time.monotonic() > end:
            break
        found: list[Point] = []
        for attempt in range(TRIES):
            point = space.draw(generator, dict(pair), common=(0.5, 0.7, 0.9, 1.0)[attempt * 4 // TRIES])
            if accepts(point):
                found.append(point)
            if len(found) == CHOICES:
                break
        if found:
            best = max(found, key=lambda point: len(pairs_of(point) - covered))
            covered |= pairs_of(best)
            points.append(best)
    return points
