"""`deterministic=` reaches the backward kernels by every way in, and torch's own switch overrides it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernels_dsl
from kernels_dsl import flash_attn
from kernels_dsl.flash_attn import cute as flash_attn_4
from kernels_dsl.integrations import transformers_attention
from kernels_dsl.ops.attention import attention as module
from kernels_dsl.ops.attention import backward
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.gradient_cases import check_gradients, leaves

FREE, FIXED = {"deterministic": False}, {"deterministic": True}


@pytest.fixture
def modes(monkeypatch) -> list[bool]:
    """The modes of the backward passes that have run; they compute nothing."""
    found = []

    def run(plan: Any, forward: Any, *_: Any) -> backward.Gradients:
        found.append(plan.config.deterministic)
        return backward.Gradients(*map(torch.zeros_like, (forward.q, forward.k, forward.v)), None)

    monkeypatch.setattr(backward.BackwardPlan, "run", run)
    return found


def test_a_forced_family_is_that_of_the_gradients_too(monkeypatch, seed):
    families, choose = [], backward.choose_tile

    def recorded(*arguments: Any) -> backward.BackwardConfig:
        families.append(choose(*arguments).family)
        return choose(*arguments)

    monkeypatch.setattr(backward, "choose_tile", recorded)
    with emulator.run(arch="sm_90a"):
        check_gradients(leaves((2, 1), (40, 50), (32, 32), seed), Masking(), family="sm80")
    assert families == ["sm80"]


@pytest.fixture
def emulated():
    torch.compiler.reset()
    with emulator.run(arch="sm_90a", check=False):
        yield


def _packed(function: Any) -> Any:
    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        starts = torch.tensor([0, q.shape[1]], dtype=torch.int32)
        return function(q[0], k[0], v[0], starts, starts, q.shape[1], q.shape[1], **options)

    return call


def _cute_packed(q: Any, k: Any, v: Any, **options: Any) -> Any:
    starts = torch.tensor([0, q.shape[1]], dtype=torch.int32)
    at = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    return flash_attn_4.flash_attn_varlen_func(q[0], k[0], v[0], **at, **options)


def _layer(q: Any, k: Any, v: Any, **options: Any) -> Any:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return transformers_attention.attention_forward(None, *heads_first, None, is_causal=False, **options)[0]


CALLS = {
    "attention": (kernels_dsl.attention, True),
    "attention with more": (lambda *x, **o: kernels_dsl.attention(*x, return_lse=True, **o)[0], True),
    "scaled_dot_product_attention": (kernels_dsl.scaled_dot_product_attention, True),
    "attention_varlen": (_packed(kernels_dsl.attention_varlen), True),
    "compiled": (torch.compile(kernels_dsl.attention, fullgraph=True, backend="aot_eager"), True),
    "transformers": (_layer, True),
    "flash_attn_func": (flash_attn.flash_attn_func, False),
    "flash_attn_varlen_func": (_packed(flash_attn.flash_attn_varlen_func), False),
    "cute.flash_attn_func": (lambda *x, **o: flash_attn_4.flash_attn_func(*x, **o)[0], False),
    "cute.flash_attn_varlen_func": (lambda *x, **o: _cute_packed(*x, **o)[0], False),
}
"""Name -> the call, and its mode by default: FlashAttention's functions have FlashAttention's."""


@pytest.mark.parametrize("name", CALLS)
def test_every_call_passes_it_on(emulated, modes, name, seed):
    call, default = CALLS[name]
    tensors = leaves((1, 1), (8, 8), (64, 64), seed)
    for options in ({}, FIXED, FREE):
        call(*tensors, **options).sum().backward()
    assert modes == [default, True, False]


@pytest.mark.parametrize("name", ["attention", "compiled"])
def test_torchs_switch_overrides_it(emulated, modes, name, seed):
    tensors = leaves((1, 1), (8, 8), (64, 64), seed)
    call = CALLS[name][0]
    outputs = [call(*tensors, **FREE) for _ in range(2)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if name == "compiled":  # whose backward pass must have been traced with the switch on
            outputs[0] = call(*tensors, **FREE)
        outputs[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    outputs[1].sum().backward()
    assert modes == [True, False]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_free_order(arch, seed):
    with emulator.run(arch=arch):
        check_gradients(leaves((2, 1), (70, 150), (64, 64), seed), Masking(right=0), causal=True, **FREE)


def test_caches_of_calls_tell_the_modes_apart(emulated, monkeypatch, seed):
    keys, key_of = [], module._key
    monkeypatch.setattr(module, "_key", lambda *a: keys.append(key_of(*a)) or keys[-1])
    q, k, v = leaves((1, 1), (8, 8), (64, 64), seed)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    for options in ({}, FREE):
        module.attention(q, k, v, **options)
        module.attention(q, k, v, return_lse=True, **options)
        module.scaled_dot_product_attention(q, k, v, **options)
        module.attention_varlen(q[0], k[0], v[0], starts, starts, 8, **options)
    assert len(keys) == len(set(keys)) == 8


@pytest.mark.parametrize("call", [kernels_dsl.attention, kernels_dsl.scaled_dot_product_attention])
@pytest.mark.parametrize("value", [0, "no", torch.tensor(True)])
def test_what_is_no_boolean(call, value, seed):
    tensors = leaves((1, 1), (8, 8), (64, 64), seed)
    with pytest.raises(TypeError, match=r"deterministic is .*, must be True or False"):
        call(*tensors, deterministic=value)
    if call is kernels_dsl.attention:
        assert "must be True or False" in kernels_dsl.attention_supports(*tensors, deterministic=value)


@pytest.mark.gpu
def test_repeated_calls_keep_their_mode(modes, seed):
    tensors = [x.detach().cuda().requires_grad_() for x in leaves((2, 1), (70, 150), (64, 64), seed)]
    for _ in range(3):
        for options in ({}, FREE):
            kernels_dsl.attention(*tensors, **options).sum().backward()
    assert modes == [True, False] * 3
