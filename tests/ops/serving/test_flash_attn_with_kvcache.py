"""`flash_attn_with_kvcache` in the emulator, compared with float64."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.flash_attn import flash_attn_with_kvcache
from lowering import emulator
from reference import tolerance
from reference.attention import Masking, attention
from tests.ops.serving.decode_cases import Paged, check, paged

NEW = 3
"""Keys that a call appends."""


def without_last(case: Paged, page: int) -> tuple[Paged, torch.Tensor, torch.Tensor]:
    """The case before its last keys were written, and these, (B, NEW, KV heads, D)."""
    k, v = (torch.stack([pair[i][-NEW:] for pair in case.whole]) for i in (0, 1))
    for b, length in enumerate(case.seqused_k.tolist()):
        for position in range(length - NEW, length):
            at = case.block_table[b, position // page], position % page
            case.k_cache[at], case.v_cache[at] = torch.nan, torch.nan
    return case._replace(seqused_k=case.seqused_k - NEW), k, v


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_new_keys_in_pages(arch, seed):
    """They are written first, and seen; those of FlashAttention-3's name of the table, too."""
    case, k, v = without_last(paged((40, 3, 17), 16, seed, queries=2), 16)
    before = case.seqused_k.clone()
    with emulator.run(arch=arch, sms=2):
        found = flash_attn_with_kvcache(
            case.q, case.k_cache, case.v_cache, k, v, cache_seqlens=case.seqused_k,
            block_table=case.block_table, causal=True, window_size=(24, 0), return_softmax_lse=True,
        )  # fmt: skip
        again = flash_attn_with_kvcache(
            case.q, case.k_cache, case.v_cache, cache_seqlens=case.seqused_k + NEW,
            page_table=case.block_table, causal=True, window_size=(24, 0), num_splits=1,
        )  # fmt: skip
    check(case, found, Masking(left=24, right=0))
    assert torch.equal(again, found[0]) and torch.equal(case.seqused_k, before)


def test_many_queries(seed):
    """A prefill in pages: more rows than the kernel for decoding takes, softcap and sinks."""
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    case, k, v = without_last(paged((50, 70), 16, seed, queries=40), 16)
    with emulator.run(arch="sm_90a"):
        found = flash_attn_with_kvcache(
            case.q, case.k_cache, case.v_cache, k, v, cache_seqlens=case.seqused_k,
            block_table=case.block_table, causal=True, softcap=3.0, sinks=sinks, return_softmax_lse=True,
        )  # fmt: skip
    check(case, found, Masking(right=0, softcap=3.0, sinks=sinks))


def test_many_queries_of_an_fp8_cache(seed):
    """Keys are not rounded once more with their scale: the log-sum-exp is as exact as with few queries."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 80, 2, 32, generator=generator).bfloat16()
    k, v = (torch.randn(1, 120, 2, 32, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.tensor([[1.9, 0.7]])
    with emulator.run(arch="sm_90a"):
        out, lse = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=120, k_descale=scale, v_descale=scale, return_softmax_lse=True
        )
    exact = [x.double() * scale[..., None].double() for x in (k, v)]
    expected, expected_lse = attention(q, *exact, Masking())
    peer, _ = attention(q, *exact, Masking(), dtype=torch.bfloat16)
    tolerance.check(out, expected, peer)
    assert float((lse - expected_lse).abs().max()) < 1e-5


@pytest.mark.parametrize("queries", [2, 40])
def test_lengths_that_are_a_column(queries, seed):
    """Contiguous or not is not the caller's concern, whichever kernel takes the call."""
    case = paged((40, 17), 16, seed, queries=queries)
    column = torch.stack([case.seqused_k, case.seqused_k * 0], 1)[:, 0]
    with emulator.run(arch="sm_90a"):
        found = flash_attn_with_kvcache(
            case.q, case.k_cache, case.v_cache, cache_seqlens=column, block_table=case.block_table,
            return_softmax_lse=True,
        )  # fmt: skip
    check(case, found, Masking())


def test_caches_without_pages(seed):
    """The cache of each sequence by its number, one length for all; few queries and many."""
    for queries in (1, 40):
        case = paged((48, 48), 64, seed, queries=queries, dim=72)
        with emulator.run(arch="sm_90a"):
            found = flash_attn_with_kvcache(
                case.q, case.k_cache, case.v_cache, cache_seqlens=48,
                cache_batch_idx=case.block_table[:, 0].contiguous(), return_softmax_lse=True,
            )  # fmt: skip
            own = [cache[case.block_table[:, 0]][:, :48] for cache in (case.k_cache, case.v_cache)]
            same = flash_attn_with_kvcache(case.q, *own)
        check(case, found, Masking())
        assert torch.equal(same, found[0])


WRONG = {
    "rotary_cos": ({"rotary_cos": torch.ones(1)}, ValueError, "rotary_cos is given, must be None"),
    "rotary_interleaved": ({"rotary_interleaved": False}, ValueError, "has no effect without rotary_cos"),
    "leftpad": ({"cache_leftpad": torch.ones(1)}, ValueError, "cache_leftpad is given"),
    "alibi": ({"alibi_slopes": torch.ones(1)}, ValueError, "alibi_slopes is given"),
    "splits": ({"num_splits": 2}, ValueError, "num_splits is 2, must be 0 or 1"),
    "split": ({"num_splits": 0.5}, TypeError, "num_splits is 0.5"),
    "v alone": ({"k": None}, ValueError, "k is None, must be given"),
    "no lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens is None, must be given with k and v"),
    "length": ({"cache_seqlens": -1}, ValueError, "cache_seqlens is -1"),
    "lengths": ({"cache_seqlens": torch.ones(2)}, ValueError, "cache_seqlens is torch.float32"),
    "tables": (
        {"cache_batch_idx": torch.zeros(2, dtype=torch.int32)},
        ValueError,
        "given beside block_table",
    ),
    "table": ({"block_table": torch.zeros(2)}, ValueError, "block_table is torch.float32"),
    "q": ({"q": torch.ones(2, 3)}, ValueError, "q has shape"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1"),
    "scale": ({"softmax_scale": 0.0}, ValueError, "scale is 0"),
    "window": ({"window_size": (1, 2, 3)}, ValueError, "window has 3 entries"),
    "sinks": ({"sinks": torch.ones(3)}, ValueError, r"sinks has shape \(3,\)"),
    "caches": ({"v_cache": torch.zeros(3, 16, 2, 64)}, ValueError, "v_cache is torch.float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_call_writes_nothing(name, seed):
    wrong, error, message = WRONG[name]
    case, k, v = without_last(paged((20, 5), 16, seed), 16)
    kept = case.k_cache.clone()
    call = {
        "q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache, "k": k, "v": v,
        "cache_seqlens": case.seqused_k, "block_table": case.block_table,
    }  # fmt: skip
    with emulator.run(arch="sm_90a"), pytest.raises(error, match=message):
        flash_attn_with_kvcache(**{**call, **wrong})
    assert torch.equal(case.k_cache.nan_to_num(7.0), kept.nan_to_num(7.0))
