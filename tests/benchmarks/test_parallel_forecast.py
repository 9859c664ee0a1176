"""The forecast for several GPUs: the page is what the program prints, and its parts are as stated."""

from __future__ import annotations

import pytest

from benchmarks import parallel_forecast as forecast


def test_the_page_is_what_the_program_prints():
    assert forecast.PAGE.read_text() == forecast.page(), "python -m benchmarks.parallel_forecast --write"


def test_bytes_and_operations():
    shape = forecast.Shape(rows=1024, heads=4, kv_heads=2, dim=64)
    assert shape.kv_bytes == 1024 * 2 * 64 * 2 * 2
    assert shape.operations(False) == 4 * 1024**2 / 2 * 4 * 64
    assert shape.operations(True) == 2.5 * shape.operations(False)
    assert forecast.Layer(hidden=4, kv_width=2, inner=8).parameters == 4 * 4 * 2 + 2 * 4 * 2 + 3 * 4 * 8


@pytest.mark.parametrize(("ranks", "rate"), [(2, 450e9), (8, 450e9), (16, 50e9)])
def test_the_slowest_link_counts(ranks, rate):
    assert forecast.link(ranks) == rate
