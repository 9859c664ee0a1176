"""Cases of PyTorch's own tests of its BSR products, each beside PyTorch's product itself.

From test/test_sparse_csr.py: `test_triton_bsr_dense_bmm` (block-triangular matrices, empty sizes, batches of
the dense factor, both orders of it and of the result), `test_block_addmm` (random alpha and beta, few blocks,
blocks that lie transposed, both kinds of indices), the tests of `bsr_dense_addmm` (alpha and beta of 0, where
NaN in c does not count), of `linear`, and of the sampled product.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels_dsl import BsrTensor, bsr_gemm, bsr_sddmm
from reference import tolerance

pytestmark = pytest.mark.gpu
BLOCKS = (16, 32, 64)
DEVICE = "cuda"


def _values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Between 0.5 and 1.5, as those tests have them."""
    return (torch.rand(shape, device=DEVICE) + 0.5).to(dtype)


def _triangular(rows: int, columns: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix in torch's layout whose blocks above the diagonal are absent."""
    mask = torch.ones(rows // block, columns // block, device=DEVICE).tril()
    whole = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return (_values(rows, columns, dtype=dtype) * whole.to(dtype)).to_sparse_bsr((block, block))


def _torchs(bsr: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """PyTorch's product, for each matrix of a batch."""
    return torch.stack([_torchs(bsr, each) for each in dense]) if dense.dim() == 3 else bsr @ dense


@pytest.mark.parametrize(
    ("block", "dtype"), [(16, torch.bfloat16), (32, torch.float16), (64, torch.bfloat16)], ids=str
)
def test_products(block: int, dtype: torch.dtype) -> None:
    sizes = list(itertools.product((128, 256, 0), repeat=3))
    for (m, k, n), batch, turned in itertools.product(sizes, ((), (2,)), (False, True)):
        bsr = _triangular(m, k, block, dtype)
        dense = _values(*batch, n, k, dtype=dtype).mT if turned else _values(*batch, k, n, dtype=dtype)
        shape = (*batch, n, m) if turned else (*batch, m, n)
        out = torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)
        out = out.mT if turned else out
        bsr_gemm(bsr, dense, out=out)
        if out.numel():
            expected = bsr.to_dense().double() @ dense.double()
            tolerance.check(out, expected, _torchs(bsr, dense), case=f"{m} {k} {n} {batch} {turned}")


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("noncontiguous", [False, True])
def test_added_products(noncontiguous: bool, index_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for m, n, k in itertools.product((1, 5), repeat=3):
        nnz = int(torch.randint(1, m * k + 1, (), generator=generator))
        cells = torch.randperm(m * k, generator=generator)[:nnz].sort().values
        crow = torch.searchsorted(cells, torch.arange(m + 1) * k)
        values = _values(nnz, 16, 16)
        values = values.mT if noncontiguous else values
        a = BsrTensor(
            crow.to(DEVICE, index_dtype), (cells % k).to(DEVICE, index_dtype), values, (m * 16, k * 16)
        )
        b, c = _values(k * 16, n * 16), _values(m * 16, n * 16)
        if noncontiguous:
            b, c = _values(n * 32, k * 16)[::2].mT, _values(n * 16, m * 32)[:, ::2].mT
        alpha, beta = torch.rand(2, generator=generator).tolist()
        expected = alpha * (a.to_dense().double() @ b.double()) + beta * c.double()
        peer = torch.addmm(c, a.to_torch(), b, alpha=alpha, beta=beta)
        tolerance.check(bsr_gemm(a, b, c=c, alpha=alpha, beta=beta), expected, peer, case=f"{m} {n} {k}")


@pytest.mark.parametrize("block", BLOCKS)
def test_products_added_to_what_is_not_a_number(block: int) -> None:
    from torch.sparse._triton_ops import bsr_dense_addmm

    bsr, dense = _triangular(128, 256, block, torch.bfloat16), _values(256, 128)
    for alpha, beta in itertools.product((0.0, 1.0, 2.0), (0.0, 1.0, 0.5)):
        c = _values(128, 128)
        expected = alpha * (bsr.to_dense().double() @ dense.double()) + beta * c.double()
        if beta == 0.0:
            c.fill_(float("nan"))
        peer = bsr_dense_addmm(c, bsr, dense, alpha=alpha, beta=beta)
        tolerance.check(
            bsr_gemm(bsr, dense, c=c, alpha=alpha, beta=beta), expected, peer, case=f"{alpha} {beta}"
        )


@pytest.mark.parametrize("block", BLOCKS)
def test_linear(block: int) -> None:
    weight, bias = _triangular(128, 256, block, torch.bfloat16), _values(128)
    for batch in ((), (3,), (2, 64)):
        x = _values(*batch, 256)
        expected = x.double() @ weight.to_dense().double().mT + bias.double()
        peer = torch.nn.functional.linear(x.view(-1, 256), weight, bias).view(expected.shape)
        found = bsr_gemm(x.view(-1, 256), BsrTensor.from_torch(weight).t(), bias=bias)
        tolerance.check(found.view(expected.shape), expected, peer, case=str(batch))


@pytest.mark.parametrize("block", BLOCKS)
def test_sampled_products(block: int) -> None:
    from torch.sparse._triton_ops import sampled_addmm

    for m, n, k in itertools.product((64, 128), (64, 128), (64, 128, 0)):
        pattern = _triangular(m, n, block, torch.bfloat16)
        a, b = _values(m, k), _values(k, n)
        found = bsr_sddmm(a, b, BsrTensor.from_torch(pattern))
        mask = pattern.to_dense() != 0
        expected = (a.double() @ b.double()) * mask
        peer = sampled_addmm(pattern, a, b, beta=0.0) if k else pattern * 0
        tolerance.check(found.to_dense(), expected, peer.to_dense(), case=f"{m} {n} {k}")
