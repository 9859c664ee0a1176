"""FlashInfer's wrappers on this library's kernels, in the emulator."""

from __future__ import annotations

import math

import pytest
import torch

from kernels_dsl.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.paged_cases import Paged as Prompts
from tests.ops.attention.paged_cases import paged as prompts
from tests.ops.serving.decode_cases import check, fp8_case, paged

BF16 = torch.bfloat16
WORKSPACE = torch.zeros(16, dtype=torch.uint8)


def lists(table: torch.Tensor, used: torch.Tensor, page: int) -> tuple[torch.Tensor, ...]:
    """FlashInfer's indptr, indices and last_page_len of a table and lengths."""
    counts = [-(-n // page) for n in used.tolist()]
    indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    indices = torch.cat([row[:n] for row, n in zip(table, counts)])
    last = torch.tensor([n - page * (c - 1) if c else 0 for n, c in zip(used.tolist(), counts)])
    return indptr, indices, last.to(torch.int32)


def natural(found: tuple[torch.Tensor, torch.Tensor], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, Sq, H, D) and (B, H, Sq) of natural logarithms, of FlashInfer's rows."""
    out, lse = found
    return out.unflatten(0, (batch, -1)), lse.unflatten(0, (batch, -1)).transpose(1, 2) * math.log(2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode(layout, seed):
    """One tensor for K and V, or two; a sequence without keys; tensors to write to."""
    case = paged((40, 0, 17), 16, seed)
    cache = torch.stack([case.k_cache, case.v_cache], dim=1)
    given = cache if layout == "NHD" else tuple(x.transpose(1, 2).contiguous() for x in cache.unbind(1))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    with emulator.run(arch="sm_80"):
        wrapper.plan(*lists(case.block_table, case.seqused_k, 16), 4, 2, 64, 16, q_data_type=BF16)
        out, lse = torch.full_like(case.q[:, 0], math.nan), torch.full((3, 4), math.nan)
        found = wrapper.run_return_lse(case.q[:, 0], given, out=out, lse=lse)
    assert [x.data_ptr() for x in found] == [out.data_ptr(), lse.data_ptr()]
    check(case, natural(found, 3), Masking(right=0))


def test_several_queries_and_fp8(seed):
    """Scales as numbers and tensors; a window, a soft cap."""
    case, scales = fp8_case((40, 17), 16, seed, queries=2)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with emulator.run(arch="sm_89"):
        wrapper.plan(
            *lists(case.block_table, case.seqused_k, 16), 4, 2, 64, 16, q_data_type="bfloat16",
            kv_data_type=torch.float8_e4m3fn, q_len_per_req=2, window_left=20, logits_soft_cap=5.0,
            is_causal=True,
        )  # fmt: skip
        found = wrapper.run(
            case.q.flatten(0, 1), (case.k_cache, case.v_cache), k_scale=float(scales.k_scale),
            v_scale=scales.v_scale, return_lse=True, window_left=20,
        )  # fmt: skip
    check(case, natural(found, 2), Masking(left=20, right=0, softcap=5.0))


def test_a_plan_for_a_captured_call(seed):
    """`plan` writes to the tensors that a captured call reads; sizes and options stay. Numbers scale bf16
    caches too."""
    first, second = (paged(n, 16, seed) for n in ((40, 17), (16, 45)))
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 12, 2)]
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    with emulator.run(arch="sm_80"):
        wrapper.plan(*lists(first.block_table, first.seqused_k, 16), 4, 2, 64, 16, data_type=BF16)
        kept = wrapper._plan
        wrapper.plan(*lists(second.block_table, second.seqused_k, 16), 4, 2, 64, 16, data_type=BF16)
        caches = (second.k_cache, second.v_cache)
        found = wrapper.run_return_lse(second.q[:, 0], caches)
        scaled = wrapper.run(second.q[:, 0], caches, q_scale=0.5, k_scale=2.0, v_scale=2.0)
    assert torch.equal(scaled, 2 * found[0])
    assert wrapper._plan is kept and wrapper.is_cuda_graph_enabled
    check(second, natural(found, 2), Masking(right=0))
    for wrong, words in (
        ((paged((70,), 16, seed), 64), "last_page_len has 1 sequences, must have the buffers' 2"),
        ((paged((150, 150), 16, seed), 64), "indices has 20 pages, must have at most the buffer's 12"),
        ((first, 128), "sizes is Sizes"),
    ):
        case, dim = wrong
        with pytest.raises(ValueError, match=words):
            wrapper.plan(*lists(case.block_table, case.seqused_k, 16), 4, 2, dim, 16, data_type=BF16)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer is None"):
        BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, False, buffers[0])


def _planned(
    case: Prompts, heads: int, causal: bool = True, **options
) -> BatchPrefillWithPagedKVCacheWrapper:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(
        case.starts, *lists(case.table, case.used, 16), heads, 1, 64, 16, causal=causal, q_data_type=BF16,
        **options,
    )  # fmt: skip
    return wrapper


