"""Random choices of a case: those that the compiled kernel depends on, and all others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from reference.inputs import case_seed
from tests.fuzz.case import Mode, Settings
from tests.fuzz.memory import Layout

EMULATED_ARCHS = ("sm_90a", "sm_90a", "sm_89")

T = TypeVar("T")


def cases_a_kernel(settings: Settings) -> int:
    """Consecutive cases that share all choices of `Draw.kernel`, so that most cases compile nothing."""
    return 2 if settings.small else 32


_SHAPES_A_KERNEL = 10
"""Choices of shapes among the cases of a block on a GPU: each new one may need a kernel for another tile or
alignment, which takes seconds to compile."""


class Draw:
    """Choices of case `number` of a family.

    `kernel` serves what a kernel is compiled for (dtypes, layouts, alignments, options, configuration): the
    cases of a block of `cases_a_kernel` get the same sequence from it. `data` serves everything else
    (extents, lengths, kinds of contents); on a GPU some cases of a block share it, and differ in what
    `value_seed` and `mode` give: the contents and the way of calling. `block`: its number.
    """

    def __init__(self, family: str, number: int, settings: Settings) -> None:
        self.number = number
        self.settings = settings
        self.block = block = number // cases_a_kernel(settings)
        self.kernel = random.Random(case_seed("fuzz kernel", family, settings.seed, block))
        if settings.small:
            self.data = self._calls = random.Random(case_seed("fuzz data", family, settings.seed, number))
        else:
            shape = number % cases_a_kernel(settings) % _SHAPES_A_KERNEL
            self.data = random.Random(case_seed("fuzz data", family, settings.seed, block, shape))
            self._calls = random.Random(case_seed("fuzz calls", family, settings.seed, number))
        self._arch_seed = case_seed("fuzz arch", family, settings.seed, block)
        self._values = 0
        self.family = family

    def arch(self) -> str:
        """The architecture that the case runs on: the GPU's, or one to emulate."""
        if self.settings.device == "cuda":
            return self.settings.arch
        return random.Random(self._arch_seed).choice(EMULATED_ARCHS)

    def family_of_kernels(self) -> str | None:
        """A family to force, or None to leave the choice to the operation."""
        able = ("sm90", "sm80") if self.arch() == "sm_90a" else ("sm80",)
        return self.kernel.choice((None, *able))

    def value_seed(self) -> int:
        """A new seed for the contents of a tensor."""
        self._values += 1
        return case_seed("fuzz values", self.family, self.settings.seed, self.number, self._values)

    def extent(self, pool: Sequence[int], multiple: int = 1, zero: float = 0.03) -> int:
        """An extent from `pool`, rounded up to a multiple; 0 now and then."""
        if self.data.random() < zero:
            return 0
        return -(-self.data.choice(pool) // multiple) * multiple

    def often(self, usual: T, *others: T, odds: float = 0.7) -> T:
        """A choice for the kernel: `usual` with probability `odds`, else one of the others."""
        if self.kernel.random() < odds:
            return usual
        return self.kernel.choice(others)

    def mode(self, graph: bool = True) -> Mode:
        """The way of calling; `graph` False where a call may not be captured."""
        if self.settings.device == "cpu":
            return Mode.THREADS if self._calls.random() < 0.05 else Mode.PLAIN
        graphs = [Mode.GRAPH] * 2 if graph and self.settings.graphs else []
        threads = [Mode.THREADS] if self.settings.threads else []
        others = [Mode.STREAM, *threads, *graphs]
        return Mode.PLAIN if self._calls.random() < 0.6 else self._calls.choice(others)

    def layout(self, rank: int, *, negate: bool = True, expand: bool = True, steps: bool = True) -> Layout:
        """A layout of `rank` modes: any order, gaps, shifts; with odds also stride 0, odd steps, negation.

        negate: whether the dtype has a sign that torch can negate lazily, and the tensor is an input.
        expand: whether modes may have stride 0 (inputs only). steps: whether no mode may have stride 1.
        """
        pick = self.kernel
        order = list(range(rank))
        if pick.random() < 0.5:
            pick.shuffle(order)
        kind = pick.choice(("plain", "plain", "padded", "odd", "shifted"))
        return Layout(
            order=tuple(order),
            gap={"padded": 16, "odd": pick.choice((1, 2, 3, 4))}.get(kind, 0),
            offset=pick.choice((1, 2, 4, 8)) if kind == "shifted" else 0,
            step=pick.choice((2, 3)) if steps and pick.random() < 0.06 else 1,
            expanded=(pick.randrange(rank),) if expand and rank and pick.random() < 0.05 else (),
            negated=negate and pick.random() < 0.08,
        )
