"""Block-sparse matrices and layers that ranks share."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial

from kernels_dsl.distributed import BsrColwiseParallel, BsrRowwiseParallel, shard_bsr
from kernels_dsl.sparse.tensor import BsrTensor
from tests.distributed.ranks import run_ranks

RANKS = "tests.distributed.bsr_ranks:"


def _matrix(lead: tuple[int, ...] = ()) -> BsrTensor:
    torch.manual_seed(0)
    mask = torch.rand(4, 6) < 0.5
    mask[2:] = False  # the last ranks of block rows keep nothing
    return BsrTensor.from_dense(torch.randn(*lead, 64, 192).bfloat16(), mask, (16, 32))


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dim", "size"), [(0, 1), (0, 2), (1, 2)])
def test_parts_are_those_of_the_dense_matrix(lead, transposed, dim, size):
    matrix = _matrix(lead).t() if transposed else _matrix(lead)
    parts = [shard_bsr(matrix, rank, size, dim).check() for rank in range(size)]
    for part, dense in zip(parts, matrix.to_dense().chunk(size, dim - 2)):
        assert part.transposed == transposed and part.size == tuple(dense.shape[-2:])
        assert torch.equal(part.to_dense(), dense)
    assert sum(part.nnz for part in parts) == matrix.nnz


def test_parts_are_differentiable():
    matrix = _matrix()
    values = matrix.values.clone().requires_grad_()
    for rank, dim in itertools.product(range(2), range(2)):
        (shard_bsr(matrix.with_values(values), rank, 2, dim).values * (1 + rank + 2 * dim)).sum().backward()
    kept_right = (matrix.col_indices >= 3).long()
    # All kept blocks lie in the rows of rank 0.
    expected = (1 + 3 + kept_right).bfloat16()
    assert torch.equal(values.grad, expected[:, None, None].expand_as(values))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 3, 0), "matrix has 4 block rows, must have a multiple of 3"),
        ((0, 4, 1), "matrix has 6 block columns, must have a multiple of 4"),
        ((2, 2, 0), "rank is 2"),
        ((0, 2, 2), "dim is 2"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        shard_bsr(_matrix(), *arguments)
    with pytest.raises(TypeError, match="matrix is"):
        shard_bsr(torch.zeros(32, 32), 0, 2, 0)


def test_layouts_are_checked():
    with pytest.raises(ValueError, match="output_layouts is a partial sum"):
        BsrRowwiseParallel(output_layouts=Partial())
    with pytest.raises(TypeError, match="input_layouts is"):
        BsrColwiseParallel(input_layouts=0)


def test_two_ranks():
    run_ranks(RANKS + "pair", RANKS + "layouts", RANKS + "columns", RANKS + "refusals")
