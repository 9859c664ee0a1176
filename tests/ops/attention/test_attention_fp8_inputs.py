"""Quantising Q, K and V for fp8 attention, with and without rotations; kernels run in the emulator."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels_dsl
from kernels_dsl.ops.attention import fp8_inputs
from kernels_dsl.ops.attention.fp8_inputs import rotations
from lowering import emulator
from reference.attention import attention
from reference.quantize import dequantize, quantize, signal_to_noise


@pytest.mark.parametrize("dim", [16, 64, 96, 128, 208, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotations_are_exact(dim, dtype):
    first, second = rotations(dim, dtype, torch.device("cpu"))
    assert torch.equal(first.double() @ second.double().T, torch.eye(dim, dtype=torch.float64))
    spread = first.double() @ first.double().T
    assert torch.equal(spread, torch.eye(dim, dtype=torch.float64) * spread[0, 0])


def test_rotations_of_a_first_call_under_a_mode_serve_others():
    """One that a fake mode or inference mode made is of no use outside."""
    fp8_inputs._kept_rotations.cache_clear()
    q = torch.randn(1, 8, 1, 16).half()
    with FakeTensorMode() as mode:
        assert kernels_dsl.quantize_qkv(*[mode.from_tensor(q)] * 3, rotate=True)["q"].shape == q.shape
    with torch.inference_mode():
        rotations(16, q.dtype, q.device)
    leaf = q.clone().requires_grad_()
    (leaf @ rotations(16, q.dtype, q.device)[0]).sum().backward()
    assert leaf.grad is not None

    def turned(x):
        return x @ rotations(16, x.dtype, x.device)[1]

    assert torch.equal(torch.compile(turned, backend="eager", fullgraph=True)(q), turned(q))


def _with_outliers(seed, length=128, heads=8, dim=64):
    """N(0, 1), and N(0, 100) added to one element in a thousand of Q and K."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(1, length, heads, dim, generator=generator) for _ in range(3)]
    for x in found[:2]:
        chosen = torch.rand(x.shape, generator=generator) < 1e-3
        x += 10 * torch.randn(x.shape, generator=generator) * chosen
    return tuple(x.bfloat16() for x in found)


def test_rotated_outliers_cost_less(seed):
    """Both products being exact, and V too."""
    q, k, v = _with_outliers(seed)
    expected, _ = attention(q, k, v)
    found = []
    for first, second in ((torch.eye(64), torch.eye(64)), rotations(64, q.dtype, q.device)):
        exact = []
        for x, rotation in ((q, first), (k, second)):
            values, scale = quantize((x @ rotation.to(x.dtype)).transpose(1, 2), scaling="matrix")
            exact.append(dequantize(values, scale, "matrix").transpose(1, 2))
        found.append(signal_to_noise(attention(*exact, v.double())[0], expected))
    assert found[1] > found[0] + 0.3


@pytest.mark.parametrize(("dim", "length"), [(64, 150), (160, 256)])
def test_scales_of_blocks(dim, length, seed):
    """A block of tiny values keeps its digits beside one of large ones."""
    q, k, v = _with_outliers(seed, length, heads=1, dim=dim)
    v[:, 128:] *= 2.0**-18
    with emulator.run(arch="sm_90a", check=False):
        made = kernels_dsl.quantize_qkv(q, k, v, scaling="block")
    assert made["k_descale"].shape == made["v_descale"].shape == (1, 1, -(-length // 128), 1)
    again = made["v"].double() * made["v_descale"].repeat_interleave(128, 2)[:, :, :length].transpose(1, 2)
    assert signal_to_noise(again[:, 128:], v[:, 128:].double()) > 25


def test_factors_of_blocks_where_there_is_no_key():
    """The results of quantize_qkv for no keys are taken: the output is 0."""
    q = torch.randn(1, 4, 1, 64).bfloat16()
    with emulator.run(arch="sm_90a", check=False):
        made = kernels_dsl.quantize_qkv(q, q[:, :0], q[:, :0], scaling="block")
        out, lse = kernels_dsl.attention_fp8(**made, return_lse=True)
    assert made["k_descale"].shape == (1, 1, 0, 1)
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [({"scaling": "tensor"}, "scaling is 'tensor', must be one of"),
     ({"q": 3}, "q is a int"), ({"k": torch.zeros(1, 2, 3, 16)}, "k is torch.float32, must be torch.bf"),
     ({"v": torch.zeros(2, 3, 16).half()}, r"v has shape \(2, 3, 16\), must have 4 modes")],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    good = dict.fromkeys("qkv", torch.zeros(1, 2, 3, 16).bfloat16())
    with pytest.raises((TypeError, ValueError), match=message):
        kernels_dsl.quantize_qkv(**{**good, **change})
