"""`scaled_linear` and `ScaledLinear` in the emulator: small sizes, and what needs no GPU at all."""

from __future__ import annotations

import copy

import pytest
import torch

import kernels_dsl
from kernels_dsl import ScaledLinear, scaled_linear
from kernels_dsl.nn import scaled_linear as module
from lowering import emulator
from reference import quantize as quantization
from reference import scaled_gemm as reference
from tests.nn import scaled_linear_cases


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_90a"):
        yield


@pytest.fixture
def _without_kernels(monkeypatch):
    """The definitions in place of kernels, for what does not depend on those."""

    def quantize(x, dtype, *, scaling, transpose, scale=None):
        sources = [x] * (transpose is not True) + [x.mT] * bool(transpose)
        return tuple(t for source in sources for t in quantization.quantize(source, dtype, scaling=scaling))

    def scaled_gemm(*tensors, bias, out_dtype, use_fast_accum):
        return reference.scaled_gemm(*tensors, bias=bias).to(out_dtype)

    monkeypatch.setattr(module, "quantize", quantize)
    monkeypatch.setattr(module, "scaled_gemm", scaled_gemm)


@pytest.mark.parametrize(
    ("recipe", "lead", "features", "arch"),
    [("tensor", (2, 16), (32, 48), "sm_90a"), ("row", (3, 3), (20, 24), "sm_90a"),
     ("block", (144,), (144, 16), "sm_90a"), ("block", (20,), (144, 16), "sm_89")],
)  # fmt: skip
def test_output_and_gradients(recipe, lead, features, arch, seed):
    with emulator.run(arch=arch):
        scaled_linear_cases.check(lead, features, recipe, seed=seed)


def test_groups_of_equal_size(seed):
    scaled_linear_cases.check_groups((2, 16), (32, 48), "tensor", seed=seed)


@pytest.mark.usefixtures("_without_kernels")
def test_only_what_is_needed_is_made(seed):
    """One gradient alone, or none: the same bits, and nothing is kept for the others."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((32, 32), (48, 32)))
    gradient = torch.randn((32, 48), generator=generator).bfloat16()
    found = {}
    for which in ("x", "weight", "both"):
        inputs = [
            t.clone().requires_grad_(which in (name, "both")) for name, t in (("x", x), ("weight", weight))
        ]
        y = scaled_linear(*inputs)
        assert sum(t is not None for t in y.grad_fn.saved_tensors) == (4 if which == "both" else 2)
        y.backward(gradient)
        found[which] = [t.grad for t in inputs]
    assert torch.equal(y, scaled_linear(x, weight))
    assert found["x"][1] is None and torch.equal(found["x"][0], found["both"][0])
    assert found["weight"][0] is None and torch.equal(found["weight"][1], found["both"][1])


@pytest.mark.usefixtures("_without_kernels")
@pytest.mark.parametrize(("m", "k", "n"), [(0, 32, 16), (3, 0, 16), (3, 32, 0)])
def test_nothing(m, k, n):
    x, weight, bias = (torch.ones(shape).requires_grad_() for shape in ((m, k), (n, k), (n,)))
    y = scaled_linear(x, weight, bias)
    y.sum().backward()
    assert torch.equal(y, torch.ones(m, n) * (k + 1)) and torch.equal(bias.grad, torch.full((n,), float(m)))
    assert torch.equal(x.grad, torch.full((m, k), float(n)))
    assert torch.equal(weight.grad, torch.full((n, k), float(m)))


@pytest.mark.usefixtures("_without_kernels")
def test_the_layer_takes_the_place_of_linear(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 48, dtype=torch.bfloat16), torch.nn.GELU(),
        torch.nn.Sequential(torch.nn.Linear(48, 16, bias=False, dtype=torch.bfloat16)),
    )  # fmt: skip
    exact = copy.deepcopy(model)
    parameters = list(model.parameters())
    assert ScaledLinear.replace(model, lambda name, layer: layer.out_features > 16) == ["0"]
    assert type(model[2][0]) is torch.nn.Linear
    assert ScaledLinear.replace(model, recipe="tensor") == ["2.0"]
    assert (model[0].recipe, model[2][0].recipe) == ("row", "tensor")
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.state_dict().keys() == exact.state_dict().keys()
    x = torch.randn(20, 32).bfloat16()
    error = (model(x) - exact(x)).float().norm() / exact(x).float().norm()
    assert 1e-4 < error < 0.1
    assert "recipe='row'" in repr(model[0])


def test_a_layer_of_several_names_stays_one():
    shared = torch.nn.Linear(16, 16)
    model = torch.nn.Sequential(shared, torch.nn.Sequential(shared), torch.nn.Linear(16, 8))
    assert ScaledLinear.replace(model) == ["0", "1.0", "2"]
    assert type(model[0]) is ScaledLinear and model[0] is model[1][0] and model[0].weight is shared.weight


@pytest.mark.usefixtures("_without_kernels")
def test_training_lowers_the_loss(seed):
    torch.manual_seed(seed)
    layer = ScaledLinear(16, 16, dtype=torch.bfloat16)
    target = torch.randn(16, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0)
    x = torch.randn(48, 16).bfloat16()
    losses = []
    for _ in range(6):
        loss = (layer(x) - x.float() @ target.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_under_torch_compile(seed):
    torch.manual_seed(seed)
    layer = ScaledLinear(40, 24, dtype=torch.bfloat16)
    x = torch.randn(2, 9, 40).bfloat16().requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for call in (layer, compiled):
        layer.zero_grad()
        x.grad = None
        y = call(x)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.usefixtures("_without_kernels")
def test_the_output_may_be_changed_in_place():
    x = torch.ones(2, 8, 16).requires_grad_()
    y = scaled_linear(x, torch.ones(4, 16))
    assert not y._is_view()
    y.mul_(2).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 8))


@pytest.mark.usefixtures("_without_kernels")
def test_autocast_decides_the_outputs_dtype():
    x, weight = torch.ones(8, 16), torch.ones(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scaled_linear(x, weight).dtype == torch.bfloat16
    assert scaled_linear(x, weight).dtype == torch.float32


@pytest.mark.usefixtures("_without_kernels")
def test_second_derivatives_are_refused():
    x, weight = torch.ones(8, 16).requires_grad_(), torch.ones(8, 16)
    (gradient,) = torch.autograd.grad(scaled_linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(4, 15)}, r"x has shape \(4, 15\), must be \(…, 16\)"),
        ({"x": torch.ones(4, 16).int()}, "x is torch.int32"),
        ({"weight": torch.ones(8)}, "weight has 1 modes, must have 2 or 3"),
        ({"weight": torch.ones(2, 8, 16)}, r"x has shape \(4, 16\), must be \(2, M, 16\)"),
        ({"bias": torch.ones(7)}, r"bias has shape \(7,\), must be \(8,\)"),
        ({"bias": 1.0}, "bias is a float"),
        (
            {"x": torch.ones(4, 16, device="meta"), "weight": torch.ones(8, 16, device="meta")},
            "x is on meta, must be on a CUDA device",
        ),
        ({"recipe": "rows"}, "recipe is 'rows', must be 'tensor', 'row' or 'block'"),
        ({"grad_dtype": torch.bfloat16}, "grad_dtype is torch.bfloat16"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"x": torch.ones(4, 16), "weight": torch.ones(8, 16), **change}
    with pytest.raises((TypeError, ValueError), match=message):
        kernels_dsl.scaled_linear(**arguments)
