"""`gemm_reduce` through the real kernels of both families, in the emulator."""

from __future__ import annotations

import os

import pytest
import torch

from kernels_dsl import gemm_reduce
from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.blocks.reduce.reductions import ReducedEpilogue
from kernels_dsl.config.gemm import (
    PARTIALS,
    EntryLayout,
    GemmConfig,
    Schedule,
    Sm80GemmConfig,
    Sm90GemmConfig,
)
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.gemm.kernels import FUNCTIONS
from lowering import emulator
from tests.ops.gemm import reduced_cases
from tests.ops.gemm.reduced_cases import Case

ARCH = {"sm90": "sm_90a", "sm80": "sm_89"}
FP16, FP32 = torch.float16, torch.float32
PINGPONG = Schedule.PINGPONG
SM80 = Sm80GemmConfig(64, 64, 64, 3, 2, 2)
CONFIGS: list[tuple[GemmConfig, Case]] = [
    (Sm90GemmConfig(64, 64), Case(70, 100, 64, options="linear")),
    (Sm90GemmConfig(128, 96, schedule=PINGPONG), Case(150, 200, 72, "sum_squares", -2, batch=2, gap=3)),
    (Sm90GemmConfig(128, 64, cluster_n=2), Case(130, 60, 64, "max", options="gelu")),
    (Sm90GemmConfig(64, 48, split_k=2), Case(40, 80, 128, "abs_max", -2, options="linear")),
    (Sm90GemmConfig(64, 64), Case(33, 50, 40, "sum", -2, out_dtype=FP32, columns=True)),
    (SM80, Case(70, 100, 64, "sum_squares", options="linear gelu")),
    (Sm80GemmConfig(64, 32, 32, 3, 2, 2), Case(150, 50, 40, "sum", -2, FP16, FP32, batch=2, gap=1)),
    (Sm80GemmConfig(64, 64, 64, 3, 2, 2, split_k=2), Case(33, 50, 128, "max", columns=True)),
]  # fmt: skip
WIDE: list[tuple[GemmConfig, Case]] = [
    (config, case)
    for config in (
        Sm90GemmConfig(256, 128), Sm90GemmConfig(128, 256), Sm90GemmConfig(192, 176, cluster_n=2),
        Sm90GemmConfig(64, 16), Sm90GemmConfig(128, 128, stream_k=True), Sm90GemmConfig(64, 64, turned=True),
        Sm90GemmConfig(128, 64, cluster_k=2),
        Sm80GemmConfig(128, 128, 32, 4, 2, 4), Sm80GemmConfig(16, 64, 64, 4, 1, 4, 8, 1, 4, 4),
        Sm80GemmConfig(64, 96, 64, 3, 2, 2, split_k=2),
    )
    for case in (
        Case(300, 402, 256, options="linear"), Case(300, 402, 256, "sum_squares", -2),
        Case(300, 402, 256, "abs_max", -2, columns=True),
        Case(300, 402, 256, "max", dtype=FP32, out_dtype=FP32, batch=2),
    )
]  # fmt: skip


def _run(config: GemmConfig, case: Case) -> torch.Tensor:
    with emulator.run(arch=ARCH[config.family]) as session:
        found = reduced_cases.run(case, "cpu", config=config)
    assert not session.reports
    return found


@pytest.mark.parametrize(("config", "case"), CONFIGS, ids=str)
def test_both_outputs(config: GemmConfig, case: Case) -> None:
    _run(config, case)


@pytest.mark.skipif(not os.environ.get("TEST_ALL_KERNELS"), reason="TEST_ALL_KERNELS=1 runs more tiles")
@pytest.mark.parametrize(("config", "case"), WIDE, ids=str)
def test_other_tiles(config: GemmConfig, case: Case) -> None:
    _run(config, case)


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize(("name", "dim"), [("max", -1), ("abs_max", -2)])
def test_nan_and_infinity(family: str, name: str, dim: int) -> None:
    """NaN spoils its own line alone; a maximum of infinities alone is one."""
    a, b = torch.ones(40, 32, dtype=torch.bfloat16), torch.ones(32, 48, dtype=torch.bfloat16)
    bias = torch.zeros(48)
    bias[7] = float("nan") if dim == -2 else -float("inf")
    c = torch.zeros(40, 1, dtype=torch.bfloat16)
    c[5] = float("nan") if dim == -1 else 0.0
    with emulator.run(arch=ARCH[family]) as session:
        found = gemm_reduce(a, b, reduce=name, dim=dim, c=c, bias=bias, family=family)
    assert not session.reports
    expected = torch.full((40 if dim == -1 else 48,), 32.0)
    expected[5 if dim == -1 else 7] = float("nan")
    assert torch.equal(found.reduced.nan_to_num(-1), expected.nan_to_num(-1))


def test_many_parts_are_combined_in_two_steps() -> None:
    """16 rows a part: 4112 rows make 257 of a column, one more than a CTA combines."""
    a = (torch.arange(4112) % 5 - 2).to(torch.bfloat16)[:, None].expand(4112, 16).contiguous()
    b = (torch.arange(16) % 3 - 1).to(torch.bfloat16).repeat(16, 1)
    config = Sm90GemmConfig(256, 16)
    with emulator.run(arch="sm_90a", sms=2) as session:
        found = gemm_reduce(a, b, reduce="sum_squares", dim=-2, config=config)
    assert len(session.launches) == 3
    assert torch.equal(found.reduced, (a.float() @ b.float()).square().sum(0))  # exact: small integers


def test_the_largest_tiles_do_not_spill() -> None:
    d = torch.empty((512, 512), dtype=torch.bfloat16, device="meta")
    partials = torch.empty((1, 32, 512), device="meta")
    for over in ("n", "m"):
        compiled = FUNCTIONS["sm90"].compile(
            d, d.t(), d, (partials,), DEVICES_BY_ARCH["sm_90a"].sm_count, arch="sm_90a",
            config=Sm90GemmConfig(128, 256, cluster_m=2), layout=EntryLayout((PARTIALS,)),
            epilogue=ReducedEpilogue(LinearEpilogue(), "sum_squares", over),
        )  # fmt: skip
        (entry,) = compiled.resources()
        assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0
        assert entry.count("UTMASTG") and entry.count("STSM")
