"""`gemm_reduce` on the host: its table, arguments, plans and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kernels_dsl
from kernels_dsl.blocks.reduce import reductions
from kernels_dsl.ops.gemm.reduced_arguments import GEMM_REDUCE
from reference import reduced as reference
from tests.ops.gemm import reduced_cases
from tests.ops.gemm.reduced_cases import Case

BF16 = torch.bfloat16
ROOT = Path(__file__).parents[3]
CASES = (
    Case(40, 96, 64, "sum_squares", options="linear"),
    Case(8, 90, 64, "max", -2, batch=2, columns=True, gap=1),
    Case(64, 34, 0, "sum", options="linear"),
    Case(0, 34, 8, "sum", -2),
    Case(4, 64, 1 << 14, "abs_max"),
    Case(8000, 8, 8, "sum", -2),
)


def test_the_documentation_has_the_table() -> None:
    assert reductions.documented() in (ROOT / "docs" / "gemm_reduce.md").read_text()


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans(model_kernels, case: Case, family: str) -> None:
    reduced_cases.run(case, "cpu", family=family)


def _leaf(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16).requires_grad_()


@pytest.mark.parametrize("through", ["both", "reduced", "out"])
@pytest.mark.parametrize(
    ("name", "dim"), [("sum", -1), ("sum_squares", -1), ("sum", -2), ("sum_squares", -2)]
)
def test_gradients(model_kernels, name: str, dim: int, through: str) -> None:
    a, b, c, bias = _leaf(2, 32, 16, seed=1), _leaf(16, 24, seed=2), _leaf(32, 24, seed=3), _leaf(24, seed=4)
    leaves = (a, b, c, bias)
    seeds = (_leaf(2, 32, 24, seed=5).detach(), _leaf(2, 32 if dim == -1 else 24, seed=6).detach())
    options: dict[str, Any] = {"alpha": 0.5, "beta": 2.0, "activation": "silu", "reduce": name, "dim": dim}
    chosen = {"both": slice(None), "out": slice(1), "reduced": slice(1, None)}[through]
    result = kernels_dsl.gemm_reduce(a, b, c=c, bias=bias, **options)
    assert isinstance(result, tuple) and result.reduced.dtype == torch.float32
    weights = (seeds[0], seeds[1].float())
    found = torch.autograd.grad(result[chosen], leaves, weights[chosen])
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = reference.gemm_reduce(exact[0], exact[1], c=exact[2], bias=exact[3], **options)
    expected = torch.autograd.grad(right[chosen], exact, [x.double() for x in seeds[chosen]])
    for x, y in zip(found, expected):
        torch.testing.assert_close(x.double(), y, atol=2e-2 * float(y.abs().max()), rtol=3e-2)


def test_compiled(model_kernels) -> None:
    a, b = _leaf(32, 16, seed=1), _leaf(16, 24, seed=2)

    def normed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        d, squares = kernels_dsl.gemm_reduce(a, b, reduce="sum_squares")
        return d * torch.rsqrt(squares / d.shape[-1] + 1e-6)[:, None].to(d.dtype)

    compiled = torch.compile(normed, backend="aot_eager", fullgraph=True, dynamic=True)
    compiled(a, b).square().sum().backward()
    got, a.grad = a.grad, None
    normed(a, b).square().sum().backward()
    assert torch.equal(got, a.grad)
    with torch.no_grad():
        place = torch.empty(24)
        compiled = torch.compile(kernels_dsl.gemm_reduce, backend="aot_eager", fullgraph=True)
        found = compiled(a, b, dim=-2, reduced_out=place)
        assert torch.equal(found.reduced, kernels_dsl.gemm_reduce(a, b, dim=-2).reduced)
        assert torch.equal(found.reduced, place)


A, B = torch.ones(32, 64, dtype=BF16), torch.ones(64, 48, dtype=BF16)
MEMORY = torch.ones(64, 96)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"reduce": "mean"}, "reduce is 'mean', must be 'sum', 'sum_squares', 'max' or 'abs_max'"),
    "dim": ({"dim": 0}, "dim is 0, must be -1"),
    "place": ({"reduced_out": MEMORY[0, :48]}, r"reduced_out has shape \(48,\), must be \(32,\)"),
    "dtype": ({"reduced_out": A[0, :32]}, "reduced_out has dtype torch.bfloat16, must be torch.float32"),
    "itself": ({"reduced_out": MEMORY[0, :1].expand(32)}, "reduced_out has strides"),
    "an input": (
        {"bias": MEMORY[0, :48], "reduced_out": MEMORY[0, :32]},
        "reduced_out shares memory with bias",
    ),
    "nothing": ({"reduce": "max", "b": B[:, :0]}, "must have elements along dim -1"),
    "beta": ({"beta": 2.0}, "beta is 2.0 and c is None"),
    "a maximum": (
        {"a": A.clone().requires_grad_(), "reduce": "abs_max"},
        "reduce is 'abs_max' and an input requires grad, must be one with a derivative: 'sum', 'sum_squares'",
    ),
    "a leaf": ({"a": A.clone().requires_grad_(), "reduced_out": MEMORY[0, :32]}, "reduced_out is given"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_errors(model_kernels, case: str) -> None:
    options, words = WRONG[case]
    arguments = {"a": A, "b": B, **options}
    with pytest.raises((TypeError, ValueError), match=words) as raised:
        kernels_dsl.gemm_reduce(**arguments)
    assert kernels_dsl.gemm_reduce_supports(**arguments) == str(raised.value)
    assert kernels_dsl.gemm_reduce_supports(A, B, reduce="max") is None


def test_a_repeated_call_is_found(model_kernels) -> None:
    first = kernels_dsl.gemm_reduce(A, B, epilogue=lambda acc, x: acc * x, epilogue_args=(2.0,))
    assert torch.equal(first.out, 2 * A @ B) and torch.equal(first.reduced, torch.full((32,), 128.0 * 48))
    first = kernels_dsl.gemm_reduce(A, B)
    count = len(GEMM_REDUCE.plans)
    again = kernels_dsl.gemm_reduce(A, B)
    assert len(GEMM_REDUCE.plans) == count and again.reduced is not first.reduced
    assert torch.equal(first.reduced, again.reduced)
