"""The families of operations that are fuzzed, each drawn by a module of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tests.fuzz.case import Case, Settings
from tests.fuzz.draw import Draw

FAMILIES = ("gemm", "attention", "fp8", "bsr", "serving")


def module_of(family: str) -> Any:
    """The module of a family: `generate(draw)` draws a case, `expected_features(settings)` lists what a long
    run must have drawn."""
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}, must be one of {', '.join(FAMILIES)}")
    return importlib.import_module(f"tests.fuzz.{family}")


def generate(family: str, number: int, settings: Settings) -> Case:
    """Case `number` of a family: the same in every process."""
    make: Callable[[Draw], Case] = module_of(family).generate
    return make(Draw(family, number, settings))
