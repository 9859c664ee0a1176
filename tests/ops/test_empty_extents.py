"""Extents of 0 in every operator but attention: results are right, and no launch has an empty grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kernels_dsl import (
    BsrTensor,
    bsr_gemm,
    bsr_scaled_gemm,
    bsr_sddmm,
    gemm,
    grouped_gemm,
    quantize,
    scaled_gemm,
    scaled_grouped_gemm,
)
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig, Sm90GemmConfig
from lowering import emulator
from reference import buffers
from reference.inputs import integers

ARCH = {"sm90": "sm_90a", "sm80": "sm_89"}
BF16, E4M3, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32


@contextmanager
def emulated(family: str, launches: bool | None = None) -> Iterator[None]:
    """`launches`: whether there must be some, or none; None: either."""
    with emulator.run(arch=ARCH[family]) as session:
        yield
    assert not session.reports
    assert all(min(launch.grid) > 0 for launch in session.launches)
    assert launches is None or bool(session.launches) == launches


def _ints(*shape: int, dtype: torch.dtype = BF16, seed: int = 1) -> torch.Tensor:
    return integers(shape, dtype, seed=seed)


def _check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.double(), expected.to(found.dtype).double())


NO_RESULT = (
    (0, 24, 16, None),
    (40, 0, 16, None),
    (0, 0, 0, None),
    (0, 24, 0, 2),
    (40, 24, 16, 0),
    (40, 24, 0, 0),
)
CONFIGS = (
    None,
    Sm90GemmConfig(64, 32),
    Sm90GemmConfig(64, 64, stream_k=True),
    Sm90GemmConfig(64, 32, turned=True),
    Sm90GemmConfig(128, 32, cluster_m=2, schedule=Schedule.PINGPONG, epi_tma=False),
    Sm80GemmConfig(64, 64, 32, 3, 2, 2),
)


def _operands(m: int, n: int, k: int, batch: int | None, dtype: torch.dtype = BF16) -> tuple:
    lead = () if batch is None else (batch,)
    return _ints(*lead, m, k, dtype=dtype), _ints(*lead, k, n, dtype=dtype, seed=2), lead


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize(("m", "n", "k", "batch"), NO_RESULT)
def test_products_without_elements_launch_nothing(family, m: int, n: int, k: int, batch: int | None) -> None:
    a, b, lead = _operands(m, n, k, batch)
    config = Sm90GemmConfig(64, 32, split_k=2) if family == "sm90" else Sm80GemmConfig(64, 64, 32, 3, 2, 2)
    c, bias = torch.ones(*lead, m, n), torch.ones(n)
    for given in ({}, {"config": config}, {"c": c, "beta": 2.0, "bias": bias}, {"out_dtype": F32}):
        with emulated(family, launches=False):
            assert gemm(a, b, family=family, **given).shape == (*lead, m, n)
            out = buffers.poisoned((*lead, m, n), BF16, pad=3, offset=1)
            gemm(a, b, family=family, out=out.tensor, **{x: y for x, y in given.items() if x != "out_dtype"})
            buffers.check_guards(out)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_k_is_the_epilogue_of_zeros(config) -> None:
    family = "sm90" if config is None else config.family
    a, b, _ = _operands(40, 24, 0, 2)
    c, bias = _ints(2, 40, 24, seed=3), _ints(24, dtype=F32, seed=4)
    out = buffers.poisoned((2, 40, 24), BF16, pad=3, offset=1)
    with emulated(family):
        gemm(a, b, c=c, beta=2.0, bias=bias, config=config, activation="relu", out=out.tensor)
    buffers.check_output(out)
    _check(out.tensor, (2 * c.double() + bias.double()).relu())


@pytest.mark.parametrize(
    "config", [Sm90GemmConfig(64, 32, split_k=2), Sm80GemmConfig(64, 64, 32, 3, 2, 2, split_k=2)]
)
def test_no_k_cannot_be_split(config) -> None:
    a, b, _ = _operands(40, 24, 0, None)
    with emulated(config.family, launches=False), pytest.raises(ValueError, match="must be 1 where K is 0"):
        gemm(a, b, config=config)


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_scaled_products(family: str) -> None:
    for m, n, k, batch in NO_RESULT:
        a, b, lead = _operands(m, n, k, batch, E4M3)
        amax = torch.full((1,), 7.0)
        for scales in (
            (torch.ones(1), torch.ones(1)),
            (torch.ones(*lead, m, -(-k // 128)), torch.ones(*lead, -(-k // 128), n)),
        ):
            with emulated(family, launches=False):
                assert scaled_gemm(a, b, *scales, amax=amax, family=family).shape == (*lead, m, n)
            assert amax.item() == 0.0
    a, b, _ = _operands(40, 24, 0, None, E4M3)
    residual, amax = _ints(40, 24, seed=3), torch.full((1,), 7.0)
    for scales in ((torch.ones(1), torch.ones(1)), (torch.ones(40, 0), torch.ones(0, 24))):
        with emulated(family):
            found = scaled_gemm(a, b, *scales, residual=residual, amax=amax, family=family)
        _check(found, residual)
        assert amax.item() == residual.abs().max().item()


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_groups(family: str) -> None:
    def product(m: int, n: int, k: int, ends: list[int], launches: bool | None, **options) -> torch.Tensor:
        a, b = _ints(m, k), _ints(len(ends), k, n, seed=2)
        with emulated(family, launches):
            return grouped_gemm(a, b, torch.tensor(ends, dtype=torch.int32), family=family, **options)

    for m, n, ends in ((0, 24, [0, 0]), (40, 0, [8, 40]), (40, 24, [])):
        assert product(m, n, 16, ends, launches=False).shape == (m, n)
    bias = _ints(3, 24, dtype=F32, seed=3)
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor([0, 40, 0]))
    _check(product(40, 24, 0, [0, 40, 40], None, bias=bias), bias[rows])  # K = 0, and empty groups
    out = torch.full((40, 24), 9.0, dtype=BF16)
    product(40, 24, 16, [0, 0, 0], None, out=out)
    assert (out == 9.0).all()  # all groups empty: no row is any group's
    amax = torch.full((1,), 7.0)
    a, b = _ints(40, 32, dtype=E4M3), _ints(2, 32, 24, dtype=E4M3, seed=2)
    with emulated(family):
        ends = torch.zeros(2, dtype=torch.int32)
        scaled_grouped_gemm(a, b, torch.ones(1), torch.ones(1), ends, amax=amax, family=family, out_dtype=F32)
    assert amax.item() == 0.0


def _sparse(
    rows: int, columns: int, kept: int, batch: int | None = None, dtype: torch.dtype = BF16
) -> BsrTensor:
    """`kept` blocks of 32 x 32 in the first block row."""
    crow = torch.tensor([0, *[kept] * rows], dtype=torch.int32)
    lead = () if batch is None else (batch,)
    values = _ints(*lead, kept, 32, 32, dtype=dtype, seed=5)
    return BsrTensor(crow, torch.arange(kept, dtype=torch.int32), values, (rows * 32, columns * 32))


# Block rows, block columns, kept blocks, the dense mode, batch.
BLOCKS = ((2, 3, 0, 40, None), (2, 0, 0, 40, None), (2, 3, 0, 40, 2), (0, 3, 0, 40, None), (2, 3, 2, 0, None),
          (2, 3, 2, 40, 0), (0, 0, 0, 0, None))  # fmt: skip


@pytest.mark.parametrize("family", [None, "sm90", "sm80"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("rows", "columns", "kept", "x", "batch"), BLOCKS)
def test_block_sparse_products(family, left: bool, rows, columns, kept, x, batch) -> None:
    sparse = _sparse(rows, columns, kept, batch)
    sparse = sparse.t() if left else sparse  # so that the extents of the result are the same
    lead = () if batch is None else (batch,)
    dense = _ints(*lead, *((x, columns * 32) if left else (columns * 32, x)))
    shape = (*lead, x, rows * 32) if left else (*lead, rows * 32, x)
    c = _ints(*shape, seed=3)
    with emulated(family or "sm90", launches=None if 0 not in shape else False):
        found = bsr_gemm(*((dense, sparse) if left else (sparse, dense)), c=c, beta=2.0, family=family)
    _check(found, 2 * c.double())


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize(("rows", "columns", "kept", "x", "batch"), BLOCKS)
def test_scaled_block_sparse_products(family, rows, columns, kept, x, batch) -> None:
    sparse = _sparse(rows, columns, kept, batch, E4M3)
    lead = () if batch is None else (batch,)
    dense = _ints(*lead, columns * 32, x, dtype=E4M3)
    residual = _ints(*lead, rows * 32, x, seed=3)
    scales = torch.ones(*lead, kept), torch.ones(1)
    with emulated(family, launches=None if 0 not in residual.shape else False):
        found = bsr_scaled_gemm(sparse, dense, *scales, residual=residual, family=family)
    _check(found, residual)


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_sampled_products(family: str) -> None:
    for rows, columns, kept, k, batch in (
        (2, 3, 0, 64, None),
        (2, 3, 2, 0, None),
        (2, 3, 2, 64, 0),
        (0, 3, 0, 64, None),
    ):
        pattern = _sparse(rows, columns, kept)
        lead = () if batch is None else (batch,)
        a, b = _ints(*lead, rows * 32, k), _ints(*lead, k, columns * 32)
        with emulated(family, launches=False):
            found = bsr_sddmm(a, b, pattern).values
        _check(found, torch.zeros(*lead, kept, 32, 32))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (0, 16, 16), (2, 0, 16), (2, 16, 0), (0,)])
def test_quantize(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=BF16)
    for scaling, transpose in itertools.product(
        ("tensor", "matrix", "row", "1x128", "128x128"), (False, True, "both")
    ):
        if len(shape) == 1 and (transpose or scaling in ("matrix", "128x128")):
            continue
        with emulated("sm90", launches=False):
            made = quantize(x, scaling=scaling, transpose=transpose)
            out = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in made)
            if scaling == "tensor" and len(out) == 4:
                out = (*out[:3], out[1])
            assert quantize(x, scaling=scaling, transpose=transpose, out=out) is out
        for t in (*made, *out):
            assert t.dtype != F32 or bool((t == 1.0).all())
        plain = made[0] if not transpose else made[0].mT if transpose is True else made[0]
        assert plain.shape == x.shape
