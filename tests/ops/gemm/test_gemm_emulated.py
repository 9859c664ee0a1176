"""Generated cases of `gemm` through the real kernels, in the emulator: small ones, since it is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.gemm import GemmConfig, Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.problem import DEVICES_BY_ARCH, H200
from kernels_dsl.ops.gemm.gemm import gemm
from lowering import emulator
from reference import gemm as reference
from reference import tolerance
from reference.inputs import integers, normal
from tests.ops.gemm import gemm_cases

SMALL = 40_000  # multiply-adds
ARCH = {"sm90": "sm_90a", "sm80": "sm_89"}


def _small_cases(family: str, count: int) -> list[gemm_cases.Case]:
    cases: list[gemm_cases.Case] = []
    number = 0
    while len(cases) < count:
        case = gemm_cases.generate(number, family)
        if case.m * case.n * case.k * (case.batch or 1) <= SMALL:
            cases.append(case)
        number += 1
    return cases


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_generated_cases_in_the_emulator(family: str) -> None:
    for case in _small_cases(family, 10):
        with emulator.run(arch=ARCH[family]) as session:
            gemm_cases.run(case, "cpu")
        assert not session.reports, str(case)


TURNED = (
    Sm90GemmConfig(64, 32, turned=True),
    Sm90GemmConfig(128, 160, cluster_m=2, turned=True),
    Sm90GemmConfig(128, 64, schedule=Schedule.PINGPONG, turned=True),
    Sm90GemmConfig(128, 64, epi_tma=False, turned=True),
)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float32)],
)
@pytest.mark.parametrize("config", TURNED, ids=str)
def test_turned_tiles(config: Sm90GemmConfig, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """The kernel computes the transpose, and stores row-major D with M contiguous, clipped at its edges."""
    a, b = integers((72, 64), dtype, seed=1), integers((200, 64), dtype, seed=2).t()
    bias, residual = integers((200,), dtype, seed=3), integers((72, 200), out_dtype, seed=4)
    wide = torch.full((80, 208), float("nan"), dtype=out_dtype)
    out = wide[:72, :200]
    with emulator.run(arch="sm_90a") as session:
        gemm(a, b, config=config, bias=bias, residual=residual, out=out)
    assert not session.reports
    exact = a.double() @ b.double() + bias.double() + residual.double()
    tolerance.check_exact(out, exact.to(out_dtype))
    assert wide[72:].isnan().all() and wide[:, 200:].isnan().all()


FEW_ROWS = (
    (7, Sm90GemmConfig(64, 16, stream_k=True, l2_prefetch=True)),
    (7, Sm90GemmConfig(128, 16, stream_k=True, overlap=True)),
    (7, Sm90GemmConfig(64, 16, cluster_k=2, l2_prefetch=True)),
    (7, Sm90GemmConfig(128, 16, cluster_k=4)),
    (7, Sm90GemmConfig(64, 16, tile_k=128, l2_prefetch=True, late=True, evict_first=True)),
    (7, Sm90GemmConfig(64, 16, stages=10, l2_prefetch=True, late=True, evict_first=True)),
    (7, Sm90GemmConfig(192, 16, l2_prefetch=True, late=True, evict_first=True)),
    (40, Sm90GemmConfig(128, 48, cluster_k=2, turned=True, l2_prefetch=True)),
    (40, Sm90GemmConfig(64, 80, cluster_k=4, turned=True)),
    (40, Sm90GemmConfig(192, 48, cluster_k=3, turned=True, l2_prefetch=True)),
    (40, Sm90GemmConfig(64, 48, cluster_k=2, turned=True, overlap=True)),
    (40, Sm90GemmConfig(64, 48, turned=True, l2_prefetch=True, late=True, evict_first=True)),
    (40, Sm90GemmConfig(128, 48, cluster_m=2, turned=True, evict_first=True)),
    (40, Sm90GemmConfig(64, 48, split_k=2, turned=True)),
    (40, Sm90GemmConfig(64, 48, turned=True, l2_prefetch=True, overlap=True)),
    (40, Sm90GemmConfig(64, 48, cluster_m=2, stream_k=True, turned=True, l2_prefetch=True)),
    (70, Sm90GemmConfig(64, 72, cluster_k=3, turned=True)),
    (70, Sm90GemmConfig(128, 80, cluster_k=2, turned=True, l2_prefetch=True)),
    (140, Sm90GemmConfig(192, 72, cluster_k=2, turned=True)),
    (140, Sm90GemmConfig(128, 72, cluster_n=2, cluster_k=2, turned=True)),
    (40, Sm90GemmConfig(64, 40, cluster_m=2, cluster_k=2, turned=True)),
    (70, Sm90GemmConfig(128, 40, cluster_n=2, turned=True)),
    (40, Sm90GemmConfig(64, 40, stream_k=True, turned=True)),
    (40, Sm90GemmConfig(64, 40, last_m=40, l2_prefetch=True, late=True, evict_first_b=True)),
    (140, Sm90GemmConfig(128, 72, cluster_m=2, last_m=16, evict_first_b=True)),
    (101, Sm90GemmConfig(128, 56, cluster_n=2, last_n=48, turned=True, l2_prefetch=True, evict_first=True)),
    (129, Sm90GemmConfig(64, 72, cluster_n=2, cluster_k=2, last_n=64, turned=True)),
    (40, Sm90GemmConfig(128, 48, last_m=72, turned=True)),
    (70, Sm90GemmConfig(64, 40, last_n=32, stream_k=True, turned=True)),
    (101, Sm90GemmConfig(128, 56, cluster_n=2, last_n=40, turned=True)),
)
"""Of those from (70, 64x72) to (129, 64x72), five have sums in the ring; some tiles have N of 40 and 72. The
last has more rows in its last tile than are loaded for one with few."""


@pytest.mark.parametrize(("m", "config"), FEW_ROWS, ids=str)
def test_few_rows(m: int, config: Sm90GemmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's rows along the tile's M, with sums of pieces of K, in each way that they meet."""
    monkeypatch.setitem(DEVICES_BY_ARCH, "sm_90a", replace(H200, sm_count=6))
    a, b = integers((m, 328), torch.bfloat16, seed=1), integers((200, 328), torch.bfloat16, seed=2).t()
    bias = integers((200,), torch.bfloat16, seed=3)
    wide = torch.full((m + 8, 208), float("nan"), dtype=torch.bfloat16)
    with emulator.run(arch="sm_90a") as session:
        gemm(a, b, config=config, bias=bias, out=wide[:m, :200])
    assert not session.reports
    exact = a.double() @ b.double() + bias.double()
    tolerance.check_exact(wide[:m, :200], exact.to(torch.bfloat16))
    assert wide[m:].isnan().all() and wide[:, 200:].isnan().all()


