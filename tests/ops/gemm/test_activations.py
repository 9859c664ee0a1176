"""One table of activations: its rows are right, all else follows from them, and a new row is all it takes."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels_dsl
from kernels_dsl.blocks.epilogue import activations
from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS, Activation
from reference import gemm as reference

ROOT = Path(__file__).parents[3]


def _points() -> torch.Tensor:
    """Without 0, where not every activation has a derivative."""
    return torch.cat([torch.linspace(-9, -1e-3, 200), torch.linspace(1e-3, 9, 200), torch.randn(200)])


@pytest.mark.parametrize("name", [name for name, row in ACTIVATIONS.items() if row.backward is not None])
def test_a_derivative_is_that_of_the_definition(name: str) -> None:
    z, gradient = _points(), torch.randn(600)
    exact = z.double().requires_grad_()
    (expected,) = torch.autograd.grad(ACTIVATIONS[name].exact(exact), exact, gradient.double())
    found = ACTIVATIONS[name].backward(gradient, z)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_reference_is_the_definition() -> None:
    for name, row in ACTIVATIONS.items():
        assert reference.activation_function(name) is row.exact


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "gemm.md").read_text()
    assert activations.documented() in text, f"docs/gemm.md must have:\n{activations.documented()}"


@pytest.fixture
def softsign(monkeypatch: pytest.MonkeyPatch) -> Activation:
    """A new row."""
    row = Activation(
        lambda z: z, lambda z: z, torch.nn.functional.softsign,
        lambda gradient, z: gradient / (1 + z.abs()) ** 2, "z / (1 + |z|)",
    )  # fmt: skip
    monkeypatch.setitem(ACTIVATIONS, "softsign", row)
    return row


def _gradients(**options: Any) -> tuple[torch.Tensor, ...]:
    a, b = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    kernels_dsl.gemm(a, b, **options).sum().backward()
    exact = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    reference.finish(exact[0] @ exact[1], None, None, None, 1.0, 1.0, options["activation"]).sum().backward()
    return a.grad, exact[0].grad, b.grad, exact[1].grad


@pytest.mark.parametrize("name", [*ACTIVATIONS, "softsign"])
def test_gradients_are_of_the_activation_that_is_asked_for(model_kernels, softsign, name: str) -> None:
    a, exact_a, b, exact_b = _gradients(activation=name)
    torch.testing.assert_close(a.double(), exact_a, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(b.double(), exact_b, atol=3e-2, rtol=3e-2)


def test_an_activation_without_a_derivative(model_kernels, softsign, monkeypatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "softsign", softsign._replace(backward=None))
    a = torch.randn(16, 16, requires_grad=True)
    with torch.no_grad():
        kernels_dsl.gemm(a, a, activation="softsign")
    words = "activation is 'softsign' and an input requires grad, must be one with a derivative: gelu, "
    with pytest.raises(ValueError, match=words):
        kernels_dsl.gemm(a, a, activation="softsign")
    assert str(kernels_dsl.supports(a, a, activation="softsign")).startswith(words)
    importlib.import_module("kernels_dsl.ops.gemm.register")
    with pytest.raises(ValueError, match=words):  # called as an operator
        torch.ops.kernels_dsl.gemm(a, a, activation="softsign")
    dense = torch.ones(32, 32, dtype=torch.bfloat16)
    sparse = kernels_dsl.BsrTensor.top_k(dense, (16, 16), 1)
    with pytest.raises(ValueError, match=words):
        kernels_dsl.bsr_gemm(sparse, dense.clone().requires_grad_(), activation="softsign")


def test_no_list_of_names_is_left(softsign) -> None:
    """Of the activations, in the source of what looks at them."""
    from kernels_dsl.nn import bsr_linear as linear
    from kernels_dsl.ops.bsr import register
    from kernels_dsl.ops.gemm import grad, product_options

    for module in (grad, product_options, linear, register, reference):
        found = [name for name in ("gelu_tanh", '"silu"', '"relu"') if name in inspect.getsource(module)]
        assert not found, f"{module.__name__} names {found}"
