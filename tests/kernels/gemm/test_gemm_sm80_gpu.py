"""The SM80-class GEMM run on a GPU, whatever its architecture: bit for bit on integers, else by the rule."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gemm import gemm_sm80_cases as cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases.EXACT, ids=str)
def test_integers_match_bit_for_bit(case: cases.Case) -> None:
    cases.run(case, device="cuda", exact=True)


@pytest.mark.parametrize("case", cases.NORMAL, ids=str)
def test_normal_values_are_within_twice_the_error_of_pytorch(case: cases.Case) -> None:
    cases.run(case, device="cuda", exact=False)


def test_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    """Rows of A and of D that begin beyond 2**31 elements, in a buffer that only they touch."""
    rows, k, n = 3, 64, 72
    gap = (1 << 31) // (rows - 1) + 8
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * (rows * gap * 2) + (1 << 30):
        pytest.skip(f"needs {4 * rows * gap >> 30} GiB of GPU memory, {free >> 30} GiB are free")
    a_buffer = torch.full((rows * gap,), float("nan"), dtype=torch.bfloat16, device="cuda")
    d_buffer = torch.full((rows * gap,), float("nan"), dtype=torch.bfloat16, device="cuda")
    a = a_buffer.as_strided((1, rows, k), (0, gap, 1))
    d = d_buffer.as_strided((1, rows, n), (0, gap, 1))
    a.copy_(torch.arange(rows * k, device="cuda").reshape(1, rows, k) % 7 - 3)
    b = (torch.arange(n * k, device="cuda").reshape(1, n, k) % 5 - 2).to(torch.bfloat16)
    cases.launch(cases.Case(rows, n, k), a, b, d, ())
    assert torch.equal(d, (a.float() @ b.float().mT).to(torch.bfloat16))
    assert int(d_buffer.isnan().sum()) == d_buffer.numel() - d.numel()


def test_the_same_call_gives_the_same_bits() -> None:
    """No atomics and no race: repeated calls agree exactly."""
    generator = torch.Generator("cuda").manual_seed(7)
    a, b = (torch.randn(1, 515, 771, generator=generator, device="cuda").bfloat16() for _ in range(2))
    case = cases.Case(515, 515, 771)
    first = torch.empty(1, 515, 515, dtype=torch.bfloat16, device="cuda")
    cases.launch(case, a, b, first, ())
    for _ in range(20):
        again = torch.full_like(first, float("nan"))
        cases.launch(case, a, b, again, ())
        assert torch.equal(first, again)
