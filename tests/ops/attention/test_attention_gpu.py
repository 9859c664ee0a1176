"""Attention on a GPU: shapes, masks, streams, graphs, torch.compile, against float64.

Every test runs with either family of kernels, where the GPU can: the SM90 one, and the SM80-class one.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import kernels_dsl
from kernels_dsl.sparse import attention_blocks
from reference.attention import Masking, allowed_by_lists
from reference.buffers import check_output, poisoned
from reference.inputs import case_seed
from tests.ops.attention.attention_cases import check_close, inputs, run

pytestmark = pytest.mark.gpu
LENGTHS = [(1, 239), (3, 1024), (113, 203), (113, 128), (1023, 1024), (1024, 1023), (512, 2048), (2048, 512)]


@pytest.fixture(params=[pytest.param("sm90", marks=pytest.mark.sm90), "sm80"])
def family(request):
    return request.param


def _tensors(heads, lengths, dims, seed, batch=2, dtype=torch.bfloat16):
    h, hk = heads
    shapes = (batch, lengths[0], h, dims[0]), (batch, lengths[1], hk, dims[0])
    return inputs(*shapes, dims[1], seed, dtype, "cuda")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (96, 96)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(lengths, dims, causal, seed, family):
    masking = Masking(right=0 if causal else None)
    run(_tensors((4, 2), lengths, dims, seed), masking, causal=causal, family=family)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_maxima_that_move(scale, dim, seed, family):
    """Scores far from each other: rows get new maxima often, and late."""
    q, k, v = _tensors((4, 2), (700, 900), (dim, dim), seed)
    run((q, k, v), Masking(right=0), causal=True, scale=scale, family=family)
    k[:, :64] *= 10
    run((q, k, v), Masking(), scale=scale, family=family)


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_head_dimension(dim, seed, family):
    tensors = _tensors((2, 2), (113, 203), (dim, dim), seed, batch=1)
    run(tensors, Masking(right=0), causal=True, family=family)


def _generated(count: int) -> list[dict]:
    """Calls drawn at random, all of it from one seed."""
    draw = random.Random(case_seed("attention"))
    cases = []
    for _ in range(count):
        hk = draw.choice([1, 2, 3])
        left, right = draw.choice([None, 0, 17, 300]), draw.choice([None, 0, 0, 5, 200])
        cases.append(
            {
                "heads": (hk * draw.choice([1, 2, 5]), hk),
                "lengths": (draw.randint(1, 700), draw.randint(1, 900)),
                "dims": (draw.choice([64, 128, 72]), draw.choice([64, 128, 40])),
                "window": (left, right),
                "alignment": draw.choice(["bottom_right", "top_left"]),
                "softcap": draw.choice([0.0, 0.0, 3.0]),
                "sinks": draw.random() < 0.3,
                "mask": draw.choice([None, None, "boolean", "additive"]),
                "dtype": draw.choice([torch.bfloat16, torch.float16]),
            }
        )
    return cases


@pytest.mark.parametrize("case", _generated(40), ids=str)
def test_generated(case, seed, family):
    tensors = _tensors(case["heads"], case["lengths"], case["dims"], seed, dtype=case["dtype"])
    generator = torch.Generator().manual_seed(seed)
    left, right = case["window"]
    shape = (2, 1, *case["lengths"])
    boolean = additive = None
    if case["mask"] == "boolean":
        boolean = (torch.rand(shape, generator=generator) < 0.8).cuda()
    elif case["mask"] == "additive":
        additive = torch.randn(shape, generator=generator).cuda()
    sinks = torch.randn(case["heads"][0], generator=generator).cuda() if case["sinks"] else None
    masking = Masking(left, right, case["alignment"] == "top_left", case["softcap"], boolean, additive, sinks)
    run(
        tensors, masking, window=case["window"], alignment=case["alignment"], softcap=case["softcap"],
        mask=boolean if boolean is not None else additive, sinks=sinks, family=family,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_packed(causal, dim, seed, family):
    draw = random.Random(seed)
    q_lens = [draw.choice([0, 1, 77, 128, 500, 1024]) for _ in range(9)]
    k_lens = [draw.choice([0, 1, 64, 130, 700, 1000]) for _ in range(9)]
    starts = [torch.tensor([0, *lens]).cumsum(0).int().cuda() for lens in (q_lens, k_lens)]
    q, k, v = inputs((sum(q_lens), 4, dim), (sum(k_lens), 2, dim), dim, seed, device="cuda")
    options = {"causal": causal, "return_lse": True, "family": family}
    out, lse = kernels_dsl.attention_varlen(q, k, v, *starts, max(q_lens), **options)
    offsets = [list(itertools.accumulate([0, *lens])) for lens in (q_lens, k_lens)]
    for n in range(9):
        rows, keys = (slice(o[n], o[n + 1]) for o in offsets)
        if q_lens[n]:
            part = (q[None, rows], k[None, keys], v[None, keys])
            check_close((out[None, rows], lse[None, :, rows]), part, Masking(right=0 if causal else None))


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64)])
@pytest.mark.parametrize("causal", [False, True])
def test_top_k_lists(block, causal, seed, family):
    tensors = _tensors((4, 4), (1000, 1500), (128, 128), seed)
    blocks = (-(-1000 // block[0]), -(-1500 // block[1]))
    scores = torch.randn((2, 4, *blocks), generator=torch.Generator().manual_seed(seed)).cuda()
    lists = attention_blocks.topk_blocks(scores, 3, causal=causal, block=block, q_len=1000, k_len=1500)
    allowed = allowed_by_lists(lists.tensors, block, (2, 4, 1000, 1500)).cuda()
    masking = Masking(right=0 if causal else None, allowed=allowed)
    run(tensors, masking, blocks=lists, causal=causal, family=family)


def test_torch_block_mask(seed, family):
    """As one function, and made of two by torch."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    def causal(b, h, i, j):
        return i >= j

    def near(b, h, i, j):
        return i - j < 200

    def window(b, h, i, j):
        return (i >= j) & (i - j < 200)

    tensors = _tensors((2, 2), (1000, 1000), (128, 128), seed)
    for function in (window, and_masks(causal, near)):
        mask = create_block_mask(function, None, None, 1000, 1000, device="cuda")
        run(tensors, Masking(left=199, right=0), blocks=mask, family=family)


