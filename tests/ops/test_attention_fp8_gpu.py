"""fp8 attention on a Hopper GPU: shapes, masks, graphs and torch.compile, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_fp8_cases import quantised, run

import kernels_dsl
from kernels_dsl.ops import attention_blocks
from reference.attention import Masking

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
LENGTHS = [(1, 239), (113, 203), (1023, 1024), (512, 2048), (2048, 500)]


def _shapes(heads, lengths, dims, batch=2):
    (h, hk), (sq, sk), (d, dv) = heads, lengths, dims
    return (batch, sq, h, d), (batch, sk, hk, d), (batch, sk, hk, dv)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (96, 96), (192, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(lengths, dims, causal, seed):
    masking = Masking(right=0 if causal else None)
    run(_shapes((4, 2), lengths, dims), seed, masking, "cuda", causal=causal)


@pytest.mark.parametrize("dim", range(16, 257, 48))
def test_head_dimensions(dim, seed):
    run(_shapes((2, 2), (113, 203), (dim, dim), 1), seed, Masking(right=0), "cuda", causal=True)


@pytest.mark.parametrize(
    ("window", "softcap", "sink"),
    itertools.product([(100, 0), (None, 5), (300, 40)], [0.0, 2.0], [False, True]),
)
def test_windows(window, softcap, sink, seed):
    sinks = torch.tensor([-1.0, 2.0], device="cuda") if sink else None
    masking = Masking(left=window[0], right=window[1], softcap=softcap, sinks=sinks)
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    run(_shapes((2, 1), (700, 900), (128, 128)), seed, masking, "cuda", **options)


def test_block_lists(seed):
    lists = attention_blocks.window_blocks(1000, 1230, left=300, block=(128, 128), device="cuda")
    masking = Masking(left=300, right=0)
    run(_shapes((2, 1), (1000, 1230), (128, 128)), seed, masking, "cuda", blocks=lists, window=(300, 0))


def test_graph_compile_and_determinism(seed):
    (q, qs, _), (k, ks, _), (v, vs, _) = (quantised((2, 300, 4, 128), seed + i, "cuda") for i in range(3))

    def call(q, k, v):
        return kernels_dsl.attention_fp8(q, k, v, q_descale=qs, k_descale=ks, v_descale=vs, causal=True)

    expected = call(q, k, v)
    assert torch.equal(torch.compile(call, fullgraph=True)(q, k, v), expected)
    with torch.cuda.stream(torch.cuda.Stream()):
        call(q, k, v)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(q, k, v)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)
