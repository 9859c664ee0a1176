"""`scaled_linear` on a GPU: sizes of layers, torch.compile, CUDA graphs and training."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl import ScaledLinear, scaled_linear
from kernels_dsl.nn.scaled_linear import RECIPES
from tests.nn import scaled_linear_cases

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("lead", "features"), [((4, 256), (768, 512)), ((1000,), (520, 264)), ((1,), (64, 128))]
)
def test_output_and_gradients(recipe, lead, features, seed):
    scaled_linear_cases.check(lead, features, recipe, seed=seed, device="cuda")


@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_of_equal_size(recipe, seed):
    scaled_linear_cases.check_groups((3, 200), (264, 384), recipe, seed=seed, device="cuda")


def test_master_weights_in_float32(seed):
    dtypes = (torch.bfloat16, torch.float32)
    scaled_linear_cases.check((512,), (256, 384), "row", dtypes, seed=seed, device="cuda")
    e4m3 = torch.float8_e4m3fn
    scaled_linear_cases.check((5,), (24, 17), "row", dtypes, seed=seed, device="cuda", grad_dtype=e4m3)


def test_under_torch_compile(seed):
    torch.manual_seed(seed)
    layer = ScaledLinear(256, 384, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(4, 128, 256, device="cuda").bfloat16().requires_grad_()
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        layer.zero_grad()
        x.grad = None
        y = call(x)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_forward_in_a_cuda_graph(seed):
    torch.manual_seed(seed)
    layer = ScaledLinear(256, 384, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(128, 256, device="cuda").bfloat16()
    with torch.no_grad():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.neg_()
        graph.replay()
        assert torch.equal(y, layer(x)) and not torch.equal(y, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_follows_bf16(recipe, seed):
    """A small network learns about as well as with unquantised products."""
    losses = {}
    for scaled in (False, True):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
        ).cuda()
        if scaled:
            assert ScaledLinear.replace(model, recipe=recipe) == ["0", "2"]
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x = torch.randn(1024, 64, device="cuda")
        target = torch.tanh(x @ torch.randn(64, 64, device="cuda") / 8)
        for _ in range(100):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[scaled] = (float(loss.detach()), float(target.square().mean()))
    assert losses[True][0] < 2.0 * losses[False][0] + 0.02 * losses[True][1]
    assert losses[True][0] < 0.2 * losses[True][1]


def test_large_layers_against_unquantised(seed):
    torch.manual_seed(seed)
    x = torch.randn(4096, 2048, device="cuda").bfloat16()
    weight = torch.randn(1024, 2048, device="cuda").bfloat16()
    y = scaled_linear(x, weight)
    exact = x.double() @ weight.double().T
    assert float((y - exact).norm() / exact.norm()) < 10 ** (-scaled_linear_cases.DECIBELS[0] / 20)
