"""Every error of `gemm` names the argument, what it was and what it must be, before any launch."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.gemm import Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.ops.gemm.gemm import gemm, supports

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


A, B = _ones(12, 16), _ones(16, 20)
SHARED = _ones(64, 64)

CASES = [
    (lambda: gemm([[1.0]], B), TypeError, "a is a list, must be a torch.Tensor"),
    (lambda: gemm(A, None), TypeError, "b is a NoneType, must be a torch.Tensor"),
    (lambda: gemm(A.to_sparse(), B), TypeError, "a has layout torch.sparse_coo, must be strided"),
    (lambda: gemm(A.double(), B.double()), TypeError, "a has dtype torch.float64, must be one of torch"),
    (lambda: gemm(A, B.half()), TypeError, "b has dtype torch.float16, must be a's dtype, torch.bfloat16"),
    (lambda: gemm(A[0], B), ValueError, r"a has shape \(16,\), must be \(M, K\) or \(L, M, K\)"),
    (lambda: gemm(A, _ones(1, 1, 16, 20)), ValueError, r"b has shape \(1, 1, 16, 20\), must be \(K, N\)"),
    (lambda: gemm(A, A), ValueError, r"b has shape \(12, 16\), must have 16 rows: a has shape \(12, 16\)"),
    (lambda: gemm(_ones(2, 12, 16), _ones(3, 16, 20)), ValueError, "b has batch 3, must be a's batch, 2"),
    (lambda: gemm(A, B.to("meta")), ValueError, "b is on meta, must be on a's device, cpu"),
    (lambda: gemm(A, B, bias=_ones(12)), ValueError, r"bias has shape \(12,\), must be \(20,\) with"),
    (lambda: gemm(A, B, bias=_ones(20), bias_axis="m"), ValueError, r"must be \(12,\) with bias_axis='m'"),
    (lambda: gemm(A, B, bias=_ones(20), bias_axis="k"), ValueError, "bias_axis is 'k', must be 'n'"),
    (lambda: gemm(A, B, bias=_ones(20).long()), TypeError, "bias has dtype torch.int64, must be one of"),
    (lambda: gemm(A, B, bias=1.0), TypeError, "bias is a float, must be a torch.Tensor"),
    (lambda: gemm(A, B, c=_ones(12, 19)), ValueError, r"c has shape \(12, 19\), must broadcast to"),
    (lambda: gemm(A, B, residual=_ones(2, 12, 20)), ValueError, r"residual has shape \(2, 12, 20\), must"),
    (lambda: gemm(A, B, activation="tanh"), ValueError, "activation is 'tanh', must be None, 'gelu', 'g"),
    (lambda: gemm(A, B, epilogue="nobody"), ValueError, "epilogue is 'nobody', must be a function"),
    (lambda: gemm(A, B, epilogue=3), TypeError, "epilogue is 3, must be a function"),
    (lambda: gemm(A, B, epilogue=abs, bias=_ones(20)), ValueError, "bias is given beside epilogue"),
    (lambda: gemm(A, B, epilogue=abs, alpha=2.0), ValueError, "alpha is given beside epilogue"),
    (lambda: gemm(A, B, epilogue_args=(1,)), ValueError, "epilogue_args has 1 entries, must be empty"),
    (lambda: gemm(A, B, epilogue=abs, epilogue_args=("x",)), TypeError, r"epilogue_args\[0\] is a str"),
    (lambda: gemm(A, B, out=_ones(20, 12)), ValueError, r"out has shape \(20, 12\), must be \(12, 20\)"),
    (lambda: gemm(A, B, out=_ones(12, 20), out_dtype=FP32), TypeError, "out has dtype torch.bfloat16, must"),
    (lambda: gemm(A, B, out_dtype=torch.int8), TypeError, "out_dtype has dtype torch.int8, must be one of"),
    (lambda: gemm(A, B, out=_ones(1, 20).expand(12, 20)), ValueError, "out has strides .*, must not overlap"),
    (lambda: gemm(SHARED, SHARED, out=SHARED), ValueError, "out shares memory with a, must be"),
    (lambda: gemm(SHARED[:32], _ones(64, 64), out=SHARED[16:48]), ValueError, "out shares memory with a"),
    (lambda: gemm(A, B, bias=SHARED[0, :20], out=SHARED[:12, :20]), ValueError, "out shares memory with b"),
    (lambda: gemm(A, B, c=SHARED[1:13, :20], out=SHARED[:12, :20]), ValueError, "out shares memory with c"),
    (lambda: gemm(A, B, alpha=_ones(1)), TypeError, "alpha is a Tensor, must be a Python number"),
    (lambda: gemm(A, B, family="sm70"), ValueError, "family is 'sm70', must be None, 'sm90' or 'sm80'"),
    (
        lambda: gemm(A, B, family="sm80", config=Sm90GemmConfig(128, 128)),
        ValueError,
        "family is 'sm80', must be config's, 'sm90', or None",
    ),
    (
        lambda: gemm(A, B, config=Sm90GemmConfig(128, 250)),
        ValueError,
        "config is .*, must be one that fits: tile_n is 250, must be a multiple of 8",
    ),
    (
        lambda: gemm(A, _ones(16, 24), config=Sm80GemmConfig(128, 128, 32, 40, 2, 4)),
        ValueError,
        "config is .*, must be one that fits: .* bytes of shared memory",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), CASES, ids=[message[:40] for _, _, message in CASES])
def test_errors(model_kernels, call, kind: type[Exception], message: str) -> None:
    for _ in range(2):  # an error must not leave a plan behind
        with pytest.raises(kind, match=message):
            call()
    assert not model_kernels.launches


def test_a_cpu_tensor_without_the_emulator() -> None:
    for call in (lambda: gemm(A, B), lambda: gemm(A.clone().requires_grad_(), B)):
        with pytest.raises(ValueError, match="a is on cpu, must be on a CUDA device"):
            call()
    assert "must be on a CUDA device" in str(supports(A, B))


def test_an_arch_that_cannot_be_emulated(monkeypatch) -> None:
    monkeypatch.setenv("KERNELS_DSL_EMULATE", "sm_90")
    with pytest.raises(ValueError, match=r"the emulated arch is 'sm_90', must be one of sm_80, .*sm_90a"):
        gemm(A, B)


def test_a_known_plan_still_looks_for_shared_memory(model_kernels) -> None:
    x, fresh = _ones(64, 64), torch.empty(64, 64, dtype=BF16)
    for options in ({}, {"c": _ones(64, 64)}):
        gemm(x, x, out=fresh, **options)
        for a, b in ((SHARED, x), (x, SHARED)):
            with pytest.raises(ValueError, match="out shares memory with"):
                gemm(a, b, out=SHARED, **options)
    gemm(x[:32], x, c=x[1:33], out=fresh[:32])
    with pytest.raises(ValueError, match="out shares memory with c"):
        gemm(x[:32], x, c=SHARED[1:33], out=SHARED[:32])


def test_slices_of_one_buffer_do_not_overlap(model_kernels) -> None:
    buffer = torch.randn(32, 96).to(BF16)
    a, b, out = buffer[:, :32], _ones(32, 64), buffer[:, 32:]
    assert torch.equal(gemm(a, b, out=out), gemm(a, b))


def test_out_may_be_c_or_the_residual(model_kernels) -> None:
    c = torch.randn(12, 20).to(BF16)
    expected = gemm(A, B, c=c, beta=0.5)
    assert torch.equal(gemm(A, B, c=c, beta=0.5, out=c), expected)