@pytest.mark.parametrize(
    "shape",
    [(), (203,), (113, 1), (4, 1, 1), (2, 1, 1, 203), (203, 113)],
    ids=["scalar", *map(str, range(5))],
)
@pytest.mark.parametrize("boolean", [False, True])
def test_masks_that_broadcast(shape, boolean, seed, family):
    """And a transposed one, the last."""
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()
    mask = mask.t() if shape == (203, 113) else mask
    mask = mask < 1 if boolean else mask
    full = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    masking = Masking(allowed=full) if boolean else Masking(bias=full)
    run(_tensors((4, 2), (113, 203), (64, 64), seed), masking, mask=mask, family=family)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_mask_tensors_beside_lists(kind, seed, family):
    """A score function too. Only partial blocks are masked; numbers are added everywhere."""
    tensors = _tensors((4, 4), (1000, 1500), (128, 128), seed)
    generator = torch.Generator().manual_seed(seed)
    lists = attention_blocks.window_blocks(1000, 1500, left=300, block=(128, 128), device="cuda")
    boolean = additive = None
    if kind == "boolean":
        boolean = (torch.rand((2, 1, 1000, 1500), generator=generator) < 0.7).cuda()
        hidden = ~boolean
    else:
        additive = torch.randn((1, 4, 1, 1500), generator=generator).cuda()
        hidden = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device="cuda")
    i, j = torch.arange(1000, device="cuda")[:, None] + 500, torch.arange(1500, device="cuda")
    hidden = hidden | (j > i) | (j < i - 300)
    allowed = allowed_by_lists(lists.tensors, (128, 128), (2, 4, 1000, 1500), hidden).cuda()
    run(
        tensors, Masking(allowed=allowed, bias=additive, score_mod=_alibi), blocks=lists, score_mod=_alibi,
        window=(300, 0), mask=boolean if additive is None else additive, family=family,
    )  # fmt: skip


def _alibi(score, b, h, i, j):
    return score - (i - j) * 0.125


