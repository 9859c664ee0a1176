"""The launch of operators' kernels: one compile, and an error for a first call in a capture."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kernels_dsl
import lowering
from kernels_dsl.config.problem import H200
from kernels_dsl.ops import operation
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.target import Target

TARGET = Target(H200, -1)


class Function:
    """Stands for a function of the lowering layer: notes compiles and launches."""

    name = "noted"

    def __init__(self) -> None:
        self.compiles: list[dict] = []
        self.launches: list[tuple] = []

    def compile(self, *args, **constexprs):
        self.compiles.append(constexprs)
        return SimpleNamespace(launched=False, launch=lambda *values: self.launches.append(values))


def test_compiles_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    function = Function()
    launch = Launch(function, TARGET, {"spec": 3})
    assert launch.direct() is None
    launch(1, 2)
    launch(3, 4)
    assert (function.compiles, function.launches) == ([{"spec": 3}], [(1, 2), (3, 4)])
    assert launch.direct() is not None


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_first_call_in_a_capture(capturing):
    function = Function()
    with pytest.raises(lowering.CaptureError, match=r"'noted' is called for the first time.*warm-up"):
        Launch(function, TARGET, {})(1)
    assert not function.launches


BF16, FP8 = (torch.zeros(1, 40, 2, 64).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn))


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels_dsl.attention(BF16, BF16, BF16),
        lambda: kernels_dsl.attention_fp8(FP8, FP8, FP8),
        lambda: kernels_dsl.quantize(BF16),
    ],
    ids=["attention", "attention_fp8", "quantize"],
)
def test_every_operator_says_so(call, capturing, monkeypatch):
    monkeypatch.setattr(operation, "target_of", lambda *_: TARGET)
    monkeypatch.setattr(
        lowering.JitFunction, "compile", lambda self, *args, **constexprs: Function().compile(*args)
    )
    with pytest.raises(lowering.CaptureError, match="warm-up"):
        call()
