"""Partial sums of tiles whose elements a thread does not have in whole chunks."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.gemm import Sm90GemmConfig
from lowering import emulator


@pytest.mark.parametrize("tile_n", [176, 80])
def test_three_pieces_of_a_tile(tile_n: int) -> None:
    """The next warpgroup's share of the workspace is not read: 88 and 40 elements are no multiples of 32."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, shape, generator=generator).bfloat16() for shape in ((192, 136), (16, 136)))
    with emulator.run(arch="sm_90a"):
        found = kernels_dsl.gemm(a, b.t(), config=Sm90GemmConfig(192, tile_n, stream_k=True))
    assert torch.equal(found.double(), a.double() @ b.t().double())
