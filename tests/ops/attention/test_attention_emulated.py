"""Attention end to end without a GPU: the compiled PTX of the SM90 kernel runs in the emulator.

Sizes are small, and chosen so that tiles are ragged and more than one key block is visited. The emulator
also reports races and reads of memory that nobody wrote. TEST_ALL_KERNELS=1 takes the whole grids.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import bias
from torch.nn.attention import flex_attention as flex

import kernels_dsl
from kernels_dsl.sparse import attention_blocks
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from reference.attention import Masking, allowed_by_lists
from tests.ops.attention.attention_cases import check_close, inputs, run
from tests.samples import pairs


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_90a"):
        yield


def _tensors(heads, lengths, dims, seed, batch=1, dtype=torch.bfloat16):
    h, hk = heads
    return inputs((batch, lengths[0], h, dims[0]), (batch, lengths[1], hk, dims[0]), dims[1], seed, dtype)


@pytest.mark.parametrize(
    ("heads", "lengths", "dims"),
    [((2, 1), (70, 150), (64, 64)), ((1, 1), (1, 3), (64, 64)), ((1, 1), (70, 90), (40, 24)),
     ((1, 1), (70, 90), (192, 128)), ((1, 1), (70, 90), (256, 256)), ((1, 1), (65, 90), (96, 96))],
)  # fmt: skip
def test_shapes(heads, lengths, dims, seed):
    run(_tensors(heads, lengths, dims, seed), Masking())


def test_batch_and_fp16(seed):
    run(_tensors((2, 2), (33, 40), (64, 64), seed, batch=2, dtype=torch.float16), Masking())


@pytest.mark.parametrize(
    ("alignment", "lengths"),
    pairs("causal", ("bottom_right", "top_left"), [(130, 200), (200, 50), (64, 64)]),
)
def test_causal(lengths, alignment, seed):
    masking = Masking(right=0, top_left=alignment == "top_left")
    run(_tensors((1, 1), lengths, (64, 64), seed), masking, causal=True, alignment=alignment)


@pytest.mark.parametrize("window", [(20, 3), (None, 5), (150, 0), (0, 0)])
def test_window(window, seed):
    masking = Masking(left=window[0], right=window[1])
    run(_tensors((1, 1), (250, 280), (64, 64), seed), masking, window=window)


def test_scale_softcap_and_sinks(seed):
    sinks = torch.tensor([0.5, -1.0])
    masking = Masking(right=0, softcap=2.0, sinks=sinks)
    tensors = _tensors((2, 2), (70, 90), (64, 64), seed)
    run(tensors, masking, causal=True, softcap=2.0, sinks=sinks, scale=0.3)


def test_boolean_mask_with_an_empty_row(seed):
    """And with sinks, of which that row has nothing else. (Without: `test_attention_packed_emulated`.)"""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand((1, 2, 70, 90), generator=generator) < 0.5
    mask[:, :, 3] = False
    tensors, sinks = _tensors((2, 2), (70, 90), (64, 64), seed), torch.tensor([0.5, -1.0])
    run(tensors, Masking(allowed=mask, sinks=sinks), mask=mask, sinks=sinks)


def test_additive_mask(seed):
    bias = torch.randn((70, 90), generator=torch.Generator().manual_seed(seed)).bfloat16()
    bias[5, 7] = -torch.inf
    run(_tensors((2, 2), (70, 90), (64, 64), seed), Masking(bias=bias), mask=bias)


def _alibi(score, b, h, i, j):
    return score - (i - j) * 0.125 * (h + 1)


def test_score_function(seed):
    run(_tensors((2, 2), (70, 90), (64, 64), seed), Masking(score_mod=_alibi), score_mod=_alibi)


def _every_third(b, h, i, j):
    return (i - j) % 3 == 0


def _near(b, h, i, j):
    return (i - j < 30) & (j - i < 50)


def test_torch_block_mask_of_two_functions(seed):
    mask = flex.create_block_mask(flex.and_masks(_every_third, _near), None, None, 70, 190, device="cpu")
    masking = Masking(mask_mod=lambda *place: _every_third(*place) & _near(*place))
    run(_tensors((1, 1), (70, 190), (64, 64), seed), masking, blocks=mask)


def test_mask_function_that_reads_a_tensor(seed):
    documents = torch.tensor([[0] * 30 + [1] * 40 + [2] * 60], dtype=torch.int32)
    tensors = _tensors((1, 1), (130, 130), (64, 64), seed)
    lists = attention_blocks.document_blocks(documents, block=(64, 64))
    same = documents[0, :, None] == documents[0, None, :]
    options = {"mask_mod": attention_blocks.document_mask, "aux": (documents,), "causal": True}
    run(tensors, Masking(right=0, allowed=same[None, None]), blocks=lists, **options)


@pytest.mark.parametrize(("block", "dim"), [((64, 64), 64), ((128, 128), 64), ((128, 128), 192)])
def test_window_lists(block, dim, seed):
    lists = attention_blocks.window_blocks(200, 230, left=100, block=block, device="cpu")
    tensors = _tensors((1, 1), (200, 230), (dim, dim), seed)
    run(tensors, Masking(left=100, right=0), blocks=lists, window=(100, 0))


def test_unsorted_lists_with_garbage_and_an_empty_row(seed):
    """By a configuration of the caller's, of whose tiles a listed block is two."""
    config = kernels_dsl.Sm90AttentionConfig(64, 64, 64, 64)
    indices = torch.tensor([2, 0, 99, -7], dtype=torch.int32).view(1, 1, 1, 4).repeat(1, 1, 3, 1)
    counts = torch.tensor([2, 0, 1], dtype=torch.int32).view(1, 1, 3)
    lists = BlockLists(None, None, counts, indices, (64, 128))
    allowed = allowed_by_lists(lists.tensors, lists.block, (1, 2, 190, 300))
    run(_tensors((2, 2), (190, 300), (64, 64), seed), Masking(allowed=allowed), blocks=lists, config=config)


