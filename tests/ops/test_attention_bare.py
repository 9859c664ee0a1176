"""The short way of repeated calls: the same arguments for the kernel, and an output of the same layout."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops import attention, attention_plan
from kernels_dsl.ops.target import Target


@pytest.fixture
def launched(monkeypatch):
    """The arguments of each launch, on tensors that pass for those of an H200."""
    calls = []
    target = Target(DEVICES_BY_ARCH["sm_90a"], -1)
    monkeypatch.setattr(attention, "target_of", lambda q: target)
    monkeypatch.setattr(attention, "_PLANS", {})
    monkeypatch.setattr(attention, "_BARE", {})
    monkeypatch.setattr(attention_plan.Launch, "__call__", lambda self, *args: calls.append(("first", args)))
    monkeypatch.setattr(
        attention_plan.Launch, "direct", lambda self: lambda *args: calls.append(("again", args))
    )
    return calls


def _described(args):
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in args]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [100, 5000])
@pytest.mark.parametrize("kind", ["contiguous", "sliced", "wider values", "transposed", "heads first"])
def test_the_second_call_launches_what_the_first_does(launched, kind, length, causal):
    heads, dim = 8, 64
    q, k, v = (torch.empty(2, length, heads, dim, dtype=torch.bfloat16) for _ in range(3))
    call = kernels_dsl.attention
    if kind == "sliced":
        q = torch.empty(2, length, heads, 2 * dim, dtype=torch.bfloat16)[..., :dim]
    elif kind == "wider values":
        v = torch.empty(2, length, heads, 2 * dim, dtype=torch.bfloat16)
    elif kind == "transposed":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        call = kernels_dsl.scaled_dot_product_attention
    elif kind == "heads first":
        q, k, v = (x.view(2, heads, length, dim) for x in (q, k, v))
        call = kernels_dsl.scaled_dot_product_attention
    option = {"causal": causal} if call is kernels_dsl.attention else {"is_causal": causal}
    first, second = call(q, k, v, **option), call(q, k, v, **option)
    (way, args), (way_again, args_again) = launched
    assert (way, way_again) == ("first", "again")
    assert _described(args) == _described(args_again)
    assert (first.shape, first.stride()) == (second.shape, second.stride())
    assert [x.data_ptr() for x in args_again[:4]] == [x.data_ptr() for x in (q, k, v, second)]
    # A counter of tiles is only taken where a CTA may get more than one.
    assert (args[-2] is not None) == (causal and length == 5000)


def test_other_tensors_get_plans_of_their_own(launched):
    """Sizes, alignment and strides are part of what a plan is kept for."""
    storage = torch.empty(2 * 100 * 4 * 64 + 8, dtype=torch.bfloat16)
    aligned = storage[: 2 * 100 * 4 * 64].view(2, 100, 4, 64)
    shifted = storage[4 : 2 * 100 * 4 * 64 + 4].view(2, 100, 4, 64)
    kernels_dsl.attention(aligned, aligned, aligned)
    for tensors in ((shifted, aligned, aligned), (aligned, shifted, aligned), (aligned, aligned, shifted)):
        launched.clear()
        kernels_dsl.attention(*tensors)
        ((way, args),) = launched
        assert way == "first"
        assert all(x.data_ptr() % 16 == 0 for x in args[:3])
