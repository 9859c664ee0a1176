"""The block-sparse benchmark: our calls in the emulator, its arithmetic, its table and plot."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bsr, density_plot
from benchmarks.bsr import Shape
from benchmarks.harness import OURS
from lowering import emulator


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(bsr, "DEVICE", "cpu")
    with emulator.run(arch="sm_90a"):
        yield


def test_a_case_checks_itself(on_cpu, monkeypatch):
    monkeypatch.setattr(
        bsr, "peer_calls", lambda shape, sparse, b: {"torch": lambda i: sparse.to_dense() @ b}
    )
    case = bsr.case(Shape((32, 16), 2, (3, 4), 24), ("torch", "sm80", "bmm"))
    assert sorted(case.calls) == [OURS, "sm80", "torch"]
    assert case.flops == 2 * 3 * 2 * 32 * 16 * 24 and case.name == "32x16, 2 of 4, N 24"
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.float() @ b.float())  # torch on CPUs lacks it
    case.verify()


def test_an_fp8_case_checks_itself(on_cpu, monkeypatch):
    case = bsr.fp8_case(Shape((32, 32), 2, (2, 4), 24))
    assert sorted(case.calls) == sorted((OURS, "bf16", "dense", "dense_fp8"))
    assert case.flops == 2 * 2 * 2 * 32 * 32 * 24 and case.name == "32x32, 2 of 4, N 24"
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.float() @ b.float())  # torch on CPUs lacks it
    case.verify()


def test_a_wrong_result_is_refused(on_cpu, monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.float() @ b.float())
    sparse, b = bsr.operands(Shape((16, 16), 2, (3, 4), 24))
    with pytest.raises(AssertionError, match="off by"):
        bsr.verify(sparse, b, torch.zeros(48, 24))


def test_patterns_have_equal_work():
    for pattern, more in (("uniform", 0), ("power_law", 0), ("one_heavy_row", 64 - 5)):
        shape = Shape((16, 16), 5, (32, 64), 8, pattern)
        sparse, _ = _operands(shape)
        assert sparse.nnz == 5 * 32 + more and shape.flops == 2 * 16 * 16 * 8 * sparse.nnz


def _operands(shape):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bsr, "DEVICE", "cpu")
        return bsr.operands(shape)


def test_crossovers_and_the_plot():
    rows = [
        {"name": "10%", "16_ms": 1.0, "32_ms": 0.5, "64_ms": 0.4, "128_ms": 0.3, "dense_ms": 2.0},
        {"name": "50%", "16_ms": 3.0, "32_ms": 2.0, "64_ms": 1.5, "128_ms": 1.0, "dense_ms": 2.0},
    ]
    found = bsr.crossovers(rows)
    assert found["16_ms"] == pytest.approx(30.0) and found["32_ms"] == pytest.approx(50.0)
    assert found["64_ms"] is None and found["128_ms"] is None
    drawn = density_plot.draw([*rows, {"name": "crossover", **found}], "title", "GPU")
    assert "128×128 blocks" in drawn and "crossover" not in drawn and drawn.count("<path") == 5
