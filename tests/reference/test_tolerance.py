"""The tolerance rule accepts what rounds as PyTorch does and rejects a single wrong tile."""

from __future__ import annotations

import pytest
import torch

from reference import gemm as reference_gemm
from reference import inputs
from reference.tolerance import ToleranceError, check, check_exact, measure

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _case(dtype, seed, m=150, n=200, k=300):
    a = inputs.normal((m, k), dtype, seed=seed)
    b = inputs.normal((k, n), dtype, seed=seed + 1)
    exact = reference_gemm.gemm(a, b)
    return exact, reference_gemm.gemm_same_dtype(a, b, tf32=False), exact.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_correctly_rounded_result_and_the_peer_itself_pass(dtype, seed):
    exact, peer, rounded = _case(dtype, seed)
    assert check(rounded, exact, peer).ok
    assert check(peer, exact, peer).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_fails_and_is_named(dtype, seed):
    exact, peer, rounded = _case(dtype, seed)
    rounded[70, 131] += 3.0
    with pytest.raises(ToleranceError, match=r"1 of 12 tiles.*worst at \(70, 131\)"):
        check(rounded, exact, peer)


def test_one_wrong_element_in_a_batch_is_named(seed):
    exact = torch.randn(3, 100, 70, dtype=torch.float64)
    actual = exact.float()
    actual[2, 99, 69] += 1e-3
    with pytest.raises(ToleranceError, match=r"worst at \(2, 99, 69\)"):
        check(actual, exact, exact.float())


def test_twice_the_peers_error_is_the_limit(seed):
    exact = torch.randn(64, 64, dtype=torch.float64) + 8.0
    noise = torch.rand(64, 64, dtype=torch.float64) - 0.5
    peer = exact + noise
    actual = lambda factor: (exact + factor * noise).float()  # noqa: E731
    assert measure(actual(1.9), exact, peer).ok
    assert not measure(actual(2.1), exact, peer).ok


def test_floor_is_one_ulp_where_the_peer_is_exact(seed):
    exact = torch.full((64, 64), 1.5, dtype=torch.float64)
    actual = exact.to(torch.bfloat16)
    step = 2.0**-7
    actual[3, 4] += step
    assert measure(actual, exact, exact).ok
    actual[3, 4] += step
    report = measure(actual, exact, exact)
    assert not report.ok
    assert report.worst == (3, 4)


def test_precision_lost_everywhere_fails(seed):
    exact, peer, _ = _case(torch.float32, seed)
    assert not measure(exact.to(torch.bfloat16).float(), exact, peer).ok


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_output_fails(value, seed):
    exact, peer, rounded = _case(torch.bfloat16, seed)
    rounded[1, 2] = value
    with pytest.raises(ToleranceError, match=r"finite; the first is at \(1, 2\)"):
        check(rounded, exact, peer)


def test_overflow_of_the_output_dtype_must_be_infinite_too(seed):
    exact = torch.full((8, 8), 1e6, dtype=torch.float64)
    peer = exact.to(torch.float16)
    assert check(peer, exact, peer).ok
    with pytest.raises(ToleranceError):
        check(torch.full((8, 8), 65504.0, dtype=torch.float16), exact, peer)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one shape"):
        check(torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3), (1, 1), (1, 500), (7,)])
def test_empty_and_thin_outputs(shape, seed):
    exact = torch.randn(shape, dtype=torch.float64)
    assert check(exact.float(), exact, exact.float()).ok


def test_exact_mode(seed):
    expected = torch.randint(-9, 9, (33, 65)).double()
    actual = expected.to(torch.bfloat16)
    check_exact(actual, expected)
    actual[32, 64] += 1
    with pytest.raises(ToleranceError, match=r"1 of 2145 elements differ; the first is at \(32, 64\)"):
        check_exact(actual, expected)
