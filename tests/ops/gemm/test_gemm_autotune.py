"""The autotuner on modelled kernels with modelled times, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels_dsl import autotune
from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.measure import Timing
from kernels_dsl.ops.gemm.gemm import gemm, plan_for
from lowering import cache

BF16 = torch.bfloat16


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[Path]:
    before = cache.dir()
    cache.set_dir(tmp_path)
    yield tmp_path
    cache.set_dir(before)


@pytest.fixture
def last_is_fastest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Times that fall from one candidate to the next; the list has the number of candidates of each run."""
    runs: list[int] = []

    def interleaved(calls, *, rounds):
        runs.append(len(calls))
        for call in calls.values():
            call(0)
        count = len(calls)
        return {name: Timing(count - i, 0.0, 0.0, rounds, "events") for i, name in enumerate(calls)}

    monkeypatch.setattr(autotune, "interleaved", interleaved)
    return runs


def test_the_winner_is_recorded_and_used(model_kernels, own_cache: Path, last_is_fastest) -> None:
    a, b = torch.ones(256, 512, dtype=BF16), torch.ones(512, 384, dtype=BF16)
    before = plan_for(a, b).decision.config
    results = autotune.autotune_gemm(a, b)
    assert [result.ms for result in results[:3]] == sorted(result.ms for result in results[:3])
    assert results[0].config != before and plan_for(a, b).decision.config == results[0].config
    assert (own_cache / "tuned_gemm.json").exists()
    assert 2 <= last_is_fastest[0] <= autotune.MOST_CANDIDATES
    model_kernels.launches.clear()
    gemm(a, b)
    assert model_kernels.launches[0][1]["config"] == results[0].config
    assert plan_for(torch.ones(264, 512, dtype=BF16), b).decision.config != results[0].config


def test_given_configurations_are_measured_where_they_fit(
    model_kernels, own_cache: Path, last_is_fastest
) -> None:
    a, b = torch.ones(256, 512, dtype=BF16), torch.ones(512, 384, dtype=BF16)
    wanted = [Sm90GemmConfig(128, 128), Sm90GemmConfig(256, 256), Sm90GemmConfig(64, 64)]
    results = autotune.autotune_gemm(a, b, configs=wanted, record=False)
    assert [result.config for result in results] == [wanted[2], wanted[0]]
    assert not (own_cache / "tuned_gemm.json").exists()
    with pytest.raises(ValueError, match="configs has none that fits"):
        autotune.autotune_gemm(a, b, configs=wanted[1:2])


def test_an_empty_call_has_nothing_to_tune(model_kernels, own_cache: Path) -> None:
    with pytest.raises(ValueError, match="nothing to tune"):
        autotune.autotune_gemm(torch.ones(0, 8, dtype=BF16), torch.ones(8, 8, dtype=BF16))


@pytest.mark.gpu
def test_on_a_gpu(own_cache: Path) -> None:
    a, b = torch.randn(512, 1024, device="cuda").to(BF16), torch.randn(1024, 768, device="cuda").to(BF16)
    configs = autotune.feasible(
        plan_for(a, b).decision.problem, autotune.target_of(a), plan_for(a, b).decision.family, most=4
    )
    results = autotune.autotune_gemm(a, b, configs=configs)
    assert len(results) == len(configs) and 0 < results[0].ms <= results[-1].ms
    assert plan_for(a, b).decision.config == results[0].config
    torch.testing.assert_close(gemm(a, b), a @ b)
