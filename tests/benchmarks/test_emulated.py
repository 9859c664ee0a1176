"""The benchmark and the GPU demo around their timing: kernels emulated, the clock stubbed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gemm, gemm_fused, harness
from kernels_dsl.cli import demo_gpu
from kernels_dsl.measure import Timing
from lowering import emulator


@pytest.fixture
def emulated(monkeypatch):
    """CPU tensors run in the emulator; timing calls each once and says 1 ms for ours, 2 for others."""

    def stub(calls, **_):
        for call in calls.values():
            call(0)
        return {name: Timing(1.0 if name == "ours" else 2.0, 1.0, 2.0, 1, "events") for name in calls}

    for module in (gemm, demo_gpu):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    for module in (harness, demo_gpu):
        monkeypatch.setattr(module, "interleaved", stub)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with emulator.run(arch="sm_90a", check=False):
        yield


def test_a_benchmark_case_is_verified_and_measured(emulated):
    case = gemm.case((70, 40, 96), "bf16", ["cublas"])
    row = harness.run_case(case)
    assert row.name == "70x40x96"
    assert row.flops == 2 * 70 * 40 * 96
    assert row.ratio("cublas") == 2.0


@pytest.mark.parametrize("suite", gemm_fused.SUITES)
def test_a_fused_benchmark_case_is_verified_and_measured(emulated, suite):
    row = harness.run_case(gemm_fused.MAKERS[suite]((70, 48, 96), "bf16", ["cublas"]))
    assert row.name == "70x48x96"
    assert row.best_peer == "cublas"
    assert row.ratio("cublas") == row.ratio("ours_two") == 2.0


def test_a_wrong_reduction_fails_its_benchmark(emulated, monkeypatch):
    import kernels_dsl

    gemm_reduce = kernels_dsl.gemm_reduce
    wrong = lambda *args, **options: gemm_reduce(*args, **options).reduced.mul_(1.01)  # noqa: E731
    monkeypatch.setitem(kernels_dsl.__dict__, "gemm_reduce", wrong)
    with pytest.raises(AssertionError, match="sums"):
        harness.run_case(gemm_fused.reduced_case((70, 48, 96), "bf16", ["cublas"]))


def test_a_wrong_kernel_fails_its_benchmark(emulated, monkeypatch):
    import kernels_dsl

    monkeypatch.setitem(kernels_dsl.__dict__, "gemm", lambda a, b, out: out.fill_(0.0))
    with pytest.raises(AssertionError, match=r"\(70, 40, 96\): \d+ of 2 tiles over the bound"):
        harness.run_case(gemm.case((70, 40, 96), "bf16", ["cublas"]))


@pytest.mark.parametrize(
    "problem",
    [
        demo_gpu.Problem(72, 48, 96),
        demo_gpu.Problem(40, 56, 72, dtype="float16", bias=True, activation="gelu"),
    ],
)
def test_the_demo_checks_and_compares(emulated, problem, capsys):
    assert demo_gpu.one(problem) == 2.0
    out = capsys.readouterr().out
    assert "right: rms error" in out
    assert "second call" in out


def test_the_demo_stops_at_a_wrong_result(emulated, monkeypatch):
    import kernels_dsl

    monkeypatch.setitem(kernels_dsl.__dict__, "gemm", lambda a, b, out: out.fill_(0.0))
    with pytest.raises(demo_gpu.CheckFailed, match=r"72x48x96 bfloat16: \d+ of 3456 elements are off"):
        demo_gpu.one(demo_gpu.Problem(72, 48, 96))
