"""The page of instructions is what the emulator's tables say, and the tables are what it does."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from lowering.emulator import coverage, forms
from lowering.emulator.engine import HANDLERS
from lowering.emulator.program import NO_EFFECT
from lowering.emulator.translate import TRANSLATED


def test_the_page_is_up_to_date() -> None:
    assert coverage.PAGE.read_text() == coverage.page(), "run python -m lowering.emulator.coverage"


def test_every_arithmetic_instruction_has_its_forms() -> None:
    assert forms.ARITHMETIC.keys() == TRANSLATED


def test_nothing_is_both_known_and_missing() -> None:
    known = {*HANDLERS, *NO_EFFECT, *(root for root in TRANSLATED)}
    assert not known & forms.MISSING.keys()
