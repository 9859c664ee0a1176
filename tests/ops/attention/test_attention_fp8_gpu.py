"""fp8 attention on a Hopper GPU: shapes, masks, graphs and torch.compile, against float64.

A compile takes seconds, so the calls are chosen, not crossed, and most lengths of queries are odd: they share
kernels. Each test says its name past the capture of pytest first: a kernel that hangs leaves its name.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import kernels_dsl
import lowering
from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.sparse import attention_blocks
from kernels_dsl.sparse.block_lists import BlockLists
from reference.attention import Masking, allowed_by_lists
from tests.ops.attention.attention_fp8_cases import packed, quantised, run, run_packed, sm80_tile

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.fixture(autouse=True)
def _progress(request, capfd):
    """The name of a test before it and its seconds after it."""
    started = time.perf_counter()
    with capfd.disabled():
        print(f"\n{request.node.name}", end=" ", flush=True)
    yield
    torch.cuda.synchronize()
    with capfd.disabled():
        print(f"{time.perf_counter() - started:.1f} s", end=" ", flush=True)


def _shapes(heads, lengths, dims, batch=2):
    (h, hk), (sq, sk), (d, dv) = heads, lengths, dims
    return (batch, sq, h, d), (batch, sk, hk, d), (batch, sk, hk, dv)


@pytest.mark.parametrize(
    ("dims", "causal", "lengths"),
    [
        ((64, 64), False, [(113, 203), (511, 2048)]),
        ((64, 64), True, [(113, 203), (203, 113), (1023, 1024)]),
        ((128, 128), False, [(113, 203), (511, 2047)]),
        ((128, 128), True, [(113, 203), (1, 239), (2047, 500)]),
        ((256, 256), True, [(113, 203), (1023, 1023)]),
        ((96, 96), True, [(113, 203), (1023, 1024)]),
        ((192, 128), False, [(113, 203)]),
        ((16, 48), True, [(113, 203), (301, 1)]),
    ],
    ids=str,
)
def test_lengths(dims, causal, lengths, seed):
    """The largest without the log-sum-exp, which has all exponentials exact."""
    masking = Masking(right=0 if causal else None)
    for pair in lengths:
        run(_shapes((4, 2), pair, dims), seed, masking, "cuda", causal=causal, lse=pair is not lengths[-1])


@pytest.mark.parametrize(
    ("dims", "tile", "lengths", "causal"),
    [
        ((64, 64), (128, 128), (1023, 1300), True),  # more tiles than SMs: handed out one by one
        ((128, 128), (64, 128), (300, 203), False),
        ((96, 80), (128, 64), (203, 333), True),
        ((256, 256), (64, 96), (130, 1000), False),
    ],
    ids=str,
)
def test_v_transposed_in_the_kernel(dims, tile, lengths, causal, seed):
    """The result with V transposed before it: the same products in the same order.

    Not bit for bit: at head dimension 96 ptxas fuses 16 more multiplications with additions in one of the two
    kernels, and scores of 10⁴, of values without scales, carry that into the last bit of some outputs.
    """
    padded = [-(-dim // 32) * 32 for dim in dims]
    config = Sm90AttentionConfig(*tile, *padded, pingpong=max(padded) <= 128, watch_sums=True)
    tensors = [quantised(shape, seed, "cuda")[0] for shape in _shapes((32, 16), lengths, dims)]
    before, inside = (
        kernels_dsl.attention_fp8(*tensors, causal=causal, config=replace(config, turns_v=turns))
        for turns in (False, True)
    )
    difference = (before.float() - inside.float()).abs().max()
    assert difference <= torch.finfo(before.dtype).eps * before.abs().max()


@pytest.mark.parametrize("causal", [False, True])
def test_v_of_later_heads_beside_the_products(causal, seed):
    """Bit for bit what V transposed before gives, many times; on two streams at once and from a graph too."""
    wide = Sm90AttentionConfig(192, 96, 128, 128, stages=3, watch_sums=True, linear_exps=3)
    narrow = Sm90AttentionConfig(192, 128, 64, 64, watch_sums=True, linear_exps=3)
    for config, keys, heads, lengths in (
        (wide, 32, (32, 8), (1501, 2077)), (wide, 32, (16, 16), (2048, 2048)),
        (wide, 64, (32, 8), (1501, 2077)), (wide, 64, (6, 3), (301, 90)),
        (narrow, 64, (32, 8), (1501, 2077)),
    ):  # fmt: skip
        later = replace(config, later_v=2, later_keys=keys)
        shapes = _shapes(heads, lengths, (config.dim, config.dim))
        tensors = [quantised(shape, seed, "cuda")[0] for shape in shapes]

        def call(config, tensors=tensors):
            return kernels_dsl.attention_fp8(*tensors, causal=causal, config=config)

        expected = call(config)
        assert all(torch.equal(call(later), expected) for _ in range(20))
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        found = []
        for i in range(10):
            with torch.cuda.stream(streams[i % 2]):
                found.append(call(later))
        torch.cuda.synchronize()
        assert all(torch.equal(each, expected) for each in found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(later)
        for _ in range(3):
            captured.zero_()
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_large_scales(dim, seed):
    """Scores are N(0, 4), so that watched sums pass their limit in many blocks."""
    shapes = _shapes((4, 2), (511, 2047), (dim, dim))
    run(shapes, seed, Masking(right=0), "cuda", causal=True, scale=2.0 / dim**0.5)


def test_more_tiles_than_can_run_at_once(seed):
    """Persistent CTAs take several tiles, causal ones from the queue; twice, as the counter is used again."""
    shapes = _shapes((16, 4), (1501, 1500), (64, 64), batch=3)
    for causal in (False, True, True):
        run(shapes, seed, Masking(right=0 if causal else None), "cuda", causal=causal)


@pytest.mark.parametrize(
    ("dims", "lengths", "causal"),
    [((64, 64), (301, 1023), True), ((128, 128), (511, 2047), False), ((256, 256), (203, 500), True),
     ((48, 112), (113, 203), False)],
    ids=str,
)  # fmt: skip
def test_the_sm80_class_kernel(dims, lengths, causal, seed):
    """That of Ada, whose instructions are two of fp16 here."""
    masking, config = Masking(right=0 if causal else None), sm80_tile(*dims, right=causal)
    for heads in ((4, 2), (40, 8)):  # one wave of tiles, and several
        run(_shapes(heads, lengths, dims), seed, masking, "cuda", causal=causal, config=config)


def test_variants_of_the_sm80_class_kernel(seed):
    """Windows, sinks and softcap, factors of blocks of keys, lists, packed sequences with NaN between."""
    shapes = _shapes((2, 1), (701, 900), (128, 128))
    sinks = torch.tensor([-1.0, 2.0], device="cuda")
    masking = Masking(left=300, right=40, softcap=2.0, sinks=sinks)
    config = sm80_tile(128, 128, right=True, left=True, softcap=True, sinks=True)
    options = {"window": (300, 40), "softcap": 2.0, "sinks": sinks, "config": config}
    run(shapes, seed, masking, "cuda", by_block="kv", **options)
    config = sm80_tile(128, 128, right=True)
    run_packed((700, 0, 1, 1300), (1500, 5, 1, 1001), 13, seed, "cuda", dim=128, causal=True, config=config)
    lists = attention_blocks.window_blocks(701, 900, left=300, block=(128, 128), device="cuda")
    masking = Masking(left=300, right=0)
    run(shapes, seed, masking, "cuda", blocks=lists, window=(300, 0), config=config)


def test_windows(seed):
    masking = Masking(left=100, right=0)
    run(_shapes((2, 1), (701, 900), (128, 128)), seed, masking, "cuda", window=(100, 0))
    sinks = torch.tensor([-1.0, 2.0], device="cuda")
    masking = Masking(left=300, right=40, softcap=2.0, sinks=sinks)
    options = {"window": (300, 40), "softcap": 2.0, "sinks": sinks}
    run(_shapes((2, 1), (701, 900), (128, 128)), seed, masking, "cuda", **options)


def test_window_lists(seed):
    lists = attention_blocks.window_blocks(1001, 1230, left=300, block=(128, 128), device="cuda")
    masking = Masking(left=300, right=0)
    run(_shapes((2, 1), (1001, 1230), (128, 128)), seed, masking, "cuda", blocks=lists, window=(300, 0))


def test_unsorted_lists_with_garbage_and_empty_rows(seed):
    """More query tiles than CTAs, a third of them with nothing to do."""
    rows, entries = 40, 4
    indices = torch.tensor([5, 0, 99, -7], dtype=torch.int32).repeat(rows, 1).view(1, 1, rows, entries)
    counts = torch.tensor([2, 0, 1], dtype=torch.int32).repeat(14)[:rows].view(1, 1, rows)
    lists = BlockLists(None, None, counts.cuda(), indices.cuda(), (128, 128))
    shapes = _shapes((4, 4), (128 * rows - 9, 800), (128, 128))
    allowed = allowed_by_lists(lists.tensors, lists.block, (2, 4, 128 * rows - 9, 800)).cuda()
    run(shapes, seed, Masking(allowed=allowed), "cuda", blocks=lists)


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


def test_packed_under_torch_compile(seed):
    q, k, v = (packed((200, 50), 0, 2, 128, seed + i, "cuda") for i in range(3))

    def call(q, k, v, starts):
        return kernels_dsl.attention_fp8_varlen(q, k, v, starts, starts, 200, causal=True, return_lse=True)

    arguments = (q[0], k[0], v[0], q[3])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(f, e) for f, e in zip(compiled(*arguments), call(*arguments)))


def test_a_first_call_in_a_capture(seed):
    """A kernel that nobody else asks for: its tile is unusual."""
    config = kernels_dsl.config.attention.Sm90AttentionConfig(64, 96, 64, 64)
    q, _, _ = quantised((1, 64, 1, 64), seed, "cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(lowering.CaptureError, match="warm-up"), torch.cuda.graph(graph):
        kernels_dsl.attention_fp8(q, q, q, config=config, alignment="top_left", window=(3, 9))


@pytest.mark.parametrize("causal", [False, True])
def test_descales_of_blocks_of_keys(causal, seed):
    masking = Masking(right=0 if causal else None)
    run(_shapes((4, 2), (701, 1500), (128, 128)), seed, masking, "cuda", by_block="kv", causal=causal)
    run(_shapes((2, 2), (301, 700), (64, 128)), seed, masking, "cuda", by_block="v", causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal, seed):
    """Empty and one-token sequences, starts at any key, NaN behind what counts, many sequences."""
    run_packed((700, 0, 1, 1300, 129), (1500, 5, 1, 1001, 300), 13, seed, "cuda", dim=128, causal=causal)
    lengths = tuple(range(1, 200, 7))
    run_packed(lengths, lengths[::-1], 0, seed, "cuda", heads=(8, 4), dim=128, causal=causal)
