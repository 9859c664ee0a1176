"""The yardsticks of results with few elements."""

from __future__ import annotations

import torch

from tests.fuzz.values import at_worst, scaled_draws


def test_draws_round_otherwise_and_keep_equal_elements_equal():
    row = torch.randn(1, 8, dtype=torch.float16)
    a = row.expand(4, 8)
    draws = list(scaled_draws({"a": a, "alpha": 2.0}, {"index": torch.arange(3)}))
    assert len({tuple(group["a"][0].tolist()) for group, _ in draws}) > 8
    for group, others in draws:
        assert group["a"].dtype == a.dtype and group["alpha"] == 2.0
        assert (group["a"] == group["a"][:1]).all()
        assert torch.equal(others["index"], torch.arange(3))


def test_the_larger_error_is_what_is_to_be_expected():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    peer, error = torch.tensor([1.5, 2.0]), torch.tensor([0.25, 0.25], dtype=torch.float64)
    assert at_worst(exact, peer, error).tolist() == [1.5, 2.25]
