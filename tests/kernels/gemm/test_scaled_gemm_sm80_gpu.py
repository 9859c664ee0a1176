"""The SM80-class GEMM on fp8 operands, run on a GPU of compute capability 8.9 or later."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gemm import scaled_gemm_sm80_cases as cases

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("mma.sync of fp8 needs compute capability 8.9")


@pytest.mark.parametrize("case", cases.EXACT, ids=str)
def test_integers_match_bit_for_bit(case: cases.Case) -> None:
    cases.run(case, device="cuda", exact=True)


@pytest.mark.parametrize("case", cases.NORMAL, ids=str)
def test_normal_values_are_within_twice_the_error_of_float32(case: cases.Case) -> None:
    cases.run(case, device="cuda", exact=False)