@pytest.mark.parametrize(("causal", "used"), pairs("packed", (False, True), [None, (50, 5, 0, 100)]))
def test_packed(used, causal, seed):
    """Empty and one-token sequences, and NaN in K and V wherever no key counts."""
    q_lens, k_lens = (70, 0, 1, 130), (70, 5, 1, 130)
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, k_lens)]
    q, k, v = inputs((sum(q_lens), 2, 64), (sum(k_lens) + 7, 2, 64), 64, seed)
    counted = used or k_lens
    for x in (k, v):
        x[sum(k_lens) :] = torch.nan
        for first, end, count in zip(starts[1][:-1], starts[1][1:], counted):
            x[first + count : end] = torch.nan
    options = {"causal": causal, "seqused_k": None if used is None else torch.tensor(used).int()}
    out, lse = kernels_dsl.attention_varlen(q, k, v, *starts, max(q_lens), return_lse=True, **options)
    for n, count in enumerate(counted):
        rows = slice(int(starts[0][n]), int(starts[0][n + 1]))
        keys = slice(int(starts[1][n]), int(starts[1][n]) + count)
        if q_lens[n]:
            part = (q[None, rows], k[None, keys], v[None, keys])
            check_close((out[None, rows], lse[None, :, rows]), part, Masking(right=0 if causal else None))


def test_nan_behind_the_window_is_not_read(seed):
    q, k, v = _tensors((1, 1), (64, 256), (64, 64), seed)
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, :64], dirty_v[:, :64] = torch.nan, torch.nan
    config = kernels_dsl.config.attention.Sm90AttentionConfig(64, 64, 64, 64)
    found = kernels_dsl.attention(q, dirty_k, dirty_v, window=(64, 0), return_lse=True, config=config)
    check_close(found, (q, k, v), Masking(left=64, right=0))


def test_torch_layout_and_top_left(seed):
    q, k, v = (x.transpose(1, 2) for x in _tensors((2, 2), (30, 50), (64, 64), seed))
    found = kernels_dsl.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True
    )
    assert found.shape == q.shape
    assert float((found.double() - expected).abs().max()) < 2e-2
    biased = kernels_dsl.scaled_dot_product_attention(q, k, v, attn_mask=bias.causal_upper_left(30, 50))
    assert torch.equal(biased, found)
    found = kernels_dsl.scaled_dot_product_attention(q, k, v, attn_mask=bias.causal_lower_right(30, 50))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), attn_mask=bias.causal_lower_right(30, 50)
    )
    assert float((found.double() - expected).abs().max()) < 2e-2


def test_vmap_goes_through_the_operator(seed):
    tensors = _tensors((1, 1), (5, 9), (64, 64), seed)
    found = torch.vmap(kernels_dsl.attention)(*(x[None] for x in tensors))
    assert torch.equal(found[0], kernels_dsl.attention(*tensors))


def test_out_and_strides(seed):
    """Slices of a packed projection, and an `out` that is not aligned."""
    qkv = torch.randn(1, 70, 3, 2, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    q, k, v = qkv.unbind(2)
    base = torch.full((1, 70, 2, 65), torch.nan).bfloat16()
    out = base[..., 1:]
    result, lse = kernels_dsl.attention(q, k, v, out=out, return_lse=True)
    assert result is out
    check_close((out, lse), (q, k, v), Masking())
    assert bool(base[..., 0].isnan().all())


def test_no_keys_and_no_queries():
    q, k, v = torch.ones(1, 3, 2, 64).bfloat16(), *[torch.ones(1, 0, 2, 64).bfloat16()] * 2
    out, lse = kernels_dsl.attention(q, k, v, return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
    assert kernels_dsl.attention(q[:, :0], q, q).shape == (1, 0, 2, 64)
    sinks = torch.tensor([0.5, -2.0])
    out, lse = kernels_dsl.attention(q, k, v, sinks=sinks, return_lse=True)
    assert bool((out == 0).all()) and torch.equal(lse, sinks[None, :, None].expand(1, 2, 3))


def test_views_that_torch_negates(seed):
    """Their memory holds the negative values. An `out` of this kind is refused."""
    q, k, v = _tensors((2, 2), (33, 40), (64, 64), seed)
    negated = [torch._neg_view(-x) for x in (q, k, v)]
    slopes, sinks, mask = torch.tensor([0.5, 2.0]), torch.tensor([0.5, -1.0]), torch.randn(33, 40)
    found = kernels_dsl.attention(*negated, return_lse=True)
    check_close(found, (q, k, v), Masking())
    assert torch.equal(kernels_dsl.attention(*negated), kernels_dsl.attention(q, k, v))
    options = {"score_mod": _sloped, "aux": (slopes,), "sinks": sinks, "mask": mask}
    expected = kernels_dsl.attention(q, k, v, **options)
    slopes, sinks, mask = (torch._neg_view(-x) for x in (slopes, sinks, mask))
    options.update(aux=(slopes,), sinks=sinks, mask=mask)
    assert torch.equal(kernels_dsl.attention(q, k, v, **options), expected)
    out = torch.empty_like(q)
    kernels_dsl.attention(q, k, v, out=out)
    why = kernels_dsl.attention_supports(q, k, v, out=torch._neg_view(out))
    assert "out is a view that torch negates lazily" in str(why)
    with pytest.raises(ValueError, match="out is a view that torch negates lazily, must be"):
        kernels_dsl.attention(q, k, v, out=torch._neg_view(out))


def _sloped(score, b, h, i, j, slopes):
    return score * slopes[h]
