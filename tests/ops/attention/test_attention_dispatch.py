"""Attention through PyTorch's dispatcher: opcheck, torch.compile, autograd; kernels run in the emulator."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.ops.attention import register as attention_register  # noqa: F401  (defines the operator)
from kernels_dsl.sparse.attention_blocks import window_blocks
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from tests.ops.attention.attention_cases import inputs

OP = torch.ops.kernels_dsl.attention.default


@pytest.fixture(autouse=True)
def _emulated():
    torch.compiler.reset()
    with emulator.run(arch="sm_90a", check=False):
        yield


def _tensors(seed, length=70, heads=2):
    return inputs((1, length, heads, 64), (1, length, 1, 64), 64, seed)


def test_opcheck_with_lists(seed):
    lists = window_blocks(70, 70, left=10, block=(64, 64), device="cpu")
    tensors = (*_tensors(seed), None, None, *lists.tensors)
    options = {"causal": True, "window_left": 10, "block_q": 64, "block_k": 64, "return_lse": True}
    torch.library.opcheck(OP, tensors, options)


def test_opcheck_packed(seed):
    q, k, v = (x[0] for x in _tensors(seed))
    starts = torch.tensor([0, 30, 70], dtype=torch.int32)
    tensors = (q, k, v, *(None,) * 6, starts, starts, None)
    torch.library.opcheck(OP, tensors, {"layout": "thd", "max_seqlen_q": 40})


def test_compiled_in_one_graph(seed):
    tensors = _tensors(seed)
    mask = torch.rand((70, 70), generator=torch.Generator().manual_seed(seed)) < 0.8

    def model(q, k, v):
        out, lse = kernels_dsl.attention(q, k, v, causal=True, mask=mask, return_lse=True)
        views = [x.transpose(1, 2) for x in (out, k, v)]
        return kernels_dsl.scaled_dot_product_attention(*views, enable_gqa=True) * 2, lse

    expected = model(*tensors)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(*tensors)
    assert all(torch.equal(f, e) for f, e in zip(found, expected))


def test_packed_in_one_graph(seed):
    """With lists, and with a bias."""
    q, k, v = (x[0] for x in _tensors(seed, 30, 1))
    starts = torch.tensor([0, 20, 30], dtype=torch.int32)
    lists = BlockLists(torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), block=(64, 64))
    bias = torch.randn(20, 20, generator=torch.Generator().manual_seed(seed))

    def model(q, k, v, starts, bias):
        first = kernels_dsl.attention_varlen(q, k, v, starts, starts, 20, blocks=lists)
        return first, kernels_dsl.attention_varlen(q, k, v, starts, starts, 20, 20, mask=bias)

    arguments = (q, k, v, starts, bias)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(*arguments)
    assert all(torch.equal(f, e) for f, e in zip(found, model(*arguments)))


def test_out_under_compile(seed):
    q, k, v = _tensors(seed)
    out = torch.full_like(q, torch.nan)
    compiled = torch.compile(kernels_dsl.attention, fullgraph=True, backend="aot_eager")
    assert compiled(q, k, v, out=out) is out
    assert torch.equal(out, kernels_dsl.attention(q, k, v))


def test_the_operator_needs_the_log_sum_exp_for_a_gradient(seed):
    q, k, v = _tensors(seed)
    with pytest.raises(RuntimeError, match="return_lse is False, must be True for a gradient"):
        OP(q.requires_grad_(), k, v)


def test_gradients_under_compile(seed):
    q, k, v = (x.requires_grad_() for x in _tensors(seed))
    found = []
    for call in (
        kernels_dsl.attention,
        torch.compile(kernels_dsl.attention, fullgraph=True, backend="aot_eager"),
    ):
        found.append(torch.autograd.grad(call(q, k, v, causal=True).float().square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_gradients_off(seed):
    q, k, v = _tensors(seed)
    expected = kernels_dsl.attention(q, k, v)
    q.requires_grad_()
    with torch.no_grad():
        assert torch.equal(kernels_dsl.attention(q, k, v), expected)
