"""The kernel of a gate's gradient, in the emulator; and gradients of `gemm_gated` by it."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.ops.gemm.gated_gradient import gate_gradient
from lowering import emulator
from reference import tolerance
from reference.inputs import normal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _check(
    arch: str, name: str, shape: tuple[int, ...], kind: torch.dtype, dtype: torch.dtype, factor: float = 2.0
) -> None:
    z = 4 * normal(shape, FP32, seed=1)
    gradient = normal((*shape[:-1], shape[-1] // 2), FP32, seed=2).to(kind)
    z = z.to(kind)
    with emulator.run(arch=arch) as session:
        found = gate_gradient(gradient, z, name, dtype)
    assert not session.reports
    assert found.dtype == dtype and found.shape == z.shape
    exact = z.double().requires_grad_()
    (want,) = torch.autograd.grad(GATES[name].of_pairs(exact), exact, gradient.double())
    same = GATES[name].backward(gradient.float(), z.float()).to(dtype)
    tolerance.check(found, want, same, factor=factor, case=f"{name} {shape} {kind}")


@pytest.mark.parametrize("name", list(GATES))
@pytest.mark.parametrize("kind", [BF16, FP32])
def test_every_gate(name: str, kind: torch.dtype) -> None:
    """In float32 the hardware's exp2 shows, 2 ulp of it times the exponent; products are far from that."""
    _check("sm_90a", name, (5, 38), kind, kind, 2.0 if kind is BF16 else 8.0)


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [((9, 134), BF16, BF16), ((2, 3, 10), FP16, FP16), ((1, 2), FP32, BF16), ((40, 64), BF16, FP32)],
)
def test_sizes_and_dtypes(shape: tuple[int, ...], kind: torch.dtype, dtype: torch.dtype) -> None:
    _check("sm_89", "swiglu", shape, kind, dtype)


@pytest.mark.parametrize("name", ["swiglu", "swiglu_oai"])
def test_nan_and_limits(name: str) -> None:
    """NaN stays in its pair; large values give what PyTorch gives."""
    z = torch.tensor([[float("nan"), 1.0, 2.0, float("nan"), 300.0, 7.0, -300.0, -7.0, 7.0, 8.0, 8.0, 0.5]])
    gradient = torch.full((1, 6), 2.0)
    with emulator.run(arch="sm_90a") as session:
        found = gate_gradient(gradient, z, name, FP32)
    assert not session.reports
    torch.testing.assert_close(found, GATES[name].backward(gradient, z), equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("arch", "family"), [("sm_90a", "sm90"), ("sm_89", "sm80")])
def test_gradients_of_a_product(arch: str, family: str) -> None:
    leaves = [normal(shape, BF16, seed=seed) for seed, shape in enumerate(((40, 64), (64, 96), (96,)), 1)]
    seed = normal((48, 40), BF16, seed=4).T  # of another layout than the result
    tracked = [x.clone().requires_grad_() for x in leaves]
    with emulator.run(arch=arch) as session:
        result = kernels_dsl.gemm_gated(tracked[0], tracked[1], bias=tracked[2], family=family)
        found = torch.autograd.grad(result, tracked, seed)
    assert not session.reports

    def expected(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        a, b, bias = (x.to(dtype).requires_grad_() for x in leaves)
        return torch.autograd.grad(GATES["swiglu"].of_pairs(a @ b + bias), (a, b, bias), seed.to(dtype))

    for got, want, same in zip(found, expected(torch.float64), expected(BF16)):
        tolerance.check(got, want, same)
