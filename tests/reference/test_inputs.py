"""Inputs follow from their seed, and integer inputs make sums that are exact in any order."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from reference import inputs


@pytest.mark.parametrize("make", [inputs.normal, inputs.outliers, inputs.integers])
def test_the_seed_decides(make):
    first = make((20, 30), torch.bfloat16, seed=5)
    assert torch.equal(first, make((20, 30), torch.bfloat16, seed=5))
    assert not torch.equal(first, make((20, 30), torch.bfloat16, seed=6))
    assert first.dtype == torch.bfloat16
    assert first.shape == (20, 30)


def test_case_seed_is_the_same_in_another_process():
    code = "from reference.inputs import case_seed; print(case_seed('gemm', 3, (4, None)))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == inputs.case_seed("gemm", 3, (4, None))
    assert inputs.case_seed("gemm", 3) != inputs.case_seed("gemm", 4)


def test_integers_are_mostly_zeros_and_within_the_limit():
    values = inputs.integers((200, 200), torch.float16, seed=1, limit=3)
    assert 0.70 < float((values == 0).float().mean()) < 0.80
    assert set(values.unique().tolist()) == {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0}


def test_integer_sums_are_exact_in_any_order():
    a = inputs.integers((40, 5000), torch.bfloat16, seed=2)
    b = inputs.integers((5000, 30), torch.bfloat16, seed=3)
    inputs.assert_exact_sums(a, b)
    exact = a.double() @ b.double()
    order = torch.randperm(5000)
    assert torch.equal((a.float() @ b.float()).double(), exact)
    assert torch.equal((a[:, order].float() @ b[order].float()).double(), exact)


def test_inexact_operands_are_refused():
    ones = torch.ones(2, 4)
    with pytest.raises(ValueError, match="b holds values that are not integers"):
        inputs.assert_exact_sums(ones, ones.t() * 0.5)
    with pytest.raises(ValueError, match="below 2²⁴"):
        inputs.assert_exact_sums(ones * 4096, ones.t() * 4096)
    with pytest.raises(ValueError, match="limit is 0"):
        inputs.integers((2, 2), torch.float32, seed=0, limit=0)


def test_outliers_are_few_and_large():
    values = inputs.outliers((1000, 100), torch.float32, seed=4, fraction=1e-2, scale=100.0)
    large = (values.abs() > 10).float().mean()
    assert 0.005 < float(large) < 0.012
