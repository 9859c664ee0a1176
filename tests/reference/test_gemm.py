"""The reference GEMM against loops, and its epilogue against the formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from reference import tolerance
from reference.gemm import gemm, gemm_same_dtype, round_to_tf32


def test_against_loops(seed):
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    out = gemm(a, b)
    assert out.dtype == torch.float64
    for i in range(3):
        for j in range(5):
            assert out[i, j].item() == pytest.approx(sum(a[i, k].item() * b[k, j].item() for k in range(4)))


def test_epilogue_order(seed):
    a, b, c, residual = torch.randn(2, 3), torch.randn(3, 2), torch.randn(2, 2), torch.randn(2, 2)
    bias = torch.randn(2)
    out = gemm(a, b, c, alpha=2.0, beta=-0.5, bias=bias, activation="relu", residual=residual)
    inner = 2.0 * (a.double() @ b.double()) - 0.5 * c.double() + bias.double()
    assert torch.equal(out, inner.clamp(min=0.0) + residual.double())


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("gelu", lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("silu", lambda x: x / (1 + math.exp(-x))),
    ],
)
def test_activations(name, formula):
    points = torch.linspace(-4, 4, 17, dtype=torch.float64)[:, None]
    out = gemm(points, torch.ones(1, 1), activation=name)
    for point, value in zip(points.flatten().tolist(), out.flatten().tolist()):
        assert value == pytest.approx(formula(point), abs=1e-14)


def test_unknown_activation_is_named():
    with pytest.raises(ValueError, match="activation is 'tanh', must be None or one of gelu"):
        gemm(torch.ones(1, 1), torch.ones(1, 1), activation="tanh")


def test_batches_broadcast_and_k_zero(seed):
    assert gemm(torch.randn(5, 2, 3), torch.randn(1, 3, 4)).shape == (5, 2, 4)
    empty = gemm(torch.randn(2, 0), torch.randn(0, 3), bias=torch.ones(3))
    assert torch.equal(empty, torch.ones(2, 3).double())


def test_beta_zero_does_not_read_c():
    nan = torch.full((2, 2), torch.nan)
    assert torch.isfinite(gemm(torch.ones(2, 2), torch.ones(2, 2), nan, beta=0.0)).all()


def test_same_dtype_rounds_as_the_output_does(seed):
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 64).bfloat16()
    exact = gemm(a, b)
    narrow = (gemm_same_dtype(a, b) - exact).abs().max()
    wide = (gemm_same_dtype(a, b, out_dtype=torch.float32) - exact).abs().max()
    assert gemm_same_dtype(a, b).dtype == torch.bfloat16
    assert wide < narrow / 100


def test_float32_is_rounded_to_tf32():
    x = torch.tensor([1.0 + 2**-10, 1.0 + 2**-11, 1.0 + 2**-12, -(1.0 + 2**-11), float("inf")])
    assert round_to_tf32(x).tolist() == [1.0 + 2**-10, 1.0 + 2**-10, 1.0, -(1.0 + 2**-10), float("inf")]
    one = torch.ones(1, 1)
    assert gemm_same_dtype(x[1].reshape(1, 1), one).item() == 1.0 + 2**-10
    assert gemm_same_dtype(x[1].reshape(1, 1), one, tf32=False).item() == x[1].item()
    with pytest.raises(ValueError, match="float64"):
        round_to_tf32(x.double())


def test_truncation_to_tf32_is_over_the_tolerance(seed):
    """The tensor cores' cutting of float32 words that nobody has rounded is an error, not a tolerance."""
    a, b = torch.randn(64, 56), torch.randn(56, 72)
    cut_a, cut_b = ((x.view(torch.int32) & -(1 << 13)).view(torch.float32) for x in (a, b))
    exact, peer = gemm(a, b), gemm_same_dtype(a, b)
    assert tolerance.check(round_to_tf32(a) @ round_to_tf32(b), exact, peer).ok
    with pytest.raises(tolerance.ToleranceError):
        tolerance.check(cut_a @ cut_b, exact, peer)


@pytest.mark.parametrize("shapes", [((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((1, 5, 7), (4, 7, 3))])
def test_tf32_gradients_are_products_of_rounded_operands(shapes, seed):
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    value = gemm_same_dtype(a, b, activation="silu")
    weight = torch.randn_like(value)
    got = torch.autograd.grad(value, (a, b), weight)
    exact = torch.autograd.grad(gemm(a, b, activation="silu"), (a, b), weight.double())
    full = torch.autograd.grad(gemm_same_dtype(a, b, activation="silu", tf32=False), (a, b), weight)
    for mine, true, fine in zip(got, exact, full):
        error, fine_error = (mine - true).abs().max(), (fine - true).abs().max()
        assert mine.shape == true.shape and 10 * fine_error < error < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_on_a_gpu_is_close_to_float64(dtype, seed):
    a, b = torch.randn(3, 40, 64, device="cuda").to(dtype), torch.randn(64, 48, device="cuda").to(dtype)
    wide = gemm_same_dtype(a, b, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert (wide - gemm(a, b)).abs().max() < 1e-4
    flat = gemm_same_dtype(a[0], b, out_dtype=torch.float32)
    assert (flat - wide[0]).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [True, False])
def test_the_switch_for_tf32_is_neither_heeded_nor_changed(allowed, seed, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    a, b = torch.randn(256, 512, device="cuda"), torch.randn(512, 256, device="cuda")
    for tf32 in (True, False):
        on_gpu = gemm_same_dtype(a, b, tf32=tf32).cpu()
        assert (on_gpu - gemm_same_dtype(a.cpu(), b.cpu(), tf32=tf32)).abs().max() < 1e-4
    assert torch.backends.cuda.matmul.allow_tf32 == allowed
