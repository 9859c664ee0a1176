"""The short way of repeated calls with fp8 and block-sparse factors: the same launch, no error is hidden."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.problem import H200
from kernels_dsl.ops import launch, operation
from kernels_dsl.ops.attention import fp8_plan, gradient
from kernels_dsl.ops.attention.operation import ATTENTION
from kernels_dsl.ops.bsr import node
from kernels_dsl.ops.bsr.product import BSR_GEMM
from kernels_dsl.ops.bsr.scaled_product import BSR_SCALED_GEMM
from kernels_dsl.ops.gemm import kernels as gemm_kernels
from kernels_dsl.ops.gemm.recorded import Recorded
from kernels_dsl.ops.quantize.arguments import SCALINGS
from kernels_dsl.ops.quantize.operation import QUANTIZE
from kernels_dsl.ops.scaled.arguments import SCALED_GEMM
from kernels_dsl.ops.target import Target
from reference.bsr import random_bsr
from tests.ops.bsr import bsr_cases

FP8 = torch.float8_e4m3fn
ADDRESS = 1 << 22
"""Numbers from here on are addresses: every extent, stride and flag of these calls is below."""


@pytest.fixture
def launched(monkeypatch):
    """The arguments of each launch, on tensors that pass for those of an H200."""
    calls = []
    for module in (launch, gemm_kernels):
        monkeypatch.setattr(module, "launcher_of", lambda *_: (lambda *args: calls.append(args), None))
    monkeypatch.setattr(operation, "target_of", lambda *_: Target(H200, -1))
    for used in (SCALED_GEMM, QUANTIZE):
        monkeypatch.setattr(used, "calls", {})
        monkeypatch.setattr(used, "plans", {})
    monkeypatch.setattr(gemm_kernels, "resident_ctas", lambda *_: 132)
    return calls


def _sparse(dtype):
    made = bsr_cases.sparse_of(random_bsr("power_law", (4, 8), (64, 64), 2, exact=False))
    return kernels_dsl.BsrTensor(made.crow_indices, made.col_indices, made.values.to(dtype), made.shape)


def _tensors():
    generator = torch.Generator().manual_seed(0)
    rows, wide = (torch.randn(shape, generator=generator) for shape in ((128, 256), (512, 64)))
    values, fp8 = rows.to(FP8), _sparse(FP8)
    return {
        "x": rows.bfloat16(), "a": values, "b": values.mT, "bias": torch.ones(128).bfloat16(),
        "one": torch.ones(1).squeeze(), "leaf": torch.ones(()), "scale_a": torch.ones(128, 1),
        "scale_b": torch.ones(1, 128), "out": torch.empty(128, 128).bfloat16(),
        "sparse": _sparse(torch.bfloat16), "wide": wide.bfloat16(), "sparse_fp8": fp8,
        "wide_fp8": wide.mT.contiguous().to(FP8).mT, "blocks": torch.ones(fp8.nnz),
        "wide_out": torch.empty(256, 64).bfloat16(), "quantized": (values, one := torch.ones(())),
        "amax": torch.full((1,), 7.0), "offs": torch.tensor([128], dtype=torch.int32),
        "quantized_both": (values, one, torch.empty(256, 128, dtype=FP8), one),
    }  # fmt: skip


CALLS = {
    "scaled_gemm": lambda t: kernels_dsl.scaled_gemm(t["a"], t["b"], t["scale_a"], t["scale_b"]),
    "scaled_gemm out": lambda t: kernels_dsl.scaled_gemm(
        t["a"], t["b"], t["scale_a"], t["scale_b"], out=t["out"], bias=t["bias"]
    ),
    "scaled_gemm amax": lambda t: kernels_dsl.scaled_gemm(
        t["a"], t["b"], t["scale_a"], t["scale_b"], amax=t["amax"]
    ),
    "scaled_grouped_gemm amax": lambda t: kernels_dsl.scaled_grouped_gemm(
        t["a"], t["b"][None], t["one"], t["leaf"], t["offs"], amax=t["amax"], out=t["out"]
    ),
    "scaled_gemm one scale": lambda t: kernels_dsl.scaled_gemm(t["a"], t["b"], t["one"], t["leaf"]),
    "bsr_gemm": lambda t: kernels_dsl.bsr_gemm(t["sparse"], t["wide"]),
    "bsr_gemm out": lambda t: kernels_dsl.bsr_gemm(t["sparse"], t["wide"], out=t["wide_out"]),
    "bsr_scaled_gemm": lambda t: kernels_dsl.bsr_scaled_gemm(
        t["sparse_fp8"], t["wide_fp8"], t["blocks"], t["one"]
    ),
    "bsr_scaled_gemm out": lambda t: kernels_dsl.bsr_scaled_gemm(
        t["sparse_fp8"], t["wide_fp8"], t["blocks"], t["one"], out=t["wide_out"]
    ),
    **{
        f"quantize {scaling} {transpose}": lambda t, s=scaling, how=transpose: kernels_dsl.quantize(
            t["x"], scaling=s, transpose=how
        )
        for scaling in SCALINGS
        for transpose in (False, "both")
    },
    "quantize given": lambda t: kernels_dsl.quantize(t["x"], scale=t["one"]),
    "quantize out": lambda t: kernels_dsl.quantize(t["x"], out=t["quantized"]),
    "quantize out both": lambda t: kernels_dsl.quantize(t["x"], transpose="both", out=t["quantized_both"]),
}


def _described(value):
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    if isinstance(value, int) and value >= ADDRESS:
        return "address"
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _results(value):
    return tuple(map(_described, value if isinstance(value, tuple) else (value,)))


def _addresses(value):
    if isinstance(value, tuple):
        return {address for item in value for address in _addresses(item)}
    if isinstance(value, int) and value >= ADDRESS:
        return {int(value)}
    return {value.data_ptr()} if isinstance(value, torch.Tensor) else set()


@pytest.mark.parametrize("name", list(CALLS))
def test_the_second_call_launches_what_the_first_does(launched, name, monkeypatch):
    tensors = _tensors()
    first = CALLS[name](tensors)
    with monkeypatch.context() as patch:
        patch.setattr(operation, "signature", None)  # it is found by one comparison
        for used in (BSR_GEMM, BSR_SCALED_GEMM):
            patch.setattr(used, "_build", None)  # and nothing is decided again
        second = CALLS[name](tensors)
    args, again = launched
    assert _described(args) == _described(again)
    assert _results(first) == _results(second)
    given = _addresses(tuple(x for x in tensors.values() if isinstance(x, torch.Tensor)))
    assert _addresses(args) & given == _addresses(again) & given != set()
    results = second if isinstance(second, tuple) else (second,)
    assert _addresses(results) <= _addresses(again) | given


@pytest.mark.parametrize("name", [name for name in CALLS if "amax" in name])
def test_a_largest_magnitude_starts_at_zero_and_shares_nothing(launched, name):
    tensors = _tensors()
    for _ in range(3):
        tensors["amax"].fill_(7.0)
        CALLS[name](tensors)
        assert tensors["amax"] == 0  # no kernel runs here
    count = len(launched)
    for scale in ("one", "leaf") if "grouped" in name else ("scale_a", "scale_b"):
        wrong = {**tensors, "amax": tensors[scale].view(-1)[:1]}
        with pytest.raises(ValueError, match="amax shares memory with scale_"):
            CALLS[name](wrong)
        assert wrong["amax"] == 1 and len(launched) == count
    with pytest.raises(ValueError, match="out shares memory with amax"):
        memory = torch.zeros(128 * 128 + 2, dtype=torch.bfloat16)
        out = memory[: 128 * 128].view(128, 128)
        arguments = (tensors["a"], tensors["b"], tensors["scale_a"], tensors["scale_b"])
        kernels_dsl.scaled_gemm(*arguments, amax=tensors["amax"], out=tensors["out"])
        kernels_dsl.scaled_gemm(*arguments, amax=memory.view(torch.float32)[:1], out=out)


def test_errors_after_a_call_that_was_right(launched):
    t = _tensors()
    for name in ("scaled_gemm", "scaled_gemm out", "bsr_scaled_gemm", "bsr_scaled_gemm out"):
        CALLS[name](t)
    launched.clear()
    with pytest.raises(ValueError, match="scale_a has shape"):
        kernels_dsl.scaled_gemm(t["a"], t["b"], torch.ones(64, 1), t["scale_b"])
    with pytest.raises(TypeError, match="scale_b has dtype"):
        kernels_dsl.scaled_gemm(t["a"], t["b"], t["scale_a"], t["scale_b"].half())
    with pytest.raises(TypeError, match="b is a list, must be"):
        kernels_dsl.scaled_gemm(t["a"], [1.0], t["scale_a"], t["scale_b"])
    with pytest.raises(ValueError, match="scale_a has shape"):
        kernels_dsl.bsr_scaled_gemm(t["sparse_fp8"], t["wide_fp8"], torch.ones(3), t["one"])
    storage = torch.empty(4 * 128 * 128, dtype=torch.uint8)
    a, out = storage[: 128 * 256].view(FP8).view(128, 256), storage[: 2 * 128 * 128].view(torch.bfloat16)
    with pytest.raises(ValueError, match="out shares memory with a"):
        kernels_dsl.scaled_gemm(a, t["b"], t["scale_a"], t["scale_b"], out=out.view(128, 128), bias=t["bias"])
    wide = storage[: 512 * 64].view(FP8).view(64, 512).mT
    with pytest.raises(ValueError, match="out shares memory with b"):
        kernels_dsl.bsr_scaled_gemm(
            t["sparse_fp8"], wide, t["blocks"], t["one"], out=out[: 256 * 64].view(256, 64)
        )
    CALLS["quantize out both"](t)
    made = t["quantized_both"]
    for wrong, message in (
        (made[:3], "out has 3 tensors"),
        ((*made[:3], t["leaf"]), r"out\[3\] is not out\[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels_dsl.quantize(t["x"], transpose="both", out=wrong)
    with pytest.raises(TypeError, match=r"out\[2\] is a float"):
        kernels_dsl.quantize(t["x"], transpose="both", out=(*made[:2], 1.0, made[1]))
    over = t["x"].view(FP8).view(-1)[: 128 * 256].view(128, 256)
    with pytest.raises(ValueError, match=r"out\[0\] shares memory with x"):
        kernels_dsl.quantize(t["x"], transpose="both", out=(over, *made[1:]))
    assert CALLS["quantize out both"](t) is made
    launched.pop(), launched.pop()
    needs = t["scale_a"].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        kernels_dsl.scaled_gemm(t["a"], t["b"], needs, t["scale_b"]).sum().backward()
    assert len(launched) == 1  # that of the call whose gradient there is not


def test_a_missing_tensor_after_a_call_that_was_right(monkeypatch):
    kept, heads = fp8_plan.Plan(lambda *_: None, None, lambda *_: None), torch.ones(1, 8, 1, 64).to(FP8)
    operation_ = fp8_plan.ATTENTION_FP8
    monkeypatch.setattr(operation, "target_of", lambda *_: Target(H200, -1))
    monkeypatch.setattr(operation_, "calls", {})
    with monkeypatch.context() as patch:
        patch.setattr(operation_, "plan_of", lambda *_: kept)
        kernels_dsl.attention_fp8(heads, heads, heads)
    with pytest.raises(TypeError, match="v is a NoneType"):
        kernels_dsl.attention_fp8(heads, heads, None)


def test_a_scale_without_modes_is_read_where_it_lies(launched):
    base = torch.arange(4.0)
    for scale in (base[2], base[1:2].squeeze(), torch.ones(1).squeeze(), torch.ones(()), base[3:].view(())):
        kernels_dsl.quantize(_tensors()["x"], scale=scale)
        assert launched[-1][-1] == scale.data_ptr()


def test_block_sparse_gradients_go_past_the_dispatcher(launched):
    """The second step launches what the first one did, in the same order."""
    given = _tensors()
    pattern, wide = given["sparse"], given["wide"].clone().requires_grad_()
    values, bias = pattern.values.clone().requires_grad_(), torch.ones(256).bfloat16().requires_grad_()
    sparse, steps = pattern.with_values(values), []
    for _ in range(3):
        launched.clear()
        result = kernels_dsl.bsr_gemm(sparse, wide, bias=bias, bias_axis="m", activation="relu")
        assert result.grad_fn.name() == "BsrGemmBackward"
        torch.autograd.grad(result, (values, wide, bias), torch.ones_like(result))
        steps.append(
            [[x.shape if isinstance(x, torch.Tensor) else type(x) for x in args] for args in launched]
        )
    assert steps[0] == steps[1] == steps[2] and len(steps[0]) >= 4
    assert any(entry.__class__ is Recorded for kept in sparse._kept.values() if isinstance(kept, tuple)
               for *_, entry in kept)  # fmt: skip


def test_a_layer_finds_its_backward_pass_by_one_look_up(launched, monkeypatch):
    """The third step, whose products are those of the first one, decides nothing again."""
    given = _tensors()
    layer = kernels_dsl.BsrLinear(given["sparse"], torch.ones(256).bfloat16())
    x, steps = given["wide"].mT.contiguous().requires_grad_(), []
    for step in range(4):
        launched.clear()
        if step > 1:
            monkeypatch.setattr(node.BsrGemm, "general", None)
            monkeypatch.setattr(BSR_GEMM, "first", None)
        result = layer(x)
        found = torch.autograd.grad(result, (x, *layer.parameters()), torch.ones_like(result))
        assert torch.equal(found[2], torch.full((256,), 64.0).bfloat16())
        steps.append([[getattr(t, "shape", type(t)) for t in args] for args in launched])
    assert steps[0] == steps[2] == steps[3] and len(steps[0]) == 3


def test_a_matrix_that_had_gradients_is_freed_at_once(launched):
    given = _tensors()
    sparse = given["sparse"].with_values(given["sparse"].values.clone().requires_grad_())
    seen = weakref.ref(sparse.values)
    kernels_dsl.bsr_gemm(sparse, given["wide"]).sum().backward()
    launched.clear()
    gc.disable()
    try:
        del sparse
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("extras", [False, True])
def test_attention_gradients_go_past_the_dispatcher(launched, monkeypatch, extras):
    """The second step launches what the first one did: forward, and three kernels backward."""
    monkeypatch.setattr(gradient, "target_of", lambda *_: Target(H200, -1))
    for used in (ATTENTION, gradient):
        monkeypatch.setattr(used, "calls" if used is ATTENTION else "_CALLS", {})
        monkeypatch.setattr(used, "plans" if used is ATTENTION else "_PLANS", {})
    q, k, v = (torch.randn(1, 64, 2, 32).bfloat16().requires_grad_() for _ in "qkv")
    options = {"sinks": torch.zeros(2, requires_grad=True)} if extras else {"causal": True}
    leaves = (q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor)))
    steps = []
    for _ in range(3):
        launched.clear()
        result = kernels_dsl.attention(q, k, v, **options)
        torch.autograd.grad(result, leaves, torch.ones_like(result))
        steps.append([[getattr(x, "shape", type(x)) for x in arguments] for arguments in launched])
    assert steps[0] == steps[1] == steps[2] and len(steps[0]) == 4
    assert result.grad_fn.name() == "AttentionBackward"
    assert bool(gradient._CALLS) != extras
