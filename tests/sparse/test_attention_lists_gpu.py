"""The kernels that make block lists on a GPU, against the same lists made by torch on the CPU; in a graph."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.sparse import attention_blocks as builders

pytestmark = pytest.mark.gpu


def _same(expected, found) -> None:
    for counts, indices, a, b in zip(
        expected.tensors[::2], expected.tensors[1::2], found.tensors[::2], found.tensors[1::2]
    ):
        if counts is None:
            assert a is None and b is None
            continue
        assert torch.equal(counts, a.cpu())
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[listed], b.cpu()[listed])


def _captured(build):
    """Results of `build` in a CUDA graph, after a call outside of it."""
    build()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = build()
    graph.replay()
    torch.cuda.synchronize()
    return made


@pytest.mark.parametrize("window", [(2047, 0), (None, 0), (100, 300), (None, None)])
@pytest.mark.parametrize("lengths", [(32768, 32768), (1000, 70001)])
def test_windows(window, lengths):
    options = {"left": window[0], "right": window[1], "block": (128, 64)}
    expected = builders.window_blocks(*lengths, device="cpu", **options)
    _same(expected, _captured(lambda: builders.window_blocks(*lengths, device="cuda", **options)))


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal):
    documents = torch.rand(3, 50001).mul(30).long().sort(dim=-1).values
    expected = builders.document_blocks(documents, causal=causal, max_blocks=40)
    on_gpu = documents.cuda()
    _same(expected, _captured(lambda: builders.document_blocks(on_gpu, causal=causal, max_blocks=40)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "k"), [(256, 256, 32), (40, 1024, 32), (17, 5000, 200), (5, 30, 30)]
)
def test_topk(rows, columns, k, causal):
    scores = torch.rand(2, 3, rows, columns).argsort(dim=-1).float() - columns // 2  # no two are equal
    lengths = {"q_len": rows * 128 - 5, "k_len": columns * 128 - 100}
    expected = builders.topk_blocks(scores, k, causal=causal, **lengths)
    on_gpu = scores.cuda()
    _same(expected, _captured(lambda: builders.topk_blocks(on_gpu, k, causal=causal, **lengths)))