PARTIAL = (
    (Sm90GemmConfig(64, 48, split_k=2), 64, 47, None),
    (Sm90GemmConfig(64, 48, split_k=2), 33, 101, 2),
    (Sm90GemmConfig(64, 128, split_k=2, cluster_m=2, schedule=Schedule.PINGPONG), 16, 1, None),
    (Sm90GemmConfig(64, 48, split_k=2, epi_tma=False), 40, 47, None),
    (Sm80GemmConfig(64, 64, 64, 3, 2, 2, split_k=2, copy_bytes_b=2), 33, 47, None),
)


@pytest.mark.parametrize(("config", "m", "n", "batch"), PARTIAL)
def test_partial_sums_of_rows_that_end_between_16_bytes(
    config: GemmConfig, m: int, n: int, batch: int | None
) -> None:
    """A TMA store ends at 16 bytes: the last row's end is memory of the call's own, too."""
    shapes = ((m, 128), (128, n)) if batch is None else ((batch, m, 128), (batch, 128, n))
    a, b = (integers(shape, torch.bfloat16, seed=i) for i, shape in enumerate(shapes))
    with emulator.run(arch=ARCH[config.family]) as session:
        found = gemm(a, b, config=config)
    assert not session.reports
    tolerance.check_exact(found, (a.double() @ b.double()).to(torch.bfloat16))


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_float32_operands_are_rounded_to_tf32(family: str) -> None:
    """The product is that of operands rounded to nearest; dropped bits would make it three times as wrong."""
    a, b = normal((33, 56), torch.float32, seed=1), normal((40, 56), torch.float32, seed=2).t()
    with emulator.run(arch=ARCH[family]):
        found = gemm(a, b, family=family)
    exact, peer = reference.gemm(a, b), reference.gemm_same_dtype(a, b)
    report = tolerance.check(found, exact, peer, factor=1.05, case=family)
    assert report.rms > 0.9 * report.peer_rms, "the operands were not rounded at all"