@pytest.mark.parametrize("splits", [None, 4])
def test_prompts(kernels, splits, seed):
    """A chunk after others, no query, and one; a fixed split asks for bits that are a sequence's own."""
    case = prompts(((9, 20), (0, 17), (1, 30)), 16, seed, heads=(8, 1))
    wrapper = _planned(case, 8, fixed_split_size=splits)
    with emulator.run(arch="sm_80"):
        out, lse = wrapper.run(case.q, (case.k, case.v), return_lse=True)
        case.compare(out, lse.mT * math.log(2), Masking(right=0))
        room = torch.full((8, 10), math.nan)
        _, written = wrapper.run(
            case.q, (case.k, case.v), return_lse=True, lse=room, lse_base="ln", lse_layout="HN"
        )
    assert written is room
    torch.testing.assert_close(written, lse.mT * math.log(2))
    assert kernels == ["attention_varlen" if splits is None else "attention_decode"] * 2


def test_few_queries_without_a_causal_mask(kernels, seed):
    case = prompts(((5, 20), (2, 30)), 16, seed, heads=(8, 1))
    with emulator.run(arch="sm_80"):
        out, lse = _planned(case, 8, causal=False, window_left=15).run(
            case.q, (case.k, case.v), return_lse=True
        )
    case.compare(out, lse.mT * math.log(2), Masking(left=15))
    assert kernels == ["attention_decode"]


def test_refusals(seed):
    case = paged((40,), 16, seed)
    pages = lists(case.block_table, case.seqused_k, 16)
    decode, prefill = (
        BatchDecodeWithPagedKVCacheWrapper(WORKSPACE),
        BatchPrefillWithPagedKVCacheWrapper(WORKSPACE),
    )
    with pytest.raises(RuntimeError, match="plan of BatchDecodeWithPagedKVCacheWrapper was not called"):
        decode.run(case.q[:, 0], (case.k_cache, case.v_cache))
    for wrong, words in (
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode is 'ROPE_LLAMA', must be 'NONE'"),
        ({"rope_theta": 1e4}, "rope_theta is given"),
        ({"kv_data_type": torch.float8_e5m2}, "kv_data_type is torch.float8_e5m2"),
        ({"o_data_type": torch.float32}, "o_data_type is torch.float32"),
        ({"q_data_type": "bf"}, "q_data_type is 'bf'"),
        ({"window_left": -2}, "window_left is -2"),
        ({"is_causal": True}, "is_causal is True, must be None or False"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            decode.plan(*pages, 4, 2, 64, 16, **wrong)
    with pytest.raises(ValueError, match="num_qo_heads is 3, must be a multiple of num_kv_heads"):
        decode.plan(*pages, 3, 2, 64, 16)
    with pytest.raises(ValueError, match=r"indptr is torch\.int64"):
        decode.plan(pages[0].long(), *pages[1:], 4, 2, 64, 16)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for wrong, words in (
        ({"custom_mask": starts}, "custom_mask is given"),
        ({"use_fp16_qk_reduction": True}, "use_fp16_qk_reduction is given"),
        ({"head_dim_vo": 128}, "head_dim_vo is 128, must be 64"),
    ):
        with pytest.raises(ValueError, match=words):
            prefill.plan(starts, *pages, 4, 2, 64, 16, **wrong)
    prefill.plan(starts, *pages, 4, 2, 64, 16, q_data_type=BF16)
    for options, words in (
        ({"lse_base": "log10"}, "lse_base is 'log10'"),
        ({"lse_layout": "HT"}, "lse_layout is 'HT'"),
        ({"lse": starts, "return_lse": True}, r"lse is torch.int32 .2,., must be torch.float32 .1, 4."),
        ({"use_fp16_softmax": True}, "use_fp16_softmax is given"),
    ):
        with pytest.raises(ValueError, match=words):
            prefill.run(case.q[:, 0], (case.k_cache, case.v_cache), **options)
    with pytest.raises(ValueError, match="variant_owns_mask is given"):
        BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, variant_owns_mask=True)
    with pytest.raises(ValueError, match=r"qo_indptr is torch\.int32"):
        prefill.plan(starts[:1], *pages, 4, 2, 64, 16)
    decode.plan(*pages, 4, 2, 64, 16, data_type=BF16)
    whole = torch.stack([case.k_cache, case.v_cache], dim=1)
    for q, cache, options, words in (
        (case.q[:, 0].half(), whole, {}, "q is torch.float16, must be torch.bfloat16, as planned"),
        (case.q[0], whole, {"window_left": 5}, "window_left is 5, must be -1, as planned"),
        (case.q[:, 0, :2], whole, {}, "q has shape"),
        (case.q[:, 0], whole[:, 0], {}, "must be .pages, 2, …. of five modes"),
        (case.q[:, 0], whole.transpose(2, 3), {}, "paged_kv_cache has k of"),
        (case.q[:, 0], [whole], {}, "paged_kv_cache is a list"),
        (case.q[:, 0], whole, {"kv_cache_sf": whole}, "kv_cache_sf is given"),
        (case.q[:, 0], whole, {"q_scale": torch.ones(())}, "q_scale is"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            decode.run(q, cache, **options)
    for arguments, words in (
        (("HDN",), "kv_layout is 'HDN'"),
        (("NHD", False, False, None, None, None, "cute-dsl"), "backend is 'cute-dsl'"),
        (("NHD", False, False, None, None, None, "auto", []), "jit_args is given"),
    ):
        with pytest.raises(ValueError, match=words):
            BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *arguments)
