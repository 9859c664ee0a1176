"""The SM80-class GEMM on fp8 operands, run on the CPU from its PTX for sm_89."""

from __future__ import annotations

import pytest
import torch

from lowering import emulator
from tests.kernels.gemm import scaled_gemm_sm80_cases as cases

Case = cases.Case


@pytest.mark.parametrize("case", cases.EXACT, ids=str)
def test_integers_match_bit_for_bit(case: Case) -> None:
    with emulator.run(arch="sm_89"):
        cases.run(case, device="cpu", exact=True)


@pytest.mark.parametrize("case", cases.NORMAL, ids=str)
def test_normal_values_are_within_twice_the_error_of_float32(case: Case) -> None:
    with emulator.run(arch="sm_89"):
        cases.run(case, device="cpu", exact=False)


@pytest.mark.parametrize("fast", [True, False])
def test_no_bank_conflicts(fast: bool) -> None:
    """float32 output, because the 16-byte stores of 16-bit outputs read the staged tile in two passes."""
    kinds = ("row", "row") if fast else ("1x128", "128x128")
    case = Case(64, 64, 256, d_dtype=torch.float32, scale_a=kinds[0], scale_b=kinds[1], fast=fast)
    with emulator.run(arch="sm_89") as session:
        cases.run(case, device="cpu", exact=True)
    assert session.stats.total["bank_conflicts"] == 0
    assert session.stats.total["matrix_flops"] == 2 * 64 * 64 * 256


def test_a_group_of_one_scale_does_not_touch_the_next() -> None:
    """NaN scales of one group of K and one row spoil that row alone; zero scales give zeros."""
    a, b = torch.ones(1, 64, 256).to(cases.E4M3), torch.ones(1, 64, 256).to(cases.E4M3)
    scale_a = torch.ones(1, 2, 64).mT
    scale_a[0, 5, 1], scale_a[0, 7] = float("nan"), 0.0
    d = torch.full((1, 64, 64), float("inf"))
    with emulator.run(arch="sm_89"):
        cases.launch(Case(64, 64, 256), a, b, d, scale_a, torch.full((1, 1, 2), 0.5))
    assert bool(d[0, 5].isnan().all()) and bool((d[0, 7] == 0).all())
    d[0, 5], d[0, 7] = 128.0, 128.0
    assert bool((d == 128.0).all())


def test_nan_and_infinity_of_values_reach_their_row_alone() -> None:
    a = torch.ones(1, 64, 128)
    a[0, 3, 70], a[0, 9, 1] = float("nan"), float("inf")
    b, d = torch.ones(1, 64, 128).to(cases.E4M3), torch.empty(1, 64, 64)
    with emulator.run(arch="sm_89"):
        cases.launch(Case(64, 64, 128), a.to(cases.E5M2), b, d, torch.ones(1, 1, 64).mT, torch.ones(1, 1, 1))
    assert bool(d[0, 3].isnan().all()) and bool(d[0, 9].isinf().all())
    d[0, 3], d[0, 9] = 128.0, 128.0
    assert bool((d == 128.0).all())
