"""`gemm_gated` on the host: its table, arguments, plans and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kernels_dsl
from kernels_dsl.blocks.epilogue import gates
from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.ops.gemm import register as register_operators
from kernels_dsl.ops.gemm.gated_arguments import GATED_GEMM
from reference import gated as reference
from tests.ops.gemm import gated_cases
from tests.ops.gemm.gated_cases import Case, Place

BF16 = torch.bfloat16
ROOT = Path(__file__).parents[3]


def test_the_documentation_has_the_table() -> None:
    assert gates.documented() in (ROOT / "docs" / "gemm.md").read_text()


@pytest.mark.parametrize("name", list(GATES))
def test_a_derivative_is_that_of_the_definition(name: str) -> None:
    z, gradient = 6 * torch.randn(200, 8), torch.randn(200, 4)
    exact = z.double().requires_grad_()
    (expected,) = torch.autograd.grad(GATES[name].of_pairs(exact), exact, gradient.double())
    found = GATES[name].backward(gradient, z)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


CASES = (
    Case(40, 96, 64, Place(), linear=True),
    Case(16, 90, 64, Place(-2), Place(-2), batch=2),
    Case(64, 34, 0, Place()),
    Case(0, 34, 8, Place()),
    Case(4, 64, 1 << 14),
)


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans(model_kernels, case: Case, family: str) -> None:
    gated_cases.run(case, "cpu", family=family)


def _leaf(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16).requires_grad_()


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "reglu", "swiglu_oai"])
def test_gradients(model_kernels, name: str, operator: bool) -> None:
    a, b, c, bias = _leaf(32, 16, seed=1), _leaf(16, 24, seed=2), _leaf(32, 24, seed=3), _leaf(24, seed=4)
    leaves, seed = (a, b, c, bias), _leaf(32, 12, seed=5).detach()
    options: dict[str, Any] = {"alpha": 0.5, "beta": 2.0, "activation": name}
    function = kernels_dsl.gemm_gated
    if operator:
        function = torch.ops.kernels_dsl.gemm_gated
        assert register_operators.GATED_GEMM_OPERATOR.operation is GATED_GEMM
    for _ in range(2):  # a first call, and one like it
        result = function(a, b, c=c, bias=bias, **options)
        assert operator or result.grad_fn.name() == "GatedGemmBackward"
        found = torch.autograd.grad(result, leaves, seed)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = reference.gemm_gated(exact[0], exact[1], c=exact[2], bias=exact[3], **options).out
    expected = torch.autograd.grad(right, exact, seed.double())
    for x, y in zip(found, expected):
        torch.testing.assert_close(x.double(), y, atol=6e-2, rtol=3e-2)


def test_the_product_is_not_computed_again(model_kernels) -> None:
    a, b = _leaf(32, 16, seed=1), _leaf(16, 24, seed=2)
    for turn in range(2):
        kernels_dsl.gemm_gated(a, b).sum().backward()  # a gradient of stride 0, which is written out
        launched = [name for name, _ in model_kernels.launches[4 * turn :]]
        assert launched == ["gemm_sm90", "gate_gradient", "gemm_sm90", "gemm_sm90"] or launched == [
            "sm90", "gate_gradient", "sm90", "sm90",
        ]  # fmt: skip


def test_second_derivatives(model_kernels) -> None:
    """The second pass differentiates through z, which is computed again for it."""
    a, b = (_leaf(*shape, seed=seed) for shape, seed in (((8, 16), 1), ((16, 8), 2)))
    weight = _leaf(8, 4, seed=3).detach()

    def penalty(x: torch.Tensor, y: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        first = torch.autograd.grad((result * weight.to(result.dtype)).sum(), (x, y), create_graph=True)
        return sum(g.square().sum() for g in first)  # type: ignore[return-value]

    found = torch.autograd.grad(penalty(a, b, kernels_dsl.gemm_gated(a, b, activation="glu")), (a, b))
    x, y = (leaf.detach().double().requires_grad_() for leaf in (a, b))
    right = GATES["glu"].of_pairs(x @ y)
    for got, want in zip(found, torch.autograd.grad(penalty(x, y, right), (x, y))):
        scale = want.abs().max()
        torch.testing.assert_close(got.double() / scale, want / scale, atol=3e-2, rtol=0)


def test_compiled(model_kernels) -> None:
    a, b = _leaf(32, 16, seed=1), _leaf(16, 24, seed=2)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def block(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kernels_dsl.gemm_gated(a, b) * 2

    block(a, b).sum().backward()
    got, a.grad = a.grad, None
    (kernels_dsl.gemm_gated(a, b) * 2).sum().backward()
    difference = (got - a.grad).abs().max()
    assert difference <= 2e-2 * a.grad.abs().max()  # of a z that is not rounded
    with torch.no_grad():
        compiled = torch.compile(kernels_dsl.gemm_gated, backend="aot_eager", fullgraph=True)
        found, expected = (f(a, b, return_preact=True) for f in (compiled, kernels_dsl.gemm_gated))
    assert torch.equal(found.out, expected.out) and torch.equal(found.preact, expected.preact)


def _tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(32, 64, dtype=BF16), torch.ones(64, 48, dtype=BF16)


A, B = _tensors()
MEMORY = torch.ones(32, 96, dtype=BF16)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "odd": ({"b": B[:, :47]}, "b has 47 columns, must have an even number"),
    "activation": ({"activation": "relu"}, "activation is 'relu', must be 'swiglu', 'geglu'"),
    "out": ({"out": B[:32]}, r"out has shape \(32, 48\), must be \(32, 24\)"),
    "preact shape": ({"preact_out": B[:32, :24]}, r"preact_out has shape \(32, 24\), must be \(32, 48\)"),
    "preact dtype": (
        {"preact_out": B[:32].half()},
        "preact_out has dtype torch.float16, must be",
    ),
    "an input": ({"preact_out": B[:32]}, "preact_out shares memory with b"),
    "both": ({"out": MEMORY[:, :24], "preact_out": MEMORY[:, 8:56]}, "out shares memory with preact_out"),
    "itself": (
        {"preact_out": MEMORY[:1, :48].expand(32, 48)},
        "preact_out has strides",
    ),
    "turned": ({"config": Sm90GemmConfig(64, 64, turned=True)}, "turned tiles have neighbouring columns"),
    "beta": ({"beta": 2.0}, "beta is 2.0 and c is None"),
    "a leaf": ({"a": A.clone().requires_grad_(), "return_preact": True}, "preact_out is given"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_errors(model_kernels, case: str) -> None:
    options, words = WRONG[case]
    arguments = {"a": A, "b": B, **options}
    with pytest.raises((TypeError, ValueError), match=words) as raised:
        kernels_dsl.gemm_gated(**arguments)
    assert kernels_dsl.gemm_gated_supports(**arguments) == str(raised.value)
    assert kernels_dsl.gemm_gated_supports(A, B, return_preact=True) is None


def test_a_repeated_call_is_found(model_kernels) -> None:
    first = kernels_dsl.gemm_gated(A, B, return_preact=True)
    count = len(GATED_GEMM.plans)
    again = kernels_dsl.gemm_gated(A, B, return_preact=True)
    assert len(GATED_GEMM.plans) == count and again.preact is not first.preact
    assert torch.equal(first.out, again.out) and torch.equal(first.preact, again.preact)
