"""Checks of options: what counts as a bool, an int, a number, and that errors name the argument."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy
import pytest
import torch

from kernels_dsl.checks import options


@pytest.mark.parametrize("value", [0, 1, 1.0, "no", None, torch.tensor(True), [], numpy.bool_(True)])
def test_only_a_bool_is_a_bool(value):
    with pytest.raises(TypeError, match=r"causal is .*, must be True or False"):
        options.boolean("causal", value)


def test_values_that_fit_come_back():
    assert options.boolean("causal", True) is True
    assert options.integer("k", 3, least=0, most=3) == 3
    assert type(options.integer("k", numpy.int32(3))) is int
    assert options.real("scale", 2, least=2) == 2
    assert options.real("scale", numpy.float32(0.5)) == options.real("scale", Fraction(1, 2)) == 0.5
    assert options.text("name", "x") == "x"
    assert options.one_of("family", None, (None, "sm90")) is None
    assert options.instance("config", 3, str, int) == 3


@pytest.mark.parametrize("value", [True, 3.0, "3", None, torch.tensor(3), numpy.float32(3), [3]])
def test_only_an_integer_is_an_integer(value):
    with pytest.raises(TypeError, match=r"k is .*, must be an int"):
        options.integer("k", value)


@pytest.mark.parametrize(
    ("value", "bounds", "wanted"),
    [
        (-1, {"least": 0}, "at least 0"),
        (4, {"most": 3}, "at most 3"),
        (4, {"least": 0, "most": 3}, "from 0 to 3"),
    ],
)
def test_integers_out_of_range(value, bounds, wanted):
    with pytest.raises(ValueError, match=f"k is {value}, must be {wanted}"):
        options.integer("k", value, **bounds)


@pytest.mark.parametrize("value", [True, "1", None, torch.tensor(1.0), 1j, [1.0]])
def test_only_a_number_is_a_number(value):
    with pytest.raises(TypeError, match=r"scale is .*, must be a Python number"):
        options.real("scale", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, 1e39, 0.0, numpy.float32("nan")])
def test_numbers_out_of_range(value):
    with pytest.raises(ValueError, match=r"scale is .*, must be greater than 0 and finite in float32"):
        options.real("scale", value, above=0)
    with pytest.raises(ValueError, match="softcap is -1, must be at least 0 and finite in float32"):
        options.real("softcap", -1, least=0)


def test_texts_choices_and_types():
    with pytest.raises(TypeError, match="name is 5, must be a str"):
        options.text("name", 5)
    with pytest.raises(ValueError, match="name is '', must not be empty"):
        options.text("name", "")
    with pytest.raises(ValueError, match="family is 'sm70', must be None or 'sm90'"):
        options.one_of("family", "sm70", (None, "sm90"))
    with pytest.raises(TypeError, match="family is a list, must be None or 'sm90'"):
        options.one_of("family", ["sm90"], (None, "sm90"))
    with pytest.raises(TypeError, match="out is a tuple, must be None or Tensor"):
        options.instance("out", (1, 2), type(None), torch.Tensor)


def test_symbolic_numbers_pass_under_compile():
    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def used(x, scale):
        options.boolean("causal", x.shape[0] > 2)
        return x * options.integer("k", x.shape[0], least=0) * options.real("scale", scale, above=0)

    for size in (3, 5):
        assert torch.equal(used(torch.ones(size), size / 2), torch.full((size,), size * size / 2))
