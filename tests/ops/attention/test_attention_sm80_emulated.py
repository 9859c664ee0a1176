"""Attention on SM80-class GPUs end to end without a GPU: the op and the kernel for sm_89 in the emulator.

Few calls, each with several things at once; the variants are the SM90 kernel's, from the same blocks, and
have a test of their own each in `test_attention_emulated.py`.
"""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from reference.attention import Masking, allowed_by_lists
from tests.ops.attention.attention_cases import check_close, inputs, run


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_89"):
        yield


def _tensors(heads, lengths, dims, seed, dtype=torch.bfloat16):
    h, hk = heads
    return inputs((1, lengths[0], h, dims[0]), (1, lengths[1], hk, dims[0]), dims[1], seed, dtype)


def test_ragged_grouped_query_fp16(seed):
    run(_tensors((2, 1), (70, 150), (64, 64), seed, torch.float16), Masking())


@pytest.mark.parametrize("dims", [(40, 96), (256, 192)])
def test_head_dimensions_causal_softcap_and_sinks(dims, seed):
    sinks = torch.tensor([0.5, -1.0])
    masking = Masking(right=0, softcap=2.0, sinks=sinks)
    options = {"causal": True, "softcap": 2.0, "sinks": sinks, "scale": 0.3}
    run(_tensors((2, 2), (40, 70), dims, seed), masking, **options)


def test_window_that_leaves_rows_empty(seed):
    masking = Masking(left=20, right=3, top_left=True)
    options = {"window": (20, 3), "alignment": "top_left"}
    run(_tensors((1, 1), (200, 150), (64, 64), seed), masking, **options)


def _alibi(score, b, h, i, j):
    return score - (i - j) * 0.125 * (h + 1)


def test_score_function_and_boolean_mask(seed):
    mask = torch.rand((1, 1, 70, 90), generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[:, :, 3] = False
    masking = Masking(score_mod=_alibi, allowed=mask)
    run(_tensors((2, 2), (70, 90), (64, 64), seed), masking, score_mod=_alibi, mask=mask)


def test_unsorted_lists_with_garbage_and_an_empty_row(seed):
    indices = torch.tensor([2, 0, 99, -7], dtype=torch.int32).view(1, 1, 1, 4).repeat(1, 1, 3, 1)
    counts = torch.tensor([2, 0, 1], dtype=torch.int32).view(1, 1, 3)
    lists = BlockLists(None, None, counts, indices, (64, 128))
    allowed = allowed_by_lists(lists.tensors, lists.block, (1, 1, 190, 300))
    q, k, v = _tensors((1, 1), (190, 300), (64, 64), seed)
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, 128:256], dirty_v[:, 128:256] = torch.nan, torch.nan  # listed by nobody
    found = kernels_dsl.attention(q, dirty_k, dirty_v, blocks=lists, return_lse=True)
    check_close(found, (q, k, v), Masking(allowed=allowed))


def test_packed_with_nan_behind_the_keys_that_count(seed):
    q_lens, k_lens, used = (70, 0, 1, 40), (70, 5, 1, 90), (50, 5, 0, 90)
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, k_lens)]
    q, k, v = inputs((sum(q_lens), 1, 64), (sum(k_lens) + 7, 1, 64), 64, seed)
    for x in (k, v):
        x[sum(k_lens) :] = torch.nan
        for first, end, count in zip(starts[1][:-1], starts[1][1:], used):
            x[first + count : end] = torch.nan
    options = {"causal": True, "seqused_k": torch.tensor(used).int(), "return_lse": True}
    out, lse = kernels_dsl.attention_varlen(q, k, v, *starts, max(q_lens), **options)
    for n, count in enumerate(used):
        rows = slice(int(starts[0][n]), int(starts[0][n + 1]))
        keys = slice(int(starts[1][n]), int(starts[1][n]) + count)
        if q_lens[n]:
            part = (q[None, rows], k[None, keys], v[None, keys])
            check_close((out[None, rows], lse[None, :, rows]), part, Masking(right=0))


@pytest.mark.parametrize(
    "config",
    [
        Sm80AttentionConfig(64, 32, 64, 64, q_registers=True, overlap=True, lazy_rescale=False),
        Sm80AttentionConfig(128, 32, 64, 96, overlap=True, ahead=2, lazy_rescale=True),
        Sm80AttentionConfig(128, 64, 64, 64, warps=8, q_registers=True),
    ],
    ids=["registers-overlap", "overlap-lazy", "eight-warps"],
)
def test_configurations_with_a_growing_maximum(config, seed):
    """Scores that keep growing along the keys, in steps below and above what a lazy maximum tolerates."""
    q, k, v = _tensors((1, 1), (70, 200), (64, config.dim_v), seed)
    k = k * torch.linspace(8.0, 0.1, 200).view(1, -1, 1, 1).bfloat16()  # visited from the right
    run((q, k, v), Masking(), config=config)


def test_nothing_but_the_output_is_written(seed):
    """An `out` inside of a larger tensor, and inputs that are views of a packed projection."""
    qkv = torch.randn(1, 70, 3, 1, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    q, k, v = qkv.unbind(2)
    base = torch.full((1, 90, 3, 80), torch.nan).bfloat16()
    out = base[:, 10:80, 1:2, 8:72]
    result, lse = kernels_dsl.attention(q, k, v, out=out, return_lse=True)
    assert result is out
    check_close((out, lse), (q, k, v), Masking())
    assert int(base.isnan().sum()) == base.numel() - out.numel()
