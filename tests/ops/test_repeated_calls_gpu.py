"""Repeated calls on a GPU: other addresses than those before, and streams of their own beside a graph."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from reference.bsr import random_bsr
from tests.ops.bsr import bsr_cases

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
NAMES = (
    "quantize", "quantize, scale", "gemm", "scaled_gemm", "attention", "attention_fp8", "bsr_gemm",
    "bsr_scaled_gemm",
)  # fmt: skip


def _integers(*shape, dtype=torch.bfloat16):
    """Sums of their products are exact in any order, as another kernel may have it."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).cuda().to(dtype)


def _scales(*shape):
    return 2.0 ** _integers(*shape, dtype=torch.float32)


def _moved(x):
    """A copy that starts one element behind a multiple of 16 bytes."""
    storage = torch.empty(x.numel() + 16, dtype=x.dtype, device=x.device)
    y = storage[1 : x.numel() + 1].view(x.shape)
    assert y.data_ptr() % 16
    return y.copy_(x)


def _sparse(dtype):
    made = bsr_cases.sparse_of(random_bsr("uniform", (4, 8), (64, 64), 2, seed=1))
    return kernels_dsl.BsrTensor(
        made.crow_indices.cuda(), made.col_indices.cuda(), made.values.cuda().to(dtype), made.shape
    )


def _cases():
    sparse, sparse_fp8 = _sparse(torch.bfloat16), _sparse(FP8)
    x, q = _integers(128, 256), _integers(1, 128, 4, 64)
    x8, q8, heads = x.to(FP8), q.to(FP8), _scales(1, 4)
    return {
        "quantize": (lambda x: kernels_dsl.quantize(x, scaling="row", transpose="both"), x),
        "quantize, scale": (lambda x, scale: kernels_dsl.quantize(x, scale=scale)[0], x, _scales(1)),
        "gemm": (lambda a, b, bias: kernels_dsl.gemm(a, b.mT, bias=bias), x, x.clone(), x[0, :128].clone()),
        "scaled_gemm": (
            lambda a, b, scale_a, scale_b: kernels_dsl.scaled_gemm(a, b.mT, scale_a, scale_b),
            x8, x8.clone(), _scales(128, 1), _scales(1, 128),
        ),
        "attention": (kernels_dsl.attention, q, q.clone(), q.clone()),
        "attention_fp8": (
            lambda q, k, v, of_q, of_v: kernels_dsl.attention_fp8(q, k, v, q_descale=of_q, v_descale=of_v),
            q8, q8.clone(), q8.clone(), heads, heads.clone(),
        ),
        "bsr_gemm": (lambda dense: kernels_dsl.bsr_gemm(sparse, dense), _integers(512, 256)),
        "bsr_scaled_gemm": (
            lambda dense, blocks, one: kernels_dsl.bsr_scaled_gemm(sparse_fp8, dense.mT, blocks, one),
            _integers(256, 512).to(FP8), _scales(sparse_fp8.nnz), _scales(1),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_address_that_is_no_multiple_of_16(name):
    """The launch that was kept refuses it; the call then finds another one, and the one before again."""
    call, *tensors = _cases()[name]
    wanted, _ = (call(*tensors) for _ in range(2))
    for place in range(len(tensors)):
        moved = [_moved(x) if n == place else x for n, x in enumerate(tensors)]
        for arguments in (moved, moved, tensors):
            found = call(*arguments)
            pairs = zip(found, wanted) if isinstance(found, tuple) else ((found, wanted),)
            assert all(torch.equal(x.float(), y.float()) for x, y in pairs), place


def test_streams_beside_a_graph():
    """Counters of a captured launch are its own, also where its stream runs other launches."""
    q, side = _integers(2, 1024, 16, 64), torch.cuda.Stream()
    call = lambda: kernels_dsl.attention(q, q, q, causal=True)  # noqa: E731
    wanted = call()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        replayed = call()
    found = []
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(side):
            found.append(call())
        found.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(x, wanted) for x in (replayed, *found))
