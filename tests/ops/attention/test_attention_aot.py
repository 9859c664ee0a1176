"""The attention kernels for ahead-of-time use are the ones that calls look up."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.aot.shipped import iter_kernels
from kernels_dsl.cli.main import main
from kernels_dsl.sparse import attention_blocks
from kernels_dsl.sparse.attention_blocks import causal_blocks, document_blocks, topk_blocks, window_blocks
from lowering import recording


def _looked_up(calls: list[recording.RecordedCall]) -> list[tuple]:
    """Names, signatures and constants of kernels that calls look up."""
    return [(call.function.name, call.function.signature(*call.args), call.constants) for call in calls]


def _shipped(arch: str = "sm_90a") -> list[tuple]:
    kernels = iter_kernels(arch, ("attention",))
    return [
        (function.name, function.signature(*args), constexprs) for _, function, args, constexprs in kernels
    ]


def _tensors(*lead: int, dim: int, dtype: torch.dtype = torch.bfloat16):
    return [torch.zeros(*lead, dim, dtype=dtype) for _ in range(3)]


def _common_calls() -> None:
    attention = kernels_dsl.attention
    for dim in (64, 96, 128, 192, 256):
        for length in (100, 4096):
            for causal in (False, True):
                attention(*_tensors(1, length, 2, dim=dim, dtype=torch.float16), causal=causal)
    q, k, v = _tensors(2, 512, 4, dim=128)
    attention(q, k, v, causal=True, return_lse=True)
    attention(q, k[:, :, :1], v[:, :, :1])
    attention(q, k, v, causal=True, window=(100, 0))
    scores = torch.zeros(2, 4, 4, 4)
    attention(q, k, v, blocks=topk_blocks(scores, 4))
    attention(q, k, v, blocks=topk_blocks(scores, 4, causal=True), causal=True)
    q, k, v = _tensors(1, 4096, 2, dim=128)
    lists = window_blocks(4096, 4096, left=2047, device="cpu")
    attention(q, k, v, blocks=lists, causal=True, window=(2047, 0))
    sdpa = kernels_dsl.scaled_dot_product_attention
    for causal in (False, True):
        sdpa(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), is_causal=causal)
    starts = torch.tensor([0, 100, 700], dtype=torch.int32)
    for causal in (False, True):
        kernels_dsl.attention_varlen(*_tensors(700, 4, dim=64), starts, starts, 600, causal=causal)


def test_calls_find_shipped_kernels():
    with recording.record("sm_90a") as calls:
        _common_calls()
    shipped = _shipped()
    assert len(calls) == 30
    assert [call for call in _looked_up(calls) if call not in shipped] == []


def test_other_calls_do_not():
    q, k, v = _tensors(2, 512, 4, dim=128)
    with recording.record("sm_90a") as calls:
        kernels_dsl.attention(q, k, v, softcap=3.0)
        kernels_dsl.attention(q, k, v, blocks=causal_blocks(512, 512, device="cpu", block=(64, 64)))
    shipped = _shipped()
    assert all(call not in shipped for call in _looked_up(calls)) and len(calls) == 2


def test_builders_find_shipped_kernels(monkeypatch):
    monkeypatch.setattr(attention_blocks, "runs_kernels", lambda device: True)
    with recording.record("sm_90a") as calls:
        for length in (1024, 5000):
            window_blocks(length, length, left=2047, device="cpu")
            causal_blocks(length, length, device="cpu")
            document_blocks(torch.zeros(2, 8 * length, dtype=torch.int64), max_blocks=33)
        for blocks in (8, 256, 1000, 4096):
            for causal in (False, True):
                topk_blocks(torch.zeros(1, 3, 4, blocks), 7, causal=causal)
    shipped = _shipped()
    assert len(calls) == 14
    assert [call for call in _looked_up(calls) if call not in shipped] == []


def test_names_are_unique():
    for arch in ("sm_90a", "sm_89"):
        names = [name for name, *_ in iter_kernels(arch, ("gemm", "attention"))]
        assert len(names) == len(set(names))


def test_inspect_shows_a_kernel(capsys):
    assert main(["inspect", "attention", "--name", "64x128 bf16 d64 bhsd", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "attention sm90 64x128 bf16 d64 bhsd"
    assert main(["inspect", "attention", "--name", "64x128 bf16 d64 causal lse"]) == 0
    shown = capsys.readouterr().out
    assert "no spills" in shown and "HGMMA" in shown and "UTMALDG" in shown


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_calls_without_wgmma_find_shipped_kernels(arch):
    with recording.record(arch) as calls:
        for dim in (64, 96, 128, 192, 256):
            for causal in (False, True):
                kernels_dsl.attention(*_tensors(1, 300, 2, dim=dim), causal=causal)
        starts = torch.tensor([0, 100, 700], dtype=torch.int32)
        kernels_dsl.attention_varlen(*_tensors(700, 4, dim=64), starts, starts, 600, causal=True)
    shipped = _shipped(arch)
    assert len(calls) == 11
    assert [call for call in _looked_up(calls) if call not in shipped] == []
