"""Kernels of packages from the index, unmodified, in the emulator: quack and FlashAttention-4.

The extra ``strangers`` installs them. Their results are compared with PyTorch's, and none has a finding.
`test_strangers.py` runs this file in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowering import emulator
from tests.lowering.emulator.no_triton import without_triton

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument .* JitArgument")


@pytest.fixture(scope="module")
def gpu() -> Iterator[emulator.Session]:
    """One GPU for all, with few SMs: persistent kernels take several tiles."""
    without_triton()
    with emulator.run("sm_90a", sms=4, torch_cuda=True) as session:
        yield session


@pytest.fixture(autouse=True)
def _seeded(gpu: emulator.Session) -> None:
    torch.manual_seed(0)


def _close(got: Any, expected: Any, atol: float) -> None:
    torch.testing.assert_close(got.float(), expected.float(), atol=atol, rtol=2**-8)


def test_softmax(gpu: emulator.Session) -> None:
    import quack

    x = torch.randn(9, 256, device="cuda", dtype=torch.bfloat16)
    _close(quack.softmax(x), torch.softmax(x.float(), -1), 1e-3)


def test_rms_norm(gpu: emulator.Session) -> None:
    import quack

    x = torch.randn(9, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(256, device="cuda")
    _close(quack.rmsnorm(x, weight), torch.nn.functional.rms_norm(x.float(), (256,), weight, 1e-6), 1e-3)


def test_cross_entropy(gpu: emulator.Session) -> None:
    import quack

    x = torch.randn(9, 256, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 256, (9,), device="cuda")
    got = quack.cross_entropy(x, target, reduction="none")
    _close(got, torch.nn.functional.cross_entropy(x.float(), target, reduction="none"), 1e-5)


def test_gemm(gpu: emulator.Session) -> None:
    from quack.gemm_interface import gemm

    a = torch.randint(-2, 3, (200, 72), device="cuda").bfloat16()
    b = torch.randint(-2, 3, (72, 136), device="cuda").bfloat16()
    assert torch.equal(gemm(a, b, tuned=False).float(), (a.float() @ b.float()).bfloat16().float())


def test_attention_and_its_gradients(gpu: emulator.Session) -> None:
    from flash_attn.cute import flash_attn_func

    q, k, v = (torch.randn(1, 128, 1, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True)[0]
    wide = [t.detach().float().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    _close(out, expected.transpose(1, 2), 1e-2)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient.float().transpose(1, 2))
    for got, right in zip((q, k, v), wide):
        _close(got.grad, right.grad.transpose(1, 2), 3e-2)
