"""`gemm_gated` through the real kernels of both families, in the emulator."""

from __future__ import annotations

import os

import pytest
import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.blocks.epilogue.gates import GATES, GatedEpilogue
from kernels_dsl.config.budget import accumulator_registers, why_not
from kernels_dsl.config.gemm import (
    WRITTEN,
    EntryLayout,
    GemmConfig,
    Schedule,
    Sm80GemmConfig,
    Sm90GemmConfig,
)
from kernels_dsl.config.gemm_table import SM90_CANDIDATES
from kernels_dsl.config.problem import H200, GemmProblem
from kernels_dsl.ops.gemm.kernels import FUNCTIONS
from lowering import emulator
from tests.ops.gemm import gated_cases
from tests.ops.gemm.gated_cases import Case, Place

ARCH = {"sm90": "sm_90a", "sm80": "sm_89"}
PINGPONG = Schedule.PINGPONG
SM80 = Sm80GemmConfig(64, 64, 64, 3, 2, 2)
FP16, FP32 = torch.float16, torch.float32
CONFIGS: list[tuple[GemmConfig, Case]] = [
    (Sm90GemmConfig(64, 64), Case(70, 96, 64, Place(), linear=True)),
    (Sm90GemmConfig(128, 96, schedule=PINGPONG), Case(130, 112, 72, batch=2)),  # subtiles of 16 columns
    (Sm90GemmConfig(128, 128, cluster_m=2), Case(200, 144, 64, Place(pad=8), Place(pad=16))),
    (Sm90GemmConfig(64, 48, split_k=2), Case(40, 80, 128, Place())),
    (Sm90GemmConfig(64, 64), Case(33, 50, 40, Place(offset=1), linear=True)),  # stored by threads
    (Sm90GemmConfig(64, 32), Case(20, 64, 32, Place(), dtype=FP32, out_dtype=FP32, activation="geglu")),
    (SM80, Case(70, 96, 64, Place(), linear=True)),
    (SM80, Case(33, 50, 40, Place(offset=1), Place(-2), dtype=FP16, out_dtype=FP32, batch=2)),
    (Sm80GemmConfig(64, 64, 64, 3, 2, 2, split_k=2), Case(33, 48, 128, Place())),
]
WIDE: list[tuple[GemmConfig, Case]] = [
    (Sm90GemmConfig(256, 128), Case(300, 272, 128, Place())),
    (Sm90GemmConfig(192, 176, cluster_n=2), Case(200, 400, 64, Place(), activation="reglu")),
    (Sm90GemmConfig(128, 144, cluster_m=2, schedule=PINGPONG), Case(257, 304, 64, Place())),
    (Sm90GemmConfig(64, 16), Case(64, 48, 64, Place())),
    (Sm90GemmConfig(64, 16), Case(64, 48, 64, Place(), dtype=FP32, out_dtype=FP32)),
    (Sm90GemmConfig(128, 256), Case(128, 512, 256)),
    (Sm90GemmConfig(128, 128, stream_k=True), Case(256, 384, 512, Place())),
    (Sm90GemmConfig(128, 128, cluster_k=2), Case(256, 384, 512, Place())),
    (Sm90GemmConfig(64, 64), Case(64, 96, 64, Place(-2), Place(-2), batch=2)),
    (Sm90GemmConfig(64, 64), Case(64, 96, 64, Place(), Place(offset=4))),
    (Sm90GemmConfig(64, 48, split_k=2), Case(40, 90, 128, Place(offset=1), linear=True)),
    *((Sm90GemmConfig(64, 64), Case(40, 64, 64, activation=name)) for name in GATES),
    *((SM80, Case(40, 64, 64, Place(-2), activation=name)) for name in GATES),
    (Sm80GemmConfig(128, 128, 32, 4, 2, 4), Case(130, 270, 64, Place(pad=2), Place(pad=1))),
    (Sm80GemmConfig(16, 64, 64, 4, 1, 4, 8, 1, 4, 4), Case(5, 66, 130, Place(), batch=3)),
]


def _run(config: GemmConfig, case: Case) -> None:
    with emulator.run(arch=ARCH[config.family]) as session:
        gated_cases.run(case, "cpu", config=config)
    assert not session.reports


@pytest.mark.parametrize(("config", "case"), CONFIGS, ids=str)
def test_both_outputs(config: GemmConfig, case: Case) -> None:
    _run(config, case)


@pytest.mark.skipif(not os.environ.get("TEST_ALL_KERNELS"), reason="TEST_ALL_KERNELS=1 runs more tiles")
@pytest.mark.parametrize(("config", "case"), WIDE, ids=str)
def test_other_tiles(config: GemmConfig, case: Case) -> None:
    _run(config, case)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_the_largest_tiles_do_not_spill(name: str) -> None:
    """With alpha, beta · C, bias and z kept, in the largest tile that the budget lets such a call have."""
    problem = GemmProblem(512, 512, 512, b_k_major=True, operand_bytes=2, gated=True)
    fitting = [c.config for c in SM90_CANDIDATES if why_not(c.config, problem, H200) is None]
    whole, half = (torch.empty((512, n), dtype=torch.bfloat16, device="meta") for n in (512, 256))
    inner = LinearEpilogue(alpha=True, beta=True, bias=True)
    compiled = FUNCTIONS["sm90"].compile(
        whole, whole.t(), half, (1.0, 1.0, whole, whole[0], whole), 132, arch="sm_90a",
        config=max(fitting, key=accumulator_registers), epilogue=GatedEpilogue(inner, name, preact=True),
        layout=EntryLayout(("", "", "mn", "n", WRITTEN + "mn"), gated=True),
    )  # fmt: skip
    (entry,) = compiled.resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0
    assert entry.count("UTMASTG") and entry.count("STSM")
