"""Samples of the grids that tests are parametrised over; TEST_ALL_KERNELS=1 takes whole grids.

A sample is the same in every process: it follows from the name and the grid.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TypeVar

from reference.inputs import case_seed

ALL = os.environ.get("TEST_ALL_KERNELS") == "1"
T = TypeVar("T")
Kind = TypeVar("Kind")


def pairs(name: str, kinds: Sequence[Kind], cases: Iterable[T]) -> list[tuple[Kind, T]]:
    """Each case with one kind, and each kind with as many cases as the others, but for one."""
    cases = list(cases)
    if ALL:
        return list(product(kinds, cases))
    draw = random.Random(case_seed(name, len(cases)))
    dealt: list[Kind] = []
    while len(dealt) < max(len(cases), len(kinds)):
        dealt += draw.sample(list(kinds), len(kinds))
    count = max(len(cases), len(kinds))
    return [(dealt[i], cases[i % len(cases)]) for i in range(count)]


def one(name: str, kinds: Sequence[Kind]) -> list[Kind]:
    """One of the kinds: for a test whose siblings take the others."""
    return list(kinds) if ALL else [random.Random(case_seed(name)).choice(list(kinds))]
