"""Calls that want gradients as nodes of autograd: the operator's gradients, without the dispatcher."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels_dsl.ops.gemm.gemm import gemm
from kernels_dsl.ops.gemm.product import GEMM
from kernels_dsl.ops.gemm.register import GEMM_OPERATOR

BF16 = torch.bfloat16


def _leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(BF16).requires_grad_()


@pytest.fixture
def factors(model_kernels):
    return _leaf(32, 16, seed=1), _leaf(16, 24, seed=2)


OPTIONS = {
    "plain": {},
    "weights": {"alpha": 0.5, "beta": 2.0, "c": (32, 24)},
    "bias": {"bias": (24,), "activation": "relu"},
    "bias of rows": {"bias": (32,), "bias_axis": "m"},
    "everything": {"alpha": 0.5, "c": (1, 24), "bias": (24,), "residual": (32, 24), "activation": "gelu"},
    "sm80": {"family": "sm80"},
}


def _options(case: str) -> tuple[dict, list[torch.Tensor]]:
    options = dict(OPTIONS[case])
    for n, name in enumerate(("c", "bias", "residual")):
        if name in options:
            options[name] = _leaf(*options[name], seed=3 + n)
    return options, [x for x in options.values() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("case", list(OPTIONS))
def test_the_gradients_are_the_operators(factors, case: str) -> None:
    options, extras = _options(case)
    leaves = [*factors, *extras]
    seed = torch.randn(32, 24, generator=torch.Generator().manual_seed(9)).to(BF16)
    for _ in range(2):  # a first call, and one like it
        result = gemm(*factors, **options)
        assert result.grad_fn.name() == "GemmBackward"
        got = torch.autograd.grad(result, leaves, seed)
    operator = getattr(torch.ops.kernels_dsl, GEMM_OPERATOR.operation.name)
    want = torch.autograd.grad(operator(*factors, **options), leaves, seed)
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_a_repeated_call_is_found_in_its_grad_mode_alone(factors) -> None:
    leaf, fixed = factors[0], factors[1].detach()
    gemm(leaf, fixed)
    with torch.no_grad():
        assert gemm(leaf, fixed).grad_fn is None
        assert gemm(leaf, fixed).grad_fn is None
    entries = [entry for kept in GEMM.calls.values() for entry in kept]
    assert len(entries) == 2
    assert gemm(leaf, fixed).grad_fn is not None and gemm(leaf.detach(), fixed).grad_fn is None


def test_weights_of_each_call(factors) -> None:
    """alpha and beta are no part of what repeated calls are found by."""
    c = _leaf(32, 24, seed=3)
    for weight in (2.0, 3.0):
        result = gemm(*factors, c=c, alpha=weight, beta=-weight)
        d_a, d_c = torch.autograd.grad(result, (factors[0], c), torch.ones_like(result))
        expected = weight * torch.ones(32, 24) @ factors[1].detach().float().mT
        torch.testing.assert_close(d_a.float(), expected, rtol=1e-2, atol=1e-2)
        assert torch.equal(d_c, torch.full_like(d_c, -weight))


def test_expanded_and_odd_gradients(factors) -> None:
    """The gradient of a sum has strides of 0, that of a slice is a view."""
    want = [x.detach().float() for x in factors]
    for _ in range(2):
        d_a, d_b = torch.autograd.grad(gemm(*factors).sum(), factors)
        torch.testing.assert_close(d_a.float(), torch.ones(32, 24) @ want[1].mT, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(d_b.float(), want[0].mT @ torch.ones(32, 24), rtol=1e-2, atol=1e-2)


def test_second_derivatives(factors) -> None:
    first = torch.autograd.grad(gemm(*factors).float().square().sum(), factors[0], create_graph=True)[0]
    got = torch.autograd.grad(first.float().sum(), factors[1])[0]
    a, b = (x.detach().float().requires_grad_() for x in factors)
    want = torch.autograd.grad((a @ b).square().sum(), a, create_graph=True)[0]
    want = torch.autograd.grad(want.sum(), b)[0]
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.5)


def test_checkpoints_and_hooks_of_saved_tensors(factors) -> None:
    want = torch.autograd.grad(gemm(*factors).sum(), factors)
    got = torch.autograd.grad(checkpoint(gemm, *factors, use_reentrant=False).sum(), factors)
    assert all(torch.equal(x, y) for x, y in zip(got, want))
    with torch.autograd.graph.save_on_cpu():
        result = gemm(*factors)
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(result.sum(), factors), want))


def test_an_input_changed_in_place_is_an_error(factors) -> None:
    a = factors[0] * 1
    result = gemm(a, factors[1])
    with torch.no_grad():
        a.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_what_is_not_asked_for_is_not_computed(factors, model_kernels) -> None:
    gemm(factors[0], factors[1].detach()).sum().backward()
    count = len(model_kernels.launches)
    gemm(factors[0], factors[1].detach()).sum().backward()
    assert len(model_kernels.launches) == count + 2


def test_a_call_keeps_no_tensors_alive(factors) -> None:
    seen = weakref.ref(leaf := _leaf(32, 16, seed=5))
    gemm(leaf, factors[1]).sum().backward()
    del leaf
    gc.disable()
    try:
        assert seen() is None
    finally:
        gc.enable()
