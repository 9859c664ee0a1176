"""Configurations that nobody would choose, but that are accepted: integers come out exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kernels_dsl import bsr_gemm, bsr_scaled_gemm, gemm, scaled_gemm
from kernels_dsl.config.bsr import Sm90BsrConfig
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.sparse.tensor import BsrTensor
from lowering import emulator
from reference import buffers, tolerance
from reference.bsr import random_bsr, to_dense
from reference.inputs import integers

ARCH = {"sm90": "sm_90a", "sm80": "sm_89"}
PINGPONG = Schedule.PINGPONG


@dataclass(frozen=True)
class Dense:
    """A product (m, n, k), of tensors with gaps behind rows."""

    config: Any
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)


DENSE = (
    Dense(Sm90GemmConfig(192, 176, tile_k=96, raster_group=3), 200, 180, 130),
    Dense(Sm90GemmConfig(64, 48, tile_k=16, cluster_n=4, stages=7), 70, 200, 40),
    Dense(Sm90GemmConfig(128, 16, cluster_m=4, cluster_n=2, schedule=PINGPONG), 300, 40, 100),
    Dense(Sm90GemmConfig(64, 80, tile_k=256, split_k=3, raster_along_m=False), 65, 90, 600),
    Dense(Sm90GemmConfig(192, 240, turned=True), 100, 70, 200, torch.float8_e4m3fn),
    Dense(Sm80GemmConfig(48, 96, 64, 5, 3, 1, copy_bytes_a=4, copy_bytes_b=8), 50, 40, 150),
    Dense(Sm80GemmConfig(48, 96, 16, 3, 1, 3, copy_bytes_a=4), 20, 100, 70, torch.float32),
)


@pytest.mark.parametrize("case", DENSE, ids=lambda case: str(case.config))
def test_dense(case: Dense) -> None:
    fp8 = case.dtype.itemsize == 1
    a, b = (integers(x, case.dtype, seed=i) for i, x in enumerate(((case.m, case.k), (case.n, case.k))))
    pads = (0, 0) if fp8 else (4, 2)
    if case.config.family == "sm90":
        pads = (-case.k % 16, -case.k % 16)
    a, b = (buffers.embed(x, pad=pad) for x, pad in zip((a, b), pads))
    out = buffers.poisoned((case.m, case.n), torch.float32, pad=1)
    with emulator.run(arch=ARCH[case.config.family]) as session:
        if fp8:
            scaled_gemm(a, b.mT, torch.ones(1), torch.ones(1), config=case.config, out=out.tensor)
        else:
            gemm(a, b.mT, config=case.config, out=out.tensor)
    assert not session.reports
    buffers.check_output(out)
    tolerance.check_exact(out.tensor, a.double() @ b.double().mT)


@dataclass(frozen=True)
class Blocks:
    """A product of kept blocks with a dense matrix of `x` columns, or on the left of `x` rows."""

    config: Any
    block: tuple[int, int]
    x: int
    left: bool = False
    columns: bool = False
    fp8: bool = False


BLOCKS = (
    Blocks(Sm90BsrConfig(64, 64, True, 48, stages=5), (64, 64), 70),
    Blocks(Sm90BsrConfig(64, 48, True, 128, units=2), (64, 64), 40, columns=True),
    Blocks(Sm90BsrConfig(48, 192, False, 96, schedule=PINGPONG), (48, 96), 150, left=True),
    Blocks(Sm90BsrConfig(16, 64, False, 16, units=8, cluster_s=2), (32, 16), 100),
    Blocks(Sm90BsrConfig(64, 288, True, 64, cluster_s=2), (128, 32), 300),
    Blocks(Sm90BsrConfig(64, 512, True, 16, kept_stages=2, cluster_x=2), (64, 48), 520),
    Blocks(Sm90BsrConfig(32, 64, False, 32, cluster_x=2, pairs=True), (32, 64), 100, columns=True),
    Blocks(Sm90BsrConfig(32, 128, False, 32, units=2, cluster_x=4), (32, 16), 200, fp8=True),
    Blocks(Sm80GemmConfig(48, 32, 96, 3, 3, 1), (32, 48), 40),
    Blocks(Sm80GemmConfig(32, 96, 192, 3, 1, 3), (96, 32), 50, left=True, fp8=True),
)


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: str(case.config))
def test_block_sparse(case: Blocks) -> None:
    dtype = torch.float8_e4m3fn if case.fp8 else torch.bfloat16
    made = random_bsr("uniform", (3, 4), case.block, 2, dtype=torch.bfloat16, seed=1, exact=True)
    matrix = BsrTensor(made.crow, made.col, made.values.to(dtype), made.shape)
    full = to_dense(made).double()
    inner = made.shape[0] if case.left else made.shape[1]
    dense = integers((case.x, inner) if case.left else (inner, case.x), dtype, seed=2)
    dense = buffers.embed(dense, contiguous=-2 if case.columns else -1, pad=8)
    exact = dense.double() @ full if case.left else full @ dense.double()
    out = buffers.poisoned(tuple(exact.shape), torch.float32, pad=1)
    factors = (dense, matrix) if case.left else (matrix, dense)
    with emulator.run(arch=ARCH[case.config.family]) as session:
        if case.fp8:
            scales = torch.ones(matrix.nnz), torch.ones(1)
            scales = scales[::-1] if case.left else scales
            bsr_scaled_gemm(*factors, *scales, config=case.config, out=out.tensor)
        else:
            bsr_gemm(*factors, config=case.config, out=out.tensor)
    assert not session.reports
    buffers.check_output(out)
    tolerance.check_exact(out.tensor, exact)
