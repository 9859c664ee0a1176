"""Calls within `sm_margin`: any case, with fewer SMs for its kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import kernels_dsl
from reference.inputs import case_seed
from tests.fuzz.case import Call, Case, Mode, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena

SMS = (0, 1, 16, 100, 124)
_ODDS = 0.06
T = TypeVar("T")


@dataclass(frozen=True)
class MarginCase:
    """`case`, made within `sm_margin(sms)`: refused where it leaves too few SMs."""

    case: Case
    sms: int

    def __str__(self) -> str:
        return f"sm_margin({self.sms}) {self.case}"

    @property
    def mode(self) -> Mode:
        """That of the case."""
        return self.case.mode

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        return (*self.case.features, "sm_margin")

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The case's call."""
        call = self.case.build(arena, settings)
        if call.must_refuse is not None:
            return call
        return replace(
            call,
            run=self._within(call.run),
            supports=None if call.supports is None else self._within(call.supports),
            arguments=(*call.arguments, "sm_margin"),
            may_refuse=True,
        )

    def _within(self, function: Callable[[], T]) -> Callable[[], T]:
        def made() -> T:
            with kernels_dsl.sm_margin(self.sms):
                return function()

        return made


def perhaps(draw: Draw, case: Case) -> Case:
    """`case`, now and then within a margin: all cases of a block, or none."""
    if draw.settings.plant is not None:
        return case
    pick = random.Random(case_seed("fuzz margin", draw.family, draw.settings.seed, draw.block))
    return MarginCase(case, pick.choice(SMS)) if pick.random() < _ODDS else case
