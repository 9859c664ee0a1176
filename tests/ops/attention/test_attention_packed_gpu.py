"""Packed sequences with mask tensors and block lists, and user functions under torch.compile, on a GPU."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.sparse.block_lists import BlockLists
from reference.attention import Masking, allowed_by_lists
from tests.ops.attention.attention_cases import check_close, inputs, packed_cases, run_packed

pytestmark = pytest.mark.gpu
Q_LENS, K_LENS = (700, 0, 1, 1300), (1500, 5, 1, 1000)
HEADS, BLOCK = 4, (128, 128)


@pytest.fixture(params=[pytest.param("sm90", marks=pytest.mark.sm90), "sm80"])
def family(request):
    return request.param


def _check(seed, family, maskings, dim=128, **options):
    """One call on all sequences, with NaN behind each one's keys, against a reference a sequence."""
    gap = 50
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (Q_LENS, [n + gap for n in K_LENS])]
    shapes = (sum(Q_LENS), HEADS, dim), (int(starts[1][-1]), 1, dim)
    q, k, v = inputs(*shapes, dim, seed, torch.bfloat16, "cuda")
    for x in (k, v):
        for first, count in zip(starts[1][:-1], K_LENS):
            x[first + count : first + count + gap] = torch.nan
    used = torch.tensor(K_LENS).int().cuda()
    device_starts = (start.cuda() for start in starts)
    out, lse = kernels_dsl.attention_varlen(
        q, k, v, *device_starts, max(Q_LENS), max(K_LENS), seqused_k=used, return_lse=True, family=family,
        **options,
    )  # fmt: skip
    for n, (q_len, k_len) in enumerate(zip(Q_LENS, K_LENS)):
        if q_len:
            rows = slice(int(starts[0][n]), int(starts[0][n + 1]))
            keys = slice(int(starts[1][n]), int(starts[1][n]) + k_len)
            part = (q[None, rows], k[None, keys], v[None, keys])
            check_close((out[None, rows], lse[None, :, rows]), part, maskings[n])


def test_masks(seed, family):
    mask = torch.rand((4, 1, max(Q_LENS), max(K_LENS)), device="cuda") < 0.5
    maskings = [Masking(allowed=mask[n : n + 1, :, :i, :j]) for n, (i, j) in enumerate(zip(Q_LENS, K_LENS))]
    _check(seed, family, maskings, mask=mask)


@pytest.mark.parametrize("full", [False, True])
def test_lists(full, seed, family):
    rows, columns = -(-max(Q_LENS) // BLOCK[0]), -(-max(K_LENS) // BLOCK[1])
    indices = torch.rand(4, HEADS, rows, columns).argsort(dim=-1).int()
    counts = torch.randint(0, columns + 1, (4, HEADS, rows)).int()
    indices[torch.arange(columns) >= counts[..., None]] = 7777
    pair, none = (counts, indices), (None, None)
    lists = none + pair if full else pair + none
    maskings = []
    for n, (i, j) in enumerate(zip(Q_LENS, K_LENS)):
        parts = tuple(x if x is None else x[n : n + 1] for x in lists)
        allowed = allowed_by_lists(parts, BLOCK, (1, HEADS, i, columns * BLOCK[1]))[..., :j]
        if not full:
            allowed &= torch.arange(j) <= torch.arange(i)[:, None] + j - i
        maskings.append(Masking(allowed=allowed.cuda()))
    on_gpu = (None if x is None else x.cuda() for x in lists)
    _check(seed, family, maskings, blocks=BlockLists(*on_gpu, block=BLOCK), causal=not full)


@pytest.mark.parametrize("case", packed_cases(16, (0, 1, 3, 77, 128, 500, 1024)), ids=str)
def test_generated(case, seed, family):
    run_packed(case, seed, "cuda", family)


def _alibi(score, b, h, i, j):
    return score - (i - j) * 0.125


def _every(step):
    def mask(b, h, i, j):
        return (i - j) % step == 0

    return mask


@pytest.mark.sm90
def test_functions_under_torch_compile(seed):
    """By inductor, in one graph, and as a CUDA graph of it."""
    tensors = inputs((1, 300, 2, 64), (1, 300, 1, 64), 64, seed, torch.bfloat16, "cuda")

    def model(mask, *t):
        return kernels_dsl.attention(*t, score_mod=_alibi, mask_mod=mask, return_lse=True)

    compiled = torch.compile(model, fullgraph=True)
    for step in (2, 5):
        mask = kernels_dsl.kernel_function(_every(step))
        found = compiled(mask, *tensors)
        check_close(found, tensors, Masking(score_mod=_alibi, mask_mod=_every(step)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(mask, *tensors)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, found))
