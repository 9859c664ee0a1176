"""The grids of FlashAttention's `test_flash_attn_kvcache` and of FlashInfer's tests of paged decoding and
prefill, by their names, on a GPU. What is refused by name (rotation, left padding) is left out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kernels_dsl.flash_attn import flash_attn_with_kvcache
from kernels_dsl.flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from reference.attention import Masking
from tests.ops.attention.paged_cases import paged as prompts
from tests.ops.serving.decode_cases import Paged, check, paged
from tests.ops.serving.test_flash_attn_with_kvcache import NEW, without_last
from tests.ops.serving.test_flashinfer_names import BF16, lists, natural

pytestmark = pytest.mark.gpu
SIZES = [
    (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (1, 131072),
    (16, 131072), (128, 128),
]  # fmt: skip
"""FlashAttention's: queries, and keys that a cache has room for."""
LEFT = 100


def in_rows(case: Paged) -> Paged:
    """The same with a cache of its own for each sequence."""
    pages, page = case.block_table.shape[1], case.k_cache.shape[1]
    shape = (len(case.whole), pages * page, *case.k_cache.shape[2:])
    caches = [x.new_full(shape, torch.nan) for x in (case.k_cache, case.v_cache)]
    for b, pair in enumerate(case.whole):
        for cache, x in zip(caches, pair):
            cache[b, : len(x)] = x
    return case._replace(k_cache=caches[0], v_cache=caches[1])


@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("kv_heads", [6, 1, 3])
@pytest.mark.parametrize("page", [None, 256])
def test_flash_attn_kvcache(queries, keys, kv_heads, page, seed):
    """Head dimensions, masks and dtypes in turns; keys that the call appends, where there are pages."""
    number = 2 * SIZES.index((queries, keys)) + kv_heads
    dim, dtype = (64, 128)[number % 2], (torch.bfloat16, torch.float16)[number // 2 % 2]
    lengths = keys, max(keys // 3, queries + NEW)
    case = paged(
        lengths, page or 256, seed, queries=queries, heads=(6, kv_heads), dim=dim, dtype=dtype
    ).cuda()
    for causal, left in ((False, -1), (True, -1), (True, LEFT)):
        options = {"causal": causal, "window_size": (left, 0 if causal else -1), "return_softmax_lse": True}
        if page is None:
            own = in_rows(case)
            given = own.q, own.k_cache, own.v_cache
            found = flash_attn_with_kvcache(*given, cache_seqlens=own.seqused_k, **options)
        else:
            before, k, v = without_last(case, page)
            given = before.q, before.k_cache, before.v_cache, k, v
            found = flash_attn_with_kvcache(
                *given, cache_seqlens=before.seqused_k, block_table=before.block_table, **options
            )
        check(case, found, Masking(left=None if left < 0 else left, right=0 if causal else None))


@pytest.mark.parametrize("batch", [12, 17, 128])
@pytest.mark.parametrize("keys", [54, 97, 512, 2048])
@pytest.mark.parametrize("page", [1, 8, 16])
def test_flashinfer_decode(batch, keys, page, seed):
    """4 KV heads, 4 or 32 of queries, head dimensions of 128 and 256, both layouts, in turns."""
    number = batch + keys + page
    heads, dim = (4, 32)[number % 2], (128, 256)[number // 2 % 2]
    layout = ("NHD", "HND")[number // 4 % 2]
    case = paged((keys,) * batch, page, seed, heads=(heads, 4), dim=dim).cuda()
    caches = case.k_cache, case.v_cache
    if layout == "HND":
        caches = caches[0].transpose(1, 2).contiguous(), caches[1].transpose(1, 2).contiguous()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(16, dtype=torch.uint8, device="cuda"), layout)
    pages = (x.cuda() for x in lists(case.block_table.cpu(), case.seqused_k.cpu(), page))
    wrapper.plan(*pages, heads, 4, dim, page, q_data_type=BF16)
    check(case, natural(wrapper.run_return_lse(case.q[:, 0], caches), batch), Masking(right=0))


@pytest.mark.parametrize(("queries", "keys"), itertools.product((37, 17, 127), (54, 97, 512, 2048)))
@pytest.mark.parametrize("causal", [False, True])
def test_flashinfer_prefill(queries, keys, causal, seed):
    """12 prompts in pages of 1, 5 or 16 keys, one head of keys for four of queries."""
    queries, page = min(queries, keys), (1, 5, 16)[(queries + keys) % 3]
    case = prompts(((queries, keys),) * 12, page, seed, heads=(4, 1), device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.zeros(16, dtype=torch.uint8, device="cuda"))
    pages = (x.cuda() for x in lists(case.table.cpu(), case.used.cpu(), page))
    wrapper.plan(case.starts, *pages, 4, 1, case.q.shape[-1], page, causal=causal, q_data_type=BF16)
    out, lse = wrapper.run(case.q, (case.k, case.v), return_lse=True)
    case.compare(out, lse.mT * math.log(2), Masking(right=0 if causal else None))
