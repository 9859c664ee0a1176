"""Block-sparse products of fp8 factors on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ops.bsr.bsr_scaled_cases import CASES, E4M3, E5M2, Case, run

pytestmark = pytest.mark.gpu

LARGE = [
    Case("power_law", (16, 20), (128, 128), 1000, kept=6, rows=True),
    Case("power_law", (40, 30), (64, 64), 520, form="b at", kept=6, dtypes=(E5M2, E4M3), linear=True),
    Case("one_heavy_row", (60, 70), (32, 32), 300, kept=9, rows=True, out_dtype=torch.float32),
    Case("uniform", (5, 4), (512, 256), 264, kept=2),
    Case("uniform", (16, 16), (128, 128), 512, kept=8, rows=True, exact=False),
]


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fp8 blocks need compute capability 9.0")


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_against_float64(case: Case) -> None:
    run(case, "cuda")


@pytest.mark.parametrize("case", [case for case in CASES + LARGE if case.block_k % 32 == 0], ids=str)
def test_the_sm80_family_against_float64(case: Case) -> None:
    run(case, "cuda", family="sm80")


def test_the_same_call_gives_the_same_bits() -> None:
    """Clusters take other work items from run to run; the result stays the same."""
    from kernels_dsl.ops.bsr.scaled import bsr_scaled_gemm
    from kernels_dsl.sparse.tensor import BsrTensor

    generator = torch.Generator("cuda").manual_seed(5)
    dense = torch.randn(2048, 2048, generator=generator, device="cuda").bfloat16()
    w = BsrTensor.by_magnitude(dense, (64, 64), 0.3)
    w = w.with_values(w.values.to(E4M3))
    scales = torch.rand(w.nnz, generator=generator, device="cuda")
    x = torch.randn(700, 2048, generator=generator, device="cuda").to(E4M3)
    one = torch.ones((), device="cuda")
    first = bsr_scaled_gemm(x, w.t(), one, scales)
    for _ in range(20):
        assert torch.equal(first, bsr_scaled_gemm(x, w.t(), one, scales))