def test_output_is_written_once_and_nothing_else(seed, family):
    q, k, v = _tensors((4, 4), (301, 400), (128, 128), seed)
    place = poisoned(tuple(q.shape), q.dtype, device="cuda")
    kernels_dsl.attention(q, k, v, out=place.tensor, family=family)
    check_output(place)


def test_runs_are_equal(seed, family):
    q, k, v = _tensors((8, 8), (1500, 1500), (128, 128), seed)
    first = kernels_dsl.attention(q, k, v, causal=True, family=family)
    for _ in range(10):
        assert torch.equal(kernels_dsl.attention(q, k, v, causal=True, family=family), first)


def test_two_streams_at_a_time(seed, family):
    """Each stream has a tile counter of its own."""
    tensors = [_tensors((8, 8), (1500, 1500), (64, 64), seed + n) for n in range(2)]
    expected = [kernels_dsl.attention(*t, causal=True, family=family) for t in tensors]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(10):
        for stream, t, results in zip(streams, tensors, found):
            with torch.cuda.stream(stream):
                results.append(kernels_dsl.attention(*t, causal=True, family=family))
    torch.cuda.synchronize()
    assert all(torch.equal(r, e) for results, e in zip(found, expected) for r in results)


def test_cuda_graph(seed, family):
    q, k, v = _tensors((4, 4), (500, 500), (64, 64), seed)
    expected = kernels_dsl.attention(q, k, v, causal=True, family=family)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels_dsl.attention(q, k, v, causal=True, family=family)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def test_torch_compile(seed, family):
    q, k, v = _tensors((4, 2), (300, 300), (64, 64), seed)
    options = {"causal": True, "family": family}
    compiled = torch.compile(lambda *t: kernels_dsl.attention(*t, **options) * 2, fullgraph=True)
    assert torch.equal(compiled(q, k, v), kernels_dsl.attention(q, k, v, **options) * 2)


@pytest.mark.sm90
def test_torch_drop_in(seed):
    q, k, v = (x.transpose(1, 2) for x in _tensors((4, 4), (300, 400), (64, 64), seed))
    found = kernels_dsl.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 3e-2


def test_a_long_window_needs_no_memory_but_its_output(family):
    """S = 131072: anything of size S x S would be 16 GiB and more. Once as a window, once as block lists."""
    length = 131072
    q, k, v = (torch.randn((1, length, 2, 128), device="cuda").bfloat16() for _ in range(3))
    lists = attention_blocks.window_blocks(length, length, left=2047)
    for options in ({}, {"blocks": lists}):
        options = {"window": (2047, 0), "family": family, "return_lse": True, **options}
        kernels_dsl.attention(q, k, v, **options)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, lse = kernels_dsl.attention(q, k, v, **options)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= out.nbytes + lse.nbytes + (1 << 20)
        tail = (q[:, -300:], k[:, -2400:], v[:, -2400:])
        check_close((out[:, -300:], lse[..., -300:]), tail, Masking(left=2047, right=0))
        del out, lse


def test_more_than_2_to_the_31_elements(family):
    """Offsets do not fit 32 bits: the last head of a batch of views into a large tensor, out included."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free GPU memory")
    large = torch.zeros((1, 1 << 18, 65, 128), dtype=torch.bfloat16, device="cuda")
    q = large[:, -300:, -1:]
    q.normal_()
    k = large[:, :, -1:]
    out = torch.full_like(large, torch.nan)[:, -300:, -1:]
    options = {"causal": True, "window": (512, 0), "return_lse": True, "family": family}
    found = kernels_dsl.attention(q, k, k, out=out, **options)
    tail = k[:, -1024:]
    check_close(found, (q, tail, tail), Masking(left=512, right=0))


def test_a_mask_of_more_than_2_to_the_31_elements(seed, family):
    rows, columns = 300, 400
    q, k, v = _tensors((1, 1), (rows, columns), (64, 64), seed, batch=1)
    pitch = (1 << 31) // (rows - 1) + 8
    mask = torch.zeros((rows, pitch), dtype=torch.bool, device="cuda")[:, :columns]
    mask.copy_(torch.rand((rows, columns), device="cuda") < 0.5)
    run((q, k, v), Masking(allowed=mask[None, None]), mask=mask, family=family)
