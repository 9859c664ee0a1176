"""Generated cases of `gemm` through the real kernels, in the emulator: small ones, since it is slow."""

from __future__ import annotations

import gemm_cases
import pytest

from lowering import emulator

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
