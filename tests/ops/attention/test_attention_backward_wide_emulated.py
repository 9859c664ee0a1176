"""Gradients of attention with head dimensions above 128 in the emulator, against float64 autograd.

Several tiles of queries and keys, which the kernels of both families cut differently. TEST_ALL_KERNELS=1
takes more head dimensions, masks and block lists.
"""

from __future__ import annotations

import os

import pytest
import torch

import kernels_dsl
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.gradient_cases import check_gradients, check_packed, leaves

ALL = os.environ.get("TEST_ALL_KERNELS") == "1"
ARCHS = ("sm_90a", "sm_89")


@pytest.mark.parametrize(
    ("arch", "heads", "lengths", "dims"),
    [("sm_90a", (2, 1), (66, 70), (256, 256)), ("sm_89", (2, 1), (40, 35), (256, 256))]
    + [(arch, (1, 1), (70, 66), dims) for arch in (*ARCHS, "sm_80") if ALL
       for dims in ((136, 200), (64, 256), (256, 40), (192, 192), (256, 256))],
)  # fmt: skip
def test_grouped_heads_causal(arch, heads, lengths, dims, seed):
    with emulator.run(arch=arch):
        check_gradients(leaves(heads, lengths, dims, seed), Masking(right=0), causal=True)


@pytest.mark.parametrize("arch", ARCHS if ALL else ("sm_90a",))
def test_packed(arch, seed):
    with emulator.run(arch=arch):
        check_packed((40, 0, 20), (70, 10, 0), (66, 10, 0), (192, 128), seed)


@pytest.mark.parametrize("arch", ARCHS if ALL else ("sm_89",))
def test_softcap_and_a_mask(arch, seed):
    """Bent scores: the factor of dS is not P."""
    bias = torch.randn(1, 1, 40, 66, generator=torch.Generator().manual_seed(seed))
    with emulator.run(arch=arch):
        tensors = leaves((1, 1), (40, 66), (136, 192), seed, torch.float16)
        check_gradients(tensors, Masking(bias=bias.double(), softcap=3.0), softcap=3.0, mask=bias)


@pytest.mark.parametrize("arch", ARCHS if ALL else ("sm_90a",))
@pytest.mark.parametrize("asked", ["q", "kv"])
def test_what_is_asked_for_alone(arch, asked, seed):
    """Equals what a call for all of them gives, bit by bit."""
    tensors = leaves((1, 1), (34, 20), (40, 136), seed)
    with emulator.run(arch=arch):
        whole = torch.autograd.grad(kernels_dsl.attention(*tensors).sum(), tensors)
        parts = [x.detach().requires_grad_(name in asked) for name, x in zip("qkv", tensors)]
        wanted = [x for x in parts if x.requires_grad]
        found = torch.autograd.grad(kernels_dsl.attention(*parts).sum(), wanted)
    expected = [x for name, x in zip("qkv", whole) if name in asked]
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
