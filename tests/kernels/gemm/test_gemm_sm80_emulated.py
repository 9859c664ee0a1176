"""The SM80-class GEMM run on the CPU from its PTX: bit for bit, no race, no stray access, no bank conflict.

A sample of what `test_gemm_sm80_gpu` runs on a GPU: one case for each thing that can be got wrong.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.config.gemm import Sm80GemmConfig
from lowering import emulator
from tests.kernels.gemm import gemm_sm80_cases as cases

Case = cases.Case
F32, F16 = torch.float32, torch.float16
EVERYTHING = LinearEpilogue(alpha=True, beta=True, bias=True, residual=True, activation="relu")

EXACT = [
    Case(64, 64, 224),  # every stage of the pipeline is used more than once
    Case(97, 61, 0),
    Case(1, 1, 1),
    Case(65, 3, 33, a_k_major=False, b_k_major=False),
    Case(200, 90, 70),  # a raster of tiles
    Case(70, 67, 45, a_pad=3, b_pad=3, d_pad=5),  # rows that end within a vector
    Case(69, 67, 45, a_k_major=False, b_k_major=False, a_pad=3, b_pad=5),
    Case(72, 72, 40, a_pad=4, b_offset=2),
    Case(72, 72, 40, a_k_major=False, a_pad=1, b_offset=1, d_offset=1),
    Case(70, 50, 40, strided=True, d_n_major=False),
    Case(70, 40, 50, l=3, a_batched=False, dtype=F16, d_dtype=F32),
    Case(80, 72, 56, dtype=F32, d_dtype=F32),
    Case(80, 72, 56, dtype=F32, a_k_major=False, b_k_major=False),
    Case(40, 71, 300, epilogue=EVERYTHING, config=replace(cases.SMALL, split_k=5)),
    Case(70, 91, 40, l=2, epilogue=EVERYTHING, bias_mode="m", d_dtype=F32),
    Case(24, 88, 264, config=Sm80GemmConfig(16, 64, 128, 3, 1, 4)),
    Case(136, 152, 104, config=Sm80GemmConfig(128, 128, 32, 4, 2, 2), a_k_major=False),
]
NORMAL = [
    Case(70, 90, 40, epilogue=LinearEpilogue(bias=True, activation=activation))
    for activation in ("gelu", "gelu_tanh", "silu")
] + [Case(80, 72, 56, dtype=F32, d_dtype=F32)]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_integers_match_bit_for_bit(case: Case) -> None:
    with emulator.run(arch="sm_80"):
        cases.run(case, device="cpu", exact=True)


@pytest.mark.parametrize("case", NORMAL, ids=str)
def test_normal_values_are_within_twice_the_error_of_pytorch(case: Case) -> None:
    with emulator.run(arch="sm_80"):
        cases.run(case, device="cpu", exact=False)


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tile_k"), [(torch.bfloat16, 32), (torch.bfloat16, 64), (F32, 16), (F32, 32)]
)
def test_no_bank_conflicts(dtype: torch.dtype, tile_k: int, k_major: bool) -> None:
    """float32 output, because the 16-byte stores of 16-bit outputs read the staged tile in two passes."""
    config = Sm80GemmConfig(64, 64, tile_k, 3, 2, 2)
    majors = {"a_k_major": k_major, "b_k_major": k_major}
    with emulator.run(arch="sm_80") as session:
        cases.run(
            Case(64, 64, 3 * tile_k, dtype=dtype, d_dtype=F32, config=config, **majors),
            device="cpu",
            exact=True,
        )
    assert session.stats.total["bank_conflicts"] == 0
    assert session.stats.total["matrix_flops"] == 2 * 64 * 64 * 3 * tile_k


def _far_apart(rows: int, columns: int, start: int) -> torch.Tensor:
    """(1, rows, columns) integers whose rows lie 2**31 elements and more apart; memory that is not touched
    stays virtual."""
    gap = (1 << 31) // (rows - 1) + 8
    try:
        buffer = torch.empty((rows - 1) * gap + columns, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no address space for 2**31 elements: {error}")
    values = torch.arange(start, start + rows * columns).reshape(1, rows, columns) % 7 - 3
    return buffer.as_strided((1, rows, columns), (0, gap, 1)).copy_(values)


@pytest.mark.parametrize("k_major", [True, False])
def test_offsets_beyond_2_to_the_31_elements(k_major: bool) -> None:
    """Rows of A, of the residual and of D far apart; or, with M contiguous, A's columns."""
    m, n, k = (3, 72, 40) if k_major else (64, 72, 3)
    a = _far_apart(m, k, 1) if k_major else _far_apart(k, m, 1).mT
    b = (torch.arange(n * k).reshape(1, n, k) % 5 - 2).bfloat16()
    residual, d = _far_apart(m, n, 2), _far_apart(m, n, 3)
    case = Case(m, n, k, a_k_major=k_major, epilogue=LinearEpilogue(residual=True))
    with emulator.run(arch="sm_80"):
        cases.launch(case, a, b, d, (cases.kernel_view(residual),))
    assert torch.equal(d, (a.float() @ b.float().mT + residual.float()).bfloat16())
