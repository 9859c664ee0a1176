"""The reference GEMM against loops, and its epilogue against the formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from reference.gemm import gemm, gemm_same_dtype, round_to_tf32, truncate_to_tf32


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


def test_tf32_operands_lose_thirteen_bits():
    x = torch.tensor([1.0 + 2**-10, 1.0 + 2**-11, 1.0 + 2**-12, -(1.0 + 2**-11), float("inf")])
    assert round_to_tf32(x).tolist() == [1.0 + 2**-10, 1.0 + 2**-10, 1.0, -(1.0 + 2**-10), float("inf")]
    assert truncate_to_tf32(x).tolist() == [1.0 + 2**-10, 1.0, 1.0, -1.0, float("inf")]
    one = torch.ones(1, 1)
    assert gemm_same_dtype(x[1].reshape(1, 1), one).item() == 1.0
    assert gemm_same_dtype(x[1].reshape(1, 1), one, tf32=False).item() == x[1].item()
    with pytest.raises(ValueError, match="float64"):
        round_to_tf32(x.double())


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
def test_tf32_is_asked_for_and_the_switch_is_left_alone(seed):
    a, b = torch.randn(256, 512, device="cuda"), torch.randn(512, 256, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    exact = gemm(a, b)
    coarse, fine = ((gemm_same_dtype(a, b, tf32=tf32) - exact).abs().max() for tf32 in (True, False))
    assert coarse > 5 * fine
    assert torch.backends.cuda.matmul.allow_tf32 == before
