"""Repeated calls of `scaled_linear`: the bits and the launches of a first one, and the same refusals."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl import ScaledLinear, scaled_linear
from kernels_dsl.config.problem import H200
from kernels_dsl.nn import scaled_linear as module
from kernels_dsl.ops import launch, operation
from kernels_dsl.ops.gemm import kernels as gemm_kernels
from kernels_dsl.ops.quantize.operation import QUANTIZE
from kernels_dsl.ops.scaled.arguments import SCALED_GEMM
from kernels_dsl.ops.target import Target
from lowering import emulator

BF16 = torch.bfloat16
OPTIONS = ("row", torch.float8_e5m2, True)


def _leaves(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(BF16).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("recipe", "shapes", "fixed"),
    [
        ("row", ((2, 8, 32), (48, 32), (48,)), ()),
        ("tensor", ((16, 32), (48, 32), (48,)), ("weight", "bias")),
        ("tensor", ((2, 16, 32), (2, 48, 32)), ()),
        ("row", ((20, 24), (16, 24), (16,)), ("x",)),
        ("block", ((4, 144), (16, 144), (16,)), ()),
        ("row", ((16, 32), (16, 32), (16,)), ("x", "weight")),
    ],
)
def test_a_plan_gives_the_bits_of_a_first_call(recipe, shapes, fixed, seed):
    given = _leaves(seed, *shapes)
    for name, tensor in zip(("x", "weight", "bias"), given):
        tensor.requires_grad_(name not in fixed)
    leaves = [tensor for tensor in given if tensor.requires_grad]
    options = (recipe, *OPTIONS[1:])
    with emulator.run(arch="sm_90a"):
        want = scaled_linear(*given, recipe=recipe)
        gradient = _leaves(seed + 1, tuple(want.shape))[0].detach()
        expected = torch.autograd.grad(want, leaves, gradient)
        plan = module.plan_of(tuple(given), options)
        for _ in range(2):  # the plan's first backward pass takes the general way, the second its own
            y = plan(*given, *[None] * (3 - len(given)))
            assert torch.equal(y, want) and not y._is_view()
            got = torch.autograd.grad(y, leaves, gradient)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(plan.gradients) == 1


@pytest.fixture
def kept(monkeypatch):
    """The arguments of each launch, on tensors that pass for those of an H200; nothing runs."""
    calls = []
    for where in (launch, gemm_kernels):
        monkeypatch.setattr(where, "launcher_of", lambda *_: (lambda *args: calls.append(args), None))
    monkeypatch.setattr(gemm_kernels, "resident_ctas", lambda *_: 132)
    monkeypatch.setattr(operation, "target_of", lambda *_: Target(H200, -1))
    for used in (SCALED_GEMM, QUANTIZE):
        monkeypatch.setattr(used, "calls", {})
        monkeypatch.setattr(used, "plans", {})
    monkeypatch.setattr(module, "_CALLS", {})
    return calls


def test_later_steps_launch_what_the_first_does(kept, monkeypatch):
    layer = ScaledLinear(32, 48, dtype=BF16)
    (x,) = _leaves(0, (16, 32))
    steps = []
    for step in range(5):
        kept.clear()
        if step > 2:  # all is found by one look-up
            for name in ("quantize", "scaled_gemm", "gradients"):
                monkeypatch.setattr(module, name, None)
            for used in (QUANTIZE, SCALED_GEMM):
                monkeypatch.setattr(used, "plan_of", None)
        y = layer(x)
        torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))
        steps.append([[getattr(t, "shape", type(t)) for t in arguments] for arguments in kept])
    assert all(step == steps[0] for step in steps) and len(steps[0]) == 6


@pytest.mark.usefixtures("kept")
def test_what_is_kept_is_for_calls_alike():
    x, weight = _leaves(0, (16, 32), (48, 32))
    for _ in range(2):
        assert scaled_linear(x, weight).dtype == BF16
    with torch.no_grad():
        assert scaled_linear(x, weight).grad_fn is None
    assert scaled_linear(x.detach(), weight.detach()).grad_fn is None
    with torch.autocast("cpu", torch.float16):
        assert scaled_linear(x, weight).dtype == torch.float16
    for recipe in ("tensor", "block"):
        scaled_linear(x, weight, recipe=recipe)
    with pytest.raises(ValueError, match="recipe is"):
        scaled_linear(x, weight, recipe="column")
    with pytest.raises(TypeError, match="grad_dtype is"):
        scaled_linear(x, weight, grad_dtype=BF16)
    with pytest.raises(TypeError, match="weight is a list"):
        scaled_linear(x, [weight])
    entries = [plan for found in module._CALLS.values() for *_, plan in found]
    assert len(entries) == 6 and sum(plan.records for plan in entries) == 4


@pytest.mark.usefixtures("kept")
def test_second_derivatives_of_a_repeated_call_are_refused():
    x, weight = _leaves(0, (16, 32), (48, 32))
    scaled_linear(x, weight)
    y = scaled_linear(x, weight)
    assert y.grad_fn.name() == "ScaledLinearBackward"
    (d_x,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_x.float().sum().backward()
