"""Attention to caches of e4m3, in the emulator."""

from __future__ import annotations

import os

import pytest
import torch

import kernels_dsl
from kernels_dsl.flash_attn import flash_attn_with_kvcache
from lowering import emulator
from reference.attention import Masking
from tests.ops.serving.decode_cases import check, fp8_case

ALL = os.environ.get("TEST_ALL_KERNELS") == "1"
CAUSAL = Masking(right=0)
FEW = [("sm_90a", 64, (4, 2), torch.bfloat16), ("sm_89", 128, (3, 1), torch.float16)]
GRID = [
    (arch, dim, heads, dtype)
    for arch in ("sm_89", "sm_90a")
    for dim in (16, 64, 80, 128, 192, 256)
    for heads in ((4, 2), (32, 1), (64, 1))
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("arch", "dim", "heads", "dtype"), GRID if ALL else FEW)
def test_pages(arch, dim, heads, dtype, seed):
    """Borders of pages and of blocks; queries of a size that fp16 does not have; pages of NaN beside them."""
    case, scales = fp8_case((130, 0, 1, 150), 16, seed, heads=heads, dim=dim, dtype=dtype)
    with emulator.run(arch=arch, sms=1):
        check(case, case.decode(**scales._asdict()), CAUSAL)


def test_what_append_kv_wrote(seed):
    """New keys through `flash_attn_with_kvcache`, with a window, softcap and sinks; and a prefill."""
    case, scales = fp8_case((40, 20), 16, seed, queries=2, dtype=torch.float16)
    new = [torch.stack([pair[n][-1:] for pair in case.whole]).half() for n in (0, 1)]
    expected = [cache.view(torch.uint8).clone() for cache in case[1:3]]
    for b, length in enumerate(case.seqused_k.tolist()):
        at = case.block_table[b, (length - 1) // 16], (length - 1) % 16
        case.k_cache.view(torch.uint8)[at] = case.v_cache.view(torch.uint8)[at] = 0x7F
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    options = {
        "cache_seqlens": case.seqused_k - 1, "block_table": case.block_table, "causal": True,
        "window_size": (24, 0), "softcap": 3.0, "sinks": sinks, "k_descale": scales.k_scale,
        "v_descale": scales.v_scale, "return_softmax_lse": True,
    }  # fmt: skip
    with emulator.run(arch="sm_89"):
        found = flash_attn_with_kvcache(case.q, case.k_cache, case.v_cache, *new, **options)
    assert all(torch.equal(x, y.view(torch.uint8)) for x, y in zip(expected, case[1:3]))
    check(case, found, Masking(left=24, right=0, softcap=3.0, sinks=sinks))


def test_errors_name_the_argument(seed):
    case, scales = fp8_case((20,), 16, seed)
    given = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache, "seqused_k": case.seqused_k}
    given |= {"block_table": case.block_table, **scales._asdict()}
    wrong = [
        ({"k_scale": torch.ones(3)}, r"k_scale has shape \(3,\), must be \(\) or \(2,\)"),
        ({"v_scale": torch.ones(2).double()}, "v_scale is torch.float64"),
        ({"q": case.q[..., :24], "k_cache": case.k_cache[..., :24], "v_cache": case.v_cache[..., :24]},
         "q has head dimension 24, must be a multiple of 16"),
    ]  # fmt: skip
    with emulator.run(arch="sm_89"):
        for change, words in wrong:
            with pytest.raises((TypeError, ValueError), match=words):
                kernels_dsl.attention_decode(**{**given, **change})
    with emulator.run(arch="sm_80"), pytest.raises(ValueError, match=r"capability 8\.0, must be of 8\.9"):
        kernels_dsl.attention_decode(**given)
