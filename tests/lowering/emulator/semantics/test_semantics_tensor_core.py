"""The accumulation models of the matrix instructions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from lowering.emulator.semantics import numeric, tensor_core
from lowering.emulator.semantics.tensor_core import Accumulation


def _exponent(value: Fraction) -> int:
    value, exponent = abs(value), 0
    while value >= 2:
        value, exponent = value / 2, exponent + 1
    while value < 1:
        value, exponent = value * 2, exponent - 1
    return exponent


def _cut(value: Fraction, quantum: Fraction) -> Fraction:
    steps = abs(value) / quantum
    return (steps.__floor__() * quantum) * (1 if value >= 0 else -1)


def _slow(a, b, c, model: Accumulation) -> float:
    """One element of the aligned model, in rational arithmetic."""
    total = Fraction(float(c))
    for start in range(0, len(a), model.group):
        pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b, strict=True)]
        pairs = [(x, y) for x, y in pairs[start : start + model.group] if x * y != 0]
        exponents = [_exponent(x) + _exponent(y) for x, y in pairs]
        if total:
            exponents.append(_exponent(total))
        if not exponents:
            continue
        quantum = Fraction(2) ** (max(exponents) - model.bits)
        total = sum((_cut(x * y, quantum) for x, y in pairs), _cut(total, quantum))
        if total:
            total = _cut(total, Fraction(2) ** (_exponent(total) - model.fraction))
    return float(total)


@pytest.mark.parametrize("model", [Accumulation(16, 25), Accumulation(8, 24), Accumulation(16, 13, 13)])
def test_aligned_against_rationals(model, seed):
    rng = np.random.default_rng(seed)
    a, b = (np.round(rng.standard_normal((5, 16)) * 2.0 ** rng.integers(-6, 6, (5, 16)), 3) for _ in range(2))
    a, b = (numeric.bf16_to_f32(numeric.f32_to_bf16(x)).astype(np.float64) for x in (a, b))
    a[0] = 0
    c = rng.standard_normal((5, 5)).astype(np.float32)
    got = tensor_core.multiply_add(a, b, c, "f32", accumulation=model)
    for m in range(5):
        for n in range(5):
            assert float(got[m, n]) == _slow(a[m], b[n], c[m, n], model)


def test_models_agree_on_integers_and_differ_on_random(seed):
    rng = np.random.default_rng(seed)
    model = Accumulation(8, 24)
    a, b = (rng.integers(-9, 10, (16, 32)).astype(np.float64) for _ in range(2))
    np.testing.assert_array_equal(tensor_core.multiply_add(a, b, None, "f32", accumulation=model), a @ b.T)
    x, y = (numeric.decode(numeric.encode(rng.standard_normal((16, 32)), "f16"), "f16") for _ in range(2))
    x, y = x.astype(np.float64), y.astype(np.float64)
    near = tensor_core.multiply_add(x, y, None, "f32")
    aligned = tensor_core.multiply_add(x, y, None, "f32", accumulation=model)
    assert (near != aligned).mean() > 0.3
    assert np.abs(near - aligned).max() < 1e-5


def test_infinities_and_nan_pass_through():
    a = np.array([[np.inf, 1.0], [np.nan, 1.0], [np.inf, -np.inf]])
    b = np.ones((1, 2))
    for model in (None, Accumulation(8, 24)):
        out = tensor_core.multiply_add(a, b, None, "f32", accumulation=model)
        assert out[0, 0] == np.inf
        assert out.view(np.uint32)[1:, 0].tolist() == [0x7FFFFFFF] * 2


def test_errors():
    with pytest.raises(ValueError, match="accumulator type was 'f64'"):
        tensor_core.multiply_add(np.ones((1, 1)), np.ones((1, 1)), None, "f64")
    with pytest.raises(ValueError, match="operand type was 'f8'"):
        tensor_core.storage_type("f8")
