"""Gradients of attention on a Hopper GPU, against float64 autograd, and the same bits call after call."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.sparse.attention_blocks import topk_blocks
from reference.attention import Masking, allowed_by_lists, attention
from reference.tolerance import check
from tests.ops.attention.attention_cases import inputs
from tests.ops.attention.gradient_cases import check_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


def _reference(leaves, masking, d_out, dtype):
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    out = attention(*leaves, masking, dtype=dtype)[0]
    return [x.double().transpose(1, 2) for x in torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


@pytest.mark.parametrize(
    ("shape", "kv_heads", "dims"),
    [
        ((2, 1000, 4), 2, (128, 128)),
        ((1, 777, 2), 2, (64, 64)),
        ((3, 515, 8), 1, (96, 40)),
        ((2, 700, 4), 2, (256, 256)),
        ((1, 777, 4), 4, (192, 128)),
    ],
)
@pytest.mark.parametrize("window", [None, (None, 0), (200, 30)], ids=["dense", "causal", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients(shape, kv_heads, dims, window, dtype, seed):
    batch, rows, heads = shape
    sizes = ((batch, rows, heads, dims[0]), (batch, rows + 100, kv_heads, dims[0]))
    leaves = [x.requires_grad_() for x in inputs(*sizes, dims[1], seed, dtype, device="cuda")]
    masking = Masking(*(window or (None, None)))
    out = kernels_dsl.attention(*leaves, window=window)
    d_out = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    exact = _reference(leaves, masking, d_out, torch.float64)
    peer = _reference(leaves, masking, d_out, dtype)
    for own, expected, theirs in zip(found, exact, peer):
        check(own.transpose(1, 2), expected, theirs, ulps=4.0)
    for _ in range(20):
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, again))


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ((64, 64), (2, 4, 700, 800)),
        ((128, 128), (4, 700, 800)),
        ((128, 96), (800,)),
        ((256, 256), (2, 1, 700, 800)),
    ],
)
def test_gradient_of_a_mask(dims, shape, softcap, seed):
    """Of each head, and summed over those that share it: the same bits twice."""
    sizes = ((2, 700, 4, dims[0]), (2, 800, 2, dims[0]))
    leaves = [x.requires_grad_() for x in inputs(*sizes, dims[1], seed, device="cuda")]
    mask = torch.randn(shape, device="cuda").requires_grad_()
    masking = Masking(right=0, bias=mask, softcap=softcap)
    check_gradients((*leaves, mask), masking, True, causal=True, mask=mask, softcap=softcap)


def test_a_thousand_equal_runs(seed):
    leaves = [
        x.requires_grad_() for x in inputs((2, 2048, 4, 128), (2, 2048, 4, 128), 128, seed, device="cuda")
    ]
    out = kernels_dsl.attention(*leaves, causal=True)
    d_out = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    for _ in range(1000):
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_workspace_is_linear_in_the_rows(seed):
    """Beside the gradients: float32 sums of dQ and two numbers a row and head."""
    peaks = []
    for rows in (4096, 8192):
        tensors = inputs((1, rows, 8, 128), (1, rows, 8, 128), 128, seed, device="cuda")
        leaves = [x.requires_grad_() for x in tensors]
        out = kernels_dsl.attention(*leaves)
        d_out = torch.randn_like(out)
        torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, leaves, d_out)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    gradients = 3 * 8192 * 8 * 128 * 2
    assert peaks[1] <= 2.1 * peaks[0] and peaks[1] <= gradients + 8192 * 8 * 4 * (128 + 4)


@pytest.mark.parametrize("block", [(128, 128), (64, 64)])
def test_block_lists(block, seed):
    """Without a wait for the GPU; a graph sees lists that were changed in place before a replay."""
    leaves = [
        x.requires_grad_() for x in inputs((2, 500, 4, 128), (2, 600, 2, 128), 128, seed, device="cuda")
    ]
    d_out = torch.randn_like(leaves[0])
    blocks = [-(-n // size) for n, size in zip((500, 600), block)]
    made = [
        topk_blocks(torch.randn(1, 4, *blocks, device="cuda"), 2, block=block, k_len=600) for _ in range(2)
    ]
    lists = topk_blocks(torch.randn(1, 4, *blocks, device="cuda"), 2, block=block, k_len=600)

    def gradients():
        out = kernels_dsl.attention(*leaves, blocks=lists)
        return torch.autograd.grad(out, leaves, d_out)

    gradients()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lists.full_counts.copy_(made[0].full_counts)
        lists.full_indices.copy_(made[0].full_indices)
        eager = gradients()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for which, found in ((made[0], eager), (made[1], captured)):
        lists.full_counts.copy_(which.full_counts)
        lists.full_indices.copy_(which.full_indices)
        graph.replay()
        shape = (1, 4, blocks[0] * block[0], blocks[1] * block[1])
        allowed = allowed_by_lists(which.tensors, block, shape)[..., :500, :600].cuda()
        masking = Masking(allowed=allowed)
        exact = _reference(leaves, masking, d_out, torch.float64)
        peer = _reference(leaves, masking, d_out, torch.bfloat16)
        for own, expected, theirs in zip(found, exact, peer):
            check(own.transpose(1, 2), expected, theirs, ulps=4.0)
