"""Functions of a rank in the tests of products beside communication."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import kernels_dsl
from kernels_dsl.distributed import all_gather_gemm, gemm_reduce_scatter, overlapped
from tests.distributed.ranks import Rank

CALLS = {"all_gather_gemm": all_gather_gemm, "gemm_reduce_scatter": gemm_reduce_scatter}


def _by_formula(
    a: torch.Tensor, b: torch.Tensor, *, c: Any = None, out: Any = None, out_dtype: Any = None
) -> Any:
    """In place of `gemm`, with the arguments that it gets here."""
    found = a.double() @ b.double() + (0 if c is None else c.double())
    return found.to(out_dtype or a.dtype) if out is None else out.copy_(found)


class Layer(NamedTuple):
    """The whole layer, of small whole numbers whose sums are exact, and a rank's part of it."""

    x: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor


def _whole(name: str, rank: Rank, dtype: torch.dtype) -> Layer:
    """Tensors of all ranks: rows of x, or its columns and the weight's rows, are theirs in equal parts."""
    generator = torch.Generator().manual_seed(len(name))
    m, k, n = 8 * rank.size, 16 * rank.size, 24

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    return Layer(numbers(m, k), numbers(k, n), numbers(m, n))


def _part(name: str, whole: Layer, rank: Rank) -> Layer:
    x, weight, gradient = whole
    if name == "all_gather_gemm":
        return Layer(x.chunk(rank.size)[rank.rank], weight, gradient)
    own = x.chunk(rank.size, 1)[rank.rank], weight.chunk(rank.size)[rank.rank]
    return Layer(*own, gradient.chunk(rank.size)[rank.rank])


def check(name: str, rank: Rank, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    """Results and gradients are those of one process, bit for bit."""
    whole = _whole(name, rank, dtype)
    x, weight = (t.double().requires_grad_() for t in whole[:2])
    expected = x @ weight
    if name == "all_gather_gemm":  # each rank has a loss of its own
        expected.backward(whole.gradient.double() * rank.size)
        x_grad, weight_grad = x.grad.chunk(rank.size)[rank.rank], weight.grad / rank.size
    else:
        expected.backward(whole.gradient.double())
        x_grad, weight_grad = x.grad.chunk(rank.size, 1)[rank.rank], weight.grad.chunk(rank.size)[rank.rank]
        expected = expected.chunk(rank.size)[rank.rank]
    part = _part(name, whole, rank)
    leaves = [t.clone().requires_grad_() for t in part[:2]]
    found = CALLS[name](*leaves, **options)
    found.backward(part.gradient)
    wanted = {
        "the result": (found, expected),
        "dx": (leaves[0].grad, x_grad),
        "dw": (leaves[1].grad, weight_grad),
    }
    for called, (mine, theirs) in wanted.items():
        assert mine.dtype == dtype, f"{name}: {called} is {mine.dtype}"
        assert torch.equal(mine, theirs.to(dtype)), f"{name} {options}: {called} differs"


def formulas(rank: Rank) -> None:
    """Every call, dtype and option; gradients of one tensor alone; strided operands."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(overlapped, "gemm", _by_formula)
        for name in CALLS:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                check(name, rank, dtype)
                check(name, rank, dtype, overlap=True)
            check(name, rank, sm_margin=8)
            for asked in (0, 1):
                _one_gradient(name, rank, asked)
        for overlap in (False, True):
            check("gemm_reduce_scatter", rank, partial_dtype=torch.bfloat16, overlap=overlap)
        _strided(rank)


def _one_gradient(name: str, rank: Rank, asked: int) -> None:
    leaves = list(_part(name, _whole(name, rank, torch.bfloat16), rank)[:2])
    leaves[asked] = leaves[asked].clone().requires_grad_()
    out = CALLS[name](*leaves)
    out.backward(torch.ones_like(out))
    assert leaves[asked].grad is not None and leaves[1 - asked].grad is None


def _strided(rank: Rank) -> None:
    """x with a gap between rows, a weight that lies along K."""
    x, weight, _ = _part("all_gather_gemm", _whole("all_gather_gemm", rank, torch.bfloat16), rank)
    spread = torch.stack((x, torch.full_like(x, torch.nan)), 1)[:, 0]
    turned = weight.mT.contiguous().mT
    assert not spread.is_contiguous() and not turned.is_contiguous()
    assert torch.equal(all_gather_gemm(spread, turned), all_gather_gemm(x, weight))


def refused(rank: Rank) -> None:
    """Errors before any communication, on all ranks; ranks that disagree are named in checked mode."""
    x, weight = torch.zeros(8, 16).bfloat16(), torch.zeros(16, 8).bfloat16()
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (all_gather_gemm, (x[0], weight), {}, "x has 1 modes, must have 2"),
        (all_gather_gemm, (x, weight.half()), {}, "x @ weight: b "),
        (all_gather_gemm, (x, weight[:8]), {}, "x @ weight: "),
        (all_gather_gemm, (x, weight), {"sm_margin": -1}, "sm_margin is -1"),
        (all_gather_gemm, (x, weight), {"overlap": 2}, "overlap is 2"),
        (gemm_reduce_scatter, (x[:7], weight), {}, "x has 7 rows, must be a multiple of 2"),
        (gemm_reduce_scatter, (x, weight), {"partial_dtype": torch.int8}, "partial_dtype is torch.int8"),
        (gemm_reduce_scatter, (x, weight), {"group": 3}, "group is a int"),
    ]
    for call, given, options, message in cases:
        with pytest.raises((TypeError, ValueError), match=message.replace("(", "\\(")):
            call(*given, **options)
    with kernels_dsl.checked():
        with pytest.raises(ValueError, match="rank 1 of the group"):
            all_gather_gemm(x[: 8 - rank.rank], weight)
        with pytest.raises(ValueError, match="requires_grad"):
            all_gather_gemm(x.clone().requires_grad_(rank.rank == 0), weight)
    dist.barrier()


def emulated(rank: Rank) -> None:
    """The products themselves, forward and backward."""
    for name in CALLS:
        check(name, rank)
        check(name, rank, overlap=True)
