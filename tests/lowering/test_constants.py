"""Canonical text of configuration: equal for equal meanings, different for different ones."""

from __future__ import annotations

import enum
import functools
import importlib
import itertools
import math
import sys
from dataclasses import dataclass

import pytest

from lowering.constants import Canonicalizer
from lowering.errors import ArgumentTypeError


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Config:
    tile: int = 128
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class OtherConfig:
    tile: int = 128
    colour: Colour = Colour.RED


@dataclass
class Thawed:
    tile: int = 128


OFFSET = 3


def add_offset(value):
    return value + OFFSET


def twice(value):
    return add_offset(add_offset(value))


def text(value) -> str:
    return Canonicalizer().text("x", value)


def adder(amount):
    def add(value):
        return value + amount

    return add


def defaulted(amount):
    def add(value, by=amount):
        return value + by

    return add


DISTINCT = [
    None,
    1,
    True,
    1.0,
    "1",
    b"1",
    0.1,
    (1, 2),
    ((1,), 2),
    (),
    Colour.RED,
    Colour.BLUE,
    Config(),
    Config(tile=64),
    Config(tile=True),
    Config(colour=Colour.BLUE),
    OtherConfig(),
    Config,
    int,
    adder(1),
    adder(2),
    adder(True),
    defaulted(1),
    defaulted(2),
    twice,
    add_offset,
    functools.partial(add_offset, 1),
    functools.partial(add_offset, 2),
    Config().__eq__,
    math.sqrt,
    math,
    frozenset({1, 2}),
    frozenset({1}),
    lambda v: v + 1, lambda v: v + 2,
]  # fmt: skip


def test_different_values_have_different_text():
    for (i, a), (j, b) in itertools.combinations(enumerate(map(text, DISTINCT)), 2):
        assert a != b, (DISTINCT[i], DISTINCT[j], a)


def test_equal_values_have_equal_text():
    assert text(Config(tile=64)) == text(Config(64, Colour.RED))
    assert text(adder(7)) == text(adder(7))
    assert text(frozenset("abc")) == text(frozenset("cba"))
    assert text(0.1 + 0.2) == text(0.30000000000000004)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "'x'.*list"),
        ({"a": 1}, "'x'.*dict"),
        (Thawed(), "'x'.*Thawed must be frozen"),
        ((1, [2]), r"'x\[1\]'.*list"),
        (adder([1]), r"'x\.amount'.*list"),
        (object(), "'x'.*object"),
    ],
)
def test_values_that_cannot_be_keys(value, message):
    with pytest.raises(ArgumentTypeError, match=message):
        text(value)


def test_recursion_ends():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert text(even) != text(odd)


def test_a_global_that_a_function_reads_is_part_of_it(monkeypatch):
    before = text(twice)
    monkeypatch.setitem(globals(), "OFFSET", 4)
    assert text(twice) != before


def test_functions_without_source_are_told_apart_by_their_code():
    def make(body):
        scope: dict = {"__name__": "__main__"}
        exec(f"def f(v):\n    return {body}", scope)
        return scope["f"]

    assert text(make("v + 1")) == text(make("v + 1"))
    assert text(make("v + 1")) != text(make("v + 2"))
    assert text(make("v + 1")) != text(make("v - 1"))


def test_an_edited_helper_of_another_module_changes_the_text(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    helper = tmp_path / "constants_helper.py"
    user = tmp_path / "constants_user.py"
    helper.write_text("def f(v):\n    return v + 1\n")
    user.write_text("import constants_helper\n\n\ndef g(v):\n    return constants_helper.f(v)\n")
    before = text(importlib.import_module("constants_user").g)
    assert before == text(importlib.import_module("constants_user").g)
    helper.write_text("def f(v):\n    return v + 22\n")
    assert text(importlib.import_module("constants_user").g) != before
    for name in ("constants_helper", "constants_user"):
        del sys.modules[name]
