"""The SM80-class GEMM on fp8 operands as compiled for sm_89, without a GPU: instructions, spills, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.budget import why_not
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.config.gemm_table import SM80_CANDIDATES, adapted
from kernels_dsl.config.problem import DEVICES_BY_ARCH, GemmProblem
from kernels_dsl.config.promotion import Promotion
from tests.kernels.gemm import scaled_gemm_sm80_cases as cases

LARGE = Sm80GemmConfig(128, 128, 128, 3, 2, 4)
E4M3, E5M2 = cases.E4M3, cases.E5M2


def _compile(config: Sm80GemmConfig, arch: str, promotion, dtypes=(E4M3, E5M2), a_row_major: bool = True):
    """Compile for 512 x 512 x 512 and bf16; without scales of blocks, scales of rows are in the epilogue."""
    a, b = (torch.empty(1, 512, 512, dtype=dtype, device="meta") for dtype in dtypes)
    d = torch.empty(1, 512, 512, dtype=torch.bfloat16, device="meta")
    scales, operands, epilogue = None, (), cases.identity
    if promotion is not None and promotion.rows_a:
        rows = (512 // promotion.rows_a, 512 // promotion.rows_b)
        scales = tuple(cases.kernel_view(torch.empty(1, 4, r, device="meta").mT) for r in rows)
    else:
        column, row = torch.empty(1, 512, 1, device="meta"), torch.empty(1, 1, 512, device="meta")
        operands = tuple(cases.kernel_view(x.expand(d.shape)) for x in (column, row))
        epilogue = cases.scale_both
    views = [cases.kernel_view(x) for x in (a if a_row_major else a.mT, b, d)]
    return cases.GEMM.compile(
        *views, scales, operands, arch=arch, config=config, epilogue=epilogue, promotion=promotion
    )


def _check(config: Sm80GemmConfig, promotion, dtypes) -> None:
    (found,) = _compile(config, "sm_89", promotion, dtypes).resources()
    assert found.stack_bytes == 0 and found.spill_loads == 0 and found.spill_stores == 0, found
    assert found.registers <= 255 and found.max_threads == config.threads
    assert found.dynamic_smem == config.smem_bytes(1) <= DEVICES_BY_ARCH["sm_89"].smem_bytes
    kind = "QMMA.16832.F32." + ".".join({E4M3: "E4M3", E5M2: "E5M2"}[dtype] for dtype in dtypes)
    products = (
        config.tile_m * config.tile_n * config.tile_k // (16 * 8 * 32 * config.warps_m * config.warps_n)
    )
    matrix = {name: count for name, count in found.instructions.items() if "MMA" in name}
    assert matrix == {kind: products}  # one K tile, and nothing else
    assert any(name.startswith("LDSM") for name in found.instructions)
    assert any(name.startswith("LDGSTS") for name in found.instructions)
    assert not any(name.startswith("F2FP") and "UNPACK" in name for name in found.instructions)


def test_promoted_sums_do_not_spill() -> None:
    """All tiles but the smallest, with the scales that take the most registers: of each row and column."""
    shipped = _shipped("sm_89", Promotion(1, 1))
    assert shipped[0] == LARGE and len(shipped) == 6
    for config in shipped[:4]:
        _check(config, Promotion(1, 1), (E4M3, E5M2))


@pytest.mark.parametrize("rows", [(0, 0), (1, 128), (128, 1), (128, 128)], ids=str)
def test_every_kind_of_scale_does_not_spill(rows: tuple[int, int]) -> None:
    _check(LARGE, Promotion(*rows), (E4M3, E4M3))


def _shipped(arch: str, promotion: Promotion | None = None) -> list[Sm80GemmConfig]:
    """The configurations that a GPU of this architecture may get."""
    problem = GemmProblem(512, 512, 512, ab_type="fp8", b_k_major=True, promotion=promotion)
    configs = [adapted(candidate.config, problem) for candidate in SM80_CANDIDATES]
    return [config for config in configs if why_not(config, problem, DEVICES_BY_ARCH[arch]) is None]


def test_shipped_configurations_do_not_spill() -> None:
    """Sums over all of K: the tiles that 16-bit operands have, with twice the elements of K; the largest."""
    shipped = _shipped("sm_89")
    assert len(shipped) == len(SM80_CANDIDATES)
    pairs = [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)]
    for config, dtypes in zip(shipped, pairs):
        _check(config, None, dtypes)


@pytest.mark.parametrize("promotion", [None, Promotion(1, 1)], ids=str)
def test_hopper_multiplies_unpacked_halves(promotion) -> None:
    """sm_90 has the instruction in PTX alone: values are widened to fp16 in registers."""
    shipped = _shipped("sm_90a", promotion)
    assert 0 < len(shipped) < len(SM80_CANDIDATES)
    (found,) = _compile(shipped[0], "sm_90a", promotion).resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0
    assert any(name.startswith("HMMA.16816.F32") for name in found.instructions)
    assert any(name.startswith("F2FP.F16.E5M2.UNPACK") for name in found.instructions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": replace(cases.SMALL, tile_k=192)}, "tile_k is 192; it must divide 128"),
        ({"dtypes": (E4M3, torch.bfloat16)}, "each one of Float8E4M3FN and Float8E5M2"),
        ({"a_row_major": False}, "8-bit operands must have K contiguous"),
    ],
    ids=["tile_k", "dtypes", "layout"],
)
def test_what_cannot_be_is_named(change: dict, message: str) -> None:
    arguments = {"config": cases.SMALL, "promotion": Promotion(1, 128), **change}
    with pytest.raises(Exception, match=message):
        _compile(arch="sm_89", **arguments)


def test_promotion_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="rows_a is 64"):
        Promotion(64, 1)
    with pytest.raises(ValueError, match="scales for one operand"):
        Promotion(1, 0)
