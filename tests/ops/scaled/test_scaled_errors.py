"""Every error of `scaled_gemm` names the argument, what it was and what it must be, before any launch."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.gemm import Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.ops.scaled.scaled_gemm import plan_for, scaled_gemm, scaled_gemm_supports
from lowering import emulator

E4M3 = torch.float8_e4m3fn


def _fp8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(E4M3)


A, B = _fp8(12, 16), _fp8(20, 16).mT
ONE = torch.ones(())
SHARED = torch.ones(64)


def _call(a=A, b=B, scale_a=ONE, scale_b=ONE, **options):
    return lambda: scaled_gemm(a, b, scale_a, scale_b, **options)


CASES = [
    (_call(a=[[1.0]]), TypeError, "a is a list, must be a torch.Tensor"),
    (_call(a=A.bfloat16()), TypeError, "a has dtype torch.bfloat16, must be one of torch.float8"),
    (_call(b=B.half()), TypeError, "b has dtype torch.float16, must be one of torch.float8_e4m3fn"),
    (_call(b=B[1:]), ValueError, r"b has shape \(15, 20\), must have 16 rows"),
    (_call(a=_fp8(2, 12, 16), b=_fp8(3, 16, 20)), ValueError, "b has batch 3, must be a's batch, 2"),
    (_call(scale_a=1.0), TypeError, "scale_a is a float, must be a torch.Tensor"),
    (_call(scale_b=ONE.half()), TypeError, "scale_b has dtype torch.float16, must be one of torch.float32"),
    (_call(scale_b=ONE.to("meta")), ValueError, "scale_b is on meta, must be on a's device, cpu"),
    (_call(scale_a=torch.ones(12)), ValueError, r"scale_a has shape \(12,\), must be one .*\(12, 1\)"),
    (_call(scale_a=torch.ones(1, 12)), ValueError, r"scale_a has shape \(1, 12\), must be .* a row"),
    (_call(scale_b=torch.ones(20, 1)), ValueError, r"scale_b has shape \(20, 1\), must be .*\(1, 20\)"),
    (_call(scale_a=torch.ones(3, 12, 1)), ValueError, r"scale_a has shape \(3, 12, 1\), must be one element"),
    (
        _call(a=_fp8(2, 12, 16), scale_a=torch.ones(3, 12, 1)),
        ValueError,
        r"scale_a has shape \(3, 12, 1\), must .* with a batch of 2 before it or without",
    ),
    (_call(bias=torch.ones(12)), ValueError, r"bias has shape \(12,\), must be \(20,\)"),
    (_call(activation="tanh"), ValueError, "activation is 'tanh', must be None, 'gelu', 'gelu_tanh'"),
    (_call(scale_result=ONE), ValueError, "scale_result is given and the result is torch.bfloat16"),
    (
        _call(scale_result=torch.ones(2), out_dtype=E4M3),
        ValueError,
        r"scale_result has shape \(2,\), must be one element",
    ),
    (_call(amax=torch.ones(2)), ValueError, r"amax has shape \(2,\), must be one element"),
    (_call(amax=ONE.half()), TypeError, "amax has dtype torch.float16, must be one of torch.float32"),
    (_call(amax=1.0), TypeError, "amax is a float, must be a torch.Tensor"),
    (_call(scale_a=ONE, amax=ONE), ValueError, "amax shares memory with scale_a, must be a tensor of"),
    (
        _call(amax=(alone := torch.ones(12, 20))[3, :1], out=alone),
        ValueError,
        "out shares memory with amax",
    ),
    (_call(out_dtype=torch.int8), TypeError, "out_dtype has dtype torch.int8, must be one of"),
    (_call(out=torch.ones(20, 12)), ValueError, r"out has shape \(20, 12\), must be \(12, 20\)"),
    (
        _call(_fp8(8, 16), _fp8(8, 16).mT, scale_a=SHARED[:8, None], out=SHARED.view(8, 8)),
        ValueError,
        "out shares memory with scale_a",
    ),
    (_call(config=Sm80GemmConfig(128, 128, 64, 4, 2, 2)), ValueError, "of fp8 is done in fp16, as on H200"),
    (_call(config=Sm90GemmConfig(128, 256, tile_k=16)), ValueError, "tile_k is 16, must cover whole WGMMA"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), CASES, ids=range(len(CASES)))
def test_errors(call, error, message) -> None:
    with emulator.run(arch="sm_90a"), pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("arch", "name"), [("sm_80", "A100"), ("sm_86", "A40")])
def test_older_gpus_are_refused_by_name(arch: str, name: str) -> None:
    with emulator.run(arch=arch):
        reason = scaled_gemm_supports(A, B, ONE, ONE)
    assert reason is not None and f"must be 16 bits or more on {name} of compute capability 8." in reason


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_later_gpus_have_a_kernel(arch: str) -> None:
    """Hopper both, and WGMMA unless the other is asked for."""
    family = "sm90" if arch == "sm_90a" else "sm80"
    with emulator.run(arch=arch):
        assert plan_for(A, B, ONE, ONE).decision.family == family
        assert plan_for(A, B, ONE, ONE, family="sm80").decision.family == "sm80"
        assert scaled_gemm_supports(A, B, ONE, torch.ones(1, 20)) is None


def test_supports_says_what_a_call_would() -> None:
    with emulator.run(arch="sm_90a"):
        assert scaled_gemm_supports(A, B, ONE, torch.ones(1, 20)) is None
        assert "scale_a has shape" in scaled_gemm_supports(A, B, torch.ones(12), ONE)
        assert "bogus is given" in scaled_gemm_supports(A, B, ONE, ONE, bogus=1)
    assert "must be on a CUDA device" in scaled_gemm_supports(A, B, ONE, ONE)


@pytest.mark.parametrize(
    ("a", "b", "copies"),
    [
        (A, B, (None, None)),
        (A.mT.contiguous().mT, B, ("row", None)),  # fp8 WGMMA reads along K only
        (A, B.contiguous(), (None, "column")),
        (_fp8(12, 20)[:, :16], B, ("row", None)),  # rows at 20 bytes: not for TMA
        (_fp8(12, 32)[:, :16], B, (None, None)),
    ],
    ids=["as they should be", "a along M", "b along N", "odd pitch", "pitch of 32"],
)
def test_operands_that_are_copied(a, b, copies) -> None:
    with emulator.run(arch="sm_90a"):
        decision = plan_for(a, b, ONE, ONE).decision
    assert (decision.copy_a, decision.copy_b) == copies
