"""Helpers of the tests of `scaled_linear`: its three products against those of the quantised operands."""

from __future__ import annotations

import torch

import kernels_dsl
from reference import quantize as quantization
from reference import scaled_gemm as reference
from reference import tolerance

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DECIBELS = (26.0, 22.0)
"""Relative errors of N(0, 1) data: both operands e4m3 (the output), one e5m2 (gradients)."""


def product(
    left: tuple[torch.Tensor, torch.dtype],
    right: tuple[torch.Tensor, torch.dtype],
    recipe: str,
    found: torch.Tensor,
    what: str,
    bias: torch.Tensor | None = None,
) -> None:
    """`found` is left @ rightᵀ + bias of quantised operands, by the tolerance rule."""
    scalings = ("1x128", "1x128" if what == "gradient of weight" else "128x128")
    scalings = scalings if recipe == "block" else (recipe, recipe)
    (a, scale_a), (b, scale_b) = (
        quantization.quantize(x, dtype, scaling=scaling)
        for (x, dtype), scaling in zip((left, right), scalings)
    )
    arguments = (a, b.mT, scale_a, scale_b if recipe == "tensor" else scale_b.mT)
    groups = None
    if recipe == "block":
        groups = ((1, 128), (128, 1 if what == "gradient of weight" else 128))
    exact = reference.scaled_gemm(*arguments, bias=bias, groups=groups)
    peer = reference.as_tensor_cores(
        *arguments, bias=bias, groups=groups, fast=what == "output", out_dtype=found.dtype
    )
    tolerance.check(found, exact, peer, case=what)


def check(
    lead: tuple[int, ...],
    features: tuple[int, int],
    recipe: str,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.bfloat16),
    *,
    seed: int,
    device: str = "cpu",
    grad_dtype: torch.dtype = E5M2,
) -> None:
    """Output and gradients of x (*lead, K) and W (N, K), features (K, N), dtypes (of x, of W and bias)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    k, n = features
    x = normal(*lead, k, dtype=dtypes[0]).requires_grad_()
    weight = normal(n, k, dtype=dtypes[1]).requires_grad_()
    bias = normal(n, dtype=dtypes[1]).requires_grad_()
    y = kernels_dsl.scaled_linear(x, weight, bias, recipe=recipe, grad_dtype=grad_dtype)
    gradient = normal(*lead, n, dtype=dtypes[0])
    y.backward(gradient)
    assert y.shape == (*lead, n) and y.dtype == dtypes[0]
    assert x.grad.dtype == dtypes[0] and weight.grad.dtype == bias.grad.dtype == dtypes[1]

    rows, flat, g = x.detach().reshape(-1, k), y.detach().reshape(-1, n), gradient.reshape(-1, n)
    w, b = weight.detach(), bias.detach()
    d_x, d_w = x.grad.reshape(-1, k), weight.grad
    product((rows, E4M3), (w, E4M3), recipe, flat, "output", b)
    product((g, grad_dtype), (w.mT.contiguous(), E4M3), recipe, d_x, "gradient of x")
    product((g.mT.contiguous(), grad_dtype), (rows.mT.contiguous(), E4M3), recipe, d_w, "gradient of weight")
    tolerance.check(bias.grad, g.double().sum(0), g.sum(0), case="gradient of bias")

    clean = (rows.double() @ w.double().T + b.double(), g.double() @ w.double(), g.double().T @ rows.double())
    for found, exact, least in zip((flat, d_x, d_w), clean, (DECIBELS[0], DECIBELS[1], DECIBELS[1])):
        assert quantization.signal_to_noise(found, exact) > least


def check_groups(
    lead: tuple[int, int], features: tuple[int, int], recipe: str, *, seed: int, device: str = "cpu"
) -> None:
    """A matrix for each weight, lead (L, M): what each pair gives by itself, but for the order of sums."""

    def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
        return float((found.double() - expected.double()).norm() / expected.double().norm()) < 2e-3

    generator = torch.Generator().manual_seed(seed)
    k, n = features
    x, weight, gradient = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((*lead, k), (lead[0], n, k), (*lead, n))
    )
    x.requires_grad_()
    weight.requires_grad_()
    y = kernels_dsl.scaled_linear(x, weight, recipe=recipe)
    y.backward(gradient)
    for group in range(lead[0]):
        pair = [t[group].detach().requires_grad_() for t in (x, weight)]
        alone = kernels_dsl.scaled_linear(*pair, recipe=recipe)
        alone.backward(gradient[group])
        assert same(y[group], alone)
        assert all(same(t.grad[group], p.grad) for t, p in zip((x, weight), pair))
