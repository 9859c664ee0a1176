"""The short way of repeated calls: the same arguments for the kernel, and an output of the same layout."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops import operation
from kernels_dsl.ops.attention import plan as attention_plan
from kernels_dsl.ops.attention.fp8_plan import ATTENTION_FP8
from kernels_dsl.ops.attention.operation import ATTENTION
from kernels_dsl.ops.target import Target


@pytest.fixture
def launched(monkeypatch):
    """The arguments of each launch, on tensors that pass for those of an H200."""
    calls = []
    target = Target(DEVICES_BY_ARCH["sm_90a"], -1)
    monkeypatch.setattr(operation, "target_of", lambda *_: target)
    for used in (ATTENTION, ATTENTION_FP8):
        monkeypatch.setattr(used, "calls", {})
        monkeypatch.setattr(used, "plans", {})
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


def _fp8(*shape):
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


DESCALES = {
    "none": (None, None, None),
    "one": ((1,), (1, 1, 1, 1), (1, 1)),
    "heads": ((2, 8), (2, 4, 1, 1), (2, 4, 1)),
    "blocks of keys": (None, (2, 4, 2), (2, 4, 2, 1)),
}


@pytest.mark.parametrize("kind", list(DESCALES))
@pytest.mark.parametrize("causal", [False, True])
def test_fp8_the_second_call_launches_what_the_first_does(launched, kind, causal):
    q, k, v = _fp8(2, 100, 8, 64), _fp8(2, 200, 4, 64), _fp8(2, 200, 4, 32)
    descales = [None if shape is None else torch.ones(shape) for shape in DESCALES[kind]]
    options = dict(zip(("q_descale", "k_descale", "v_descale"), descales), causal=causal)
    for _ in range(2):
        kernels_dsl.attention_fp8(q, k, v, **options)
    (way, args), (way_again, args_again) = launched
    assert (way, way_again) == ("first", "again")
    assert _described(args) == _described(args_again)
    assert [x.data_ptr() for x in args_again[:3]] == [x.data_ptr() for x in (q, k, v)]
    assert all(x is y for x, y in zip(args_again[6:9], descales))


def test_fp8_other_arguments_go_the_long_way(launched):
    """A cached call does not hide an error, an option, or a tensor that must be prepared."""
    x, heads = _fp8(2, 100, 4, 64), torch.ones(2, 4)
    kernels_dsl.attention_fp8(x, x, x, q_descale=heads)
    launched.clear()
    with pytest.raises(ValueError, match="q_descale is"):
        kernels_dsl.attention_fp8(x, x, x, q_descale=torch.ones(2, 3))
    with pytest.raises(TypeError, match="k is a NoneType"):
        kernels_dsl.attention_fp8(x, None, x, q_descale=heads)
    with pytest.raises(ValueError, match="out shares memory with v, must be a tensor of its own"):
        both = torch.empty(2, 100, 4, 128, dtype=x.dtype)
        kernels_dsl.attention_fp8(x, x, both[..., :64], out=both.view(torch.bfloat16))
    assert not launched
    kernels_dsl.attention_fp8(x, x, x, q_descale=torch.ones(()))
    kernels_dsl.attention_fp8(x, x, x, q_descale=heads, return_lse=True)
    kernels_dsl.attention_fp8(x, x, x.mT.contiguous().mT, q_descale=heads)
    assert [way for way, _ in launched] == ["first"] * 3
    (_, one), (_, with_lse), (_, strided) = launched
    assert (one[6].shape, with_lse[5].shape, strided[2].stride(-1)) == ((1,), (2, 4, 100), 1)


@pytest.mark.parametrize("way", ["no batch", "autocast"])
def test_calls_that_become_plain_ones_are_found_again(launched, way):
    """Tensors that the call makes of its arguments, for three modes or autocast's dtype, are as any."""
    dtype = torch.float32 if way == "autocast" else torch.bfloat16
    q, k, v = (torch.empty(2, 4, 100, 64, dtype=dtype) for _ in range(3))
    if way == "no batch":
        q, k, v = q[0], k[0], v[0]
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        results = [kernels_dsl.scaled_dot_product_attention(q, k, v) for _ in range(3)]
        if way == "autocast":
            results += [kernels_dsl.attention(q, k, v) for _ in range(3)]
    assert [way for way, _ in launched] == ["first", "again", "again"] * (len(results) // 3)
    assert {(x.shape, x.dtype) for x in results} == {(q.shape, torch.bfloat16)}
