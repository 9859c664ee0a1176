"""Launches of the SM80-class block-sparse kernels that would have more CTAs than CUDA takes are refused."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.ops.bsr.bsr import bsr_gemm, bsr_supports
from kernels_dsl.ops.bsr.sampled import bsr_sddmm
from kernels_dsl.sparse.tensor import BsrTensor
from lowering import emulator

MATRIX = BsrTensor.from_dense(torch.ones(32, 48).bfloat16(), torch.ones(2, 3, dtype=torch.bool), (16, 16))
ONE = torch.ones(()).bfloat16()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((48, 128 * 65535 + 1), "b has 655.. tiles along its dense mode, must have 65535 at most"),
        ((65536, 48, 8), "b has 65536 matrices, must have 65535 at most"),
    ],
)
def test_products(shape, words):
    dense = ONE.expand(shape)
    with emulator.run(arch="sm_89"):
        reason = bsr_supports(MATRIX, dense)
        assert reason is not None
        with pytest.raises(ValueError, match=words):
            bsr_gemm(MATRIX, dense)
    with emulator.run(arch="sm_90a"):
        assert bsr_supports(MATRIX, dense) is None  # one row of persistent CTAs
        assert bsr_supports(MATRIX, dense, family="sm80") == reason


def test_sampled_products():
    with emulator.run(arch="sm_89"), pytest.raises(ValueError, match="a has 65536 matrices, must have 65535"):
        bsr_sddmm(ONE.expand(65536, 32, 8), ONE.expand(8, 48), MATRIX)
