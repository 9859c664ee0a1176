"""`grouped_gemm` and `scaled_grouped_gemm` on a GPU: generated cases, PyTorch's beside them, and graphs.

TEST_GROUPED_CASES sets how many cases are generated (default 24).
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.gemm import Schedule, Sm90GemmConfig
from reference import tolerance
from reference.grouped import by_groups
from reference.inputs import integers, normal
from tests.ops.gemm import grouped_cases

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
E4M3 = grouped_cases.E4M3
BF16 = torch.bfloat16
CASES = int(os.environ.get("TEST_GROUPED_CASES", "24"))
LARGE = replace(
    grouped_cases.generate(0), sizes=(700, 0, 1, 1500, 64, 0, 129, 128, 333), extra=77, n=1160, k=528,
    dtypes=(BF16, BF16), kinds=None, out_dtype=torch.float32, pads=(0, 0), bias="ln", residual=True,
    activation=None, exact=True, out_contiguous=-1, out_pad=0,
)  # fmt: skip
FP8 = replace(LARGE, dtypes=(E4M3, E4M3), kinds=("row", "row"), fast=True)
BLOCKS = replace(FP8, kinds=("1x128", "128x128"))


@pytest.mark.parametrize("number", range(CASES))
def test_generated_cases(number: int) -> None:
    grouped_cases.run(grouped_cases.generate(number), "cuda")


COOPERATIVE = Schedule.COOPERATIVE
LARGE_CASES = {"bf16": LARGE, "fast": FP8, "promoted": replace(FP8, fast=False), "blocks": BLOCKS}
TILES = [
    None,
    Sm90GemmConfig(128, 256, cluster_m=2),
    Sm90GemmConfig(128, 128, cluster_n=2),
    Sm90GemmConfig(64, 256),
    Sm90GemmConfig(128, 192, schedule=Schedule.PINGPONG),
    Sm90GemmConfig(64, 128, cluster_m=2, schedule=Schedule.PINGPONG, raster_group=2, raster_along_m=False),
]


@pytest.mark.parametrize("kind", LARGE_CASES)
@pytest.mark.parametrize("config", TILES, ids=lambda c: f"{c.tile_m}x{c.tile_n}" if c else "table")
def test_large_cases_are_exact(kind: str, config: Sm90GemmConfig | None) -> None:
    case = LARGE_CASES[kind]
    if config is not None and config.schedule is Schedule.PINGPONG and kind in ("promoted", "blocks"):
        # Two sets of accumulators do not fit in the larger one, and no such sums are in turns.
        config = Sm90GemmConfig(256, 128) if config is TILES[4] else replace(config, schedule=COOPERATIVE)
    grouped_cases.run(case, "cuda", config=config)


def test_the_other_family() -> None:
    grouped_cases.run(LARGE, "cuda", family="sm80")


def _even(groups: int, rows: int) -> torch.Tensor:
    return (torch.arange(1, groups + 1, device="cuda") * rows).to(torch.int32)


def test_beside_torch() -> None:
    """At most twice PyTorch's error, with its layouts, offsets and scales."""
    groups, n, k = 4, 768, 1024
    offs = torch.tensor([256, 256, 720, 1024], dtype=torch.int32, device="cuda")
    a = normal((1024, k), BF16, seed=1, device="cuda")
    b = normal((groups, n, k), BF16, seed=2, device="cuda")
    exact = by_groups(offs, lambda g, r: a[r].double() @ b[g].double().mT)
    peer = by_groups(offs, lambda g, r: a[r] @ b[g].mT)
    tolerance.check(kernels_dsl.grouped_gemm(a, b.mT, offs), exact, peer)
    (a8, of_a), (b8, of_b) = (kernels_dsl.quantize(x, E4M3, scaling="row") for x in (a, b))
    arguments = a8, b8.mT, of_a.squeeze(-1), of_b.squeeze(-1)
    found = kernels_dsl.scaled_grouped_gemm(*arguments, offs, use_fast_accum=True)
    exact = by_groups(
        offs,
        lambda g, r: (a8[r].double() * of_a[r].double()) @ (b8[g].double() * of_b[g].double()).mT,
    )
    try:
        peer = torch._scaled_grouped_mm(*arguments, offs, out_dtype=BF16, use_fast_accum=True)
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"torch._scaled_grouped_mm: {error}")
    tolerance.check(found, exact, peer)


def test_a_graph_replays_with_other_offsets() -> None:
    """The host knows nothing of the offsets; the same bits each time; torch.compile keeps the operator."""
    groups, rows, n, k = 6, 300, 384, 256
    a = integers((groups * rows, k), BF16, seed=1, device="cuda")
    b = integers((groups, k, n), BF16, seed=2, device="cuda")
    offs = _even(groups, rows)

    def call() -> torch.Tensor:
        return kernels_dsl.grouped_gemm(a, b, offs)

    def expected() -> torch.Tensor:
        return by_groups(offs, lambda g, r: a[r].double() @ b[g].double()).to(BF16)

    first = call()
    assert torch.equal(first, expected())
    assert torch.equal(torch.compile(call, fullgraph=True)(), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for ends in ([300, 301, 301, 900, 1799, 1800], [0, 0, 0, 0, 0, 1800], [1800] * 6):
        offs.copy_(torch.tensor(ends, dtype=torch.int32))
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected())
    for _ in range(5):
        assert torch.equal(call(), captured)
