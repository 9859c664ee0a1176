"""`gemm_reduce(batch_invariant=True)`: the sum of a row has the same bits whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.ops.gemm import reduced_arguments
from lowering import emulator

N, K = 328, 40  # of three tiles, the last one partly beyond D
CONFIGS: dict[str, tuple[Any, ...]] = {
    "sm_90a": (
        Sm90GemmConfig(256, 128, cluster_n=2),
        Sm90GemmConfig(192, 128),
        Sm90GemmConfig(128, 128, schedule=Schedule.PINGPONG, epi_tma=False),
        Sm90GemmConfig(64, 128, cluster_m=2, schedule=Schedule.PINGPONG),
    ),
    "sm_80": (
        Sm80GemmConfig(256, 128, 32, 3, 4, 2),
        Sm80GemmConfig(128, 128, 32, 4, 2, 4),
        Sm80GemmConfig(64, 128, 32, 4, 2, 2),
    ),
}


def _matrices(m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, K, generator=generator).half(), torch.randn(K, N, generator=generator).half()


def _sums(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    return kernels_dsl.gemm_reduce(a, b, dim=-1, batch_invariant=True, **options).reduced


@pytest.mark.parametrize("arch", CONFIGS)
def test_all_configurations_that_are_accepted_add_in_one_order(arch: str, seed: int) -> None:
    a, b = _matrices(70, seed)
    with emulator.run(arch=arch, check=False):
        expected = _sums(a, b)
        for config in CONFIGS[arch]:
            assert torch.equal(_sums(a, b, config=config), expected), config


@pytest.mark.parametrize("arch", CONFIGS)
def test_rows_in_other_batches_and_layouts(arch: str, seed: int) -> None:
    a, b = _matrices(150, seed)
    with emulator.run(arch=arch, check=False):
        expected = _sums(a, b)
        for m in (1, 20, 70):
            assert torch.equal(_sums(a[40 : 40 + m].clone(), b), expected[40 : 40 + m]), m
        columns, out = a.mT.contiguous().mT, torch.empty(N, 150, dtype=a.dtype).mT
        assert torch.equal(_sums(columns, b, out=out), expected)
        assert torch.equal(_sums(torch.stack((a[:20], a[40:60])), b)[1], expected[40:60])


def test_a_tile_of_another_width_is_refused() -> None:
    a, b = _matrices(64, 0)
    with emulator.run(arch="sm_90a"):
        for config, words in (
            (Sm90GemmConfig(64, 64), "tile_n is 64, must be 128 with batch_invariant and sums of rows"),
            (Sm90GemmConfig(64, 128, split_k=2), "split_k is 2"),
        ):
            with pytest.raises(ValueError, match=r"^config is ") as caught:
                _sums(a, b, config=config)
            assert words in str(caught.value)
        columns = {"dim": -2, "batch_invariant": True, "config": Sm90GemmConfig(64, 64)}
        assert kernels_dsl.gemm_reduce_supports(a, b, **columns) is None


def test_the_width_of_a_tile_does_not_follow_m_or_alignment() -> None:
    found = set()
    for arch in CONFIGS:
        with emulator.run(arch=arch):
            for n in (8, 72, 4096):
                b = torch.empty(1024, n, dtype=torch.float16)
                for m in (1, 33, 1000, 8192):
                    for a in (
                        torch.empty(m, 1024, dtype=b.dtype),
                        torch.empty(m, 1027, dtype=b.dtype)[:, 1:1025],
                    ):
                        call = reduced_arguments.ReducedArguments(a, b, batch_invariant=True)
                        plan = reduced_arguments.GEMM_REDUCE.plan_of(call)
                        found.add(plan.decision.config.tile_n)
    assert found == {128}
