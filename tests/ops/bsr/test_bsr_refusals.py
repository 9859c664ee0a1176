"""Refusals of the builders, `BsrLinear` and `bsr_sddmm`, each with the argument's name."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.nn.bsr_linear import BsrLinear
from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.ops.bsr.sampled import bsr_sddmm
from kernels_dsl.sparse.tensor import BsrTensor

DENSE = torch.ones(32, 48).bfloat16()
MASK = torch.ones(2, 3, dtype=torch.bool)
MATRIX = BsrTensor.from_dense(DENSE, MASK, (16, 16))
PARTS = (MATRIX.crow_indices, MATRIX.col_indices, MATRIX.values)

REFUSED = {
    r"block is \(0, 16\), must be two multiples of 16 up to 512": lambda: BsrTensor.top_k(DENSE, (0, 16), 1),
    "block is 16, must be": lambda: BsrTensor.by_magnitude(DENSE, 16, 0.5),
    r"block is \(16, 24\)": lambda: BsrTensor.from_dense(DENSE, MASK, (16, 24)),
    "dense is a list": lambda: BsrTensor.top_k([1.0], (16, 16), 1),
    r"dense has shape \(1, 32, 48\), must have two dimensions$": lambda: BsrTensor.by_magnitude(
        DENSE[None], (16, 16), 0.5
    ),
    r"dense has shape \(30, 48\), must be matrices of whole blocks": lambda: BsrTensor.from_dense(
        DENSE[:30], MASK, (16, 16)
    ),
    "k is 2.0, must be an int": lambda: BsrTensor.top_k(DENSE, (16, 16), 2.0),
    "mask is a list": lambda: BsrTensor.from_dense(DENSE, [[True]], (16, 16)),
    "mask is on meta, must be on dense's device, cpu": lambda: BsrTensor.from_dense(
        DENSE, MASK.to("meta"), (16, 16)
    ),
    "mask is on meta, must have values": lambda: BsrLinear.from_linear(
        torch.nn.Linear(48, 32, device="meta", dtype=torch.bfloat16), (16, 16), density=0.5
    ),
    "density is 1.5": lambda: BsrTensor.by_magnitude(DENSE, (16, 16), 1.5),
    "col_indices is a list": lambda: BsrTensor(PARTS[0], [0, 1], PARTS[2], (32, 48)),
    r"shape is \(-16, 48\)": lambda: BsrTensor(torch.zeros(0, dtype=torch.int32), *PARTS[1:], (-16, 48)),
    "weight is a Tensor, must be a BsrTensor": lambda: BsrLinear(MATRIX.to_torch()),
    r"bias has shape \(48,\), must be \(32,\)": lambda: BsrLinear(MATRIX, torch.ones(48)),
    "out is a list": lambda: bsr_gemm(MATRIX, DENSE.mT, out=[]),
    "out_dtype has dtype torch.float32, must be one of torch.bfloat16, torch.float16$": lambda: bsr_sddmm(
        DENSE, DENSE.new_ones(48, 48), MATRIX, out_dtype=torch.float32
    ),
    r"a has shape \(32,\)": lambda: bsr_sddmm(DENSE[:, 0], DENSE, MATRIX.t()),
    # The transposed pattern is M x N: 48 x 32.
    r"\(32, 8\) and \(8, 48\), must be .* \(48, 32\)": lambda: bsr_sddmm(DENSE[:, :8], DENSE[:8], MATRIX.t()),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        REFUSED[words]()
