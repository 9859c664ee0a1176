"""`attention_decode(decode_equals_prefill=True)` in the emulator: a query has the same bits alone and among
others."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.decode import FIXED_SPLIT
from lowering import emulator
from reference.attention import Masking
from tests.ops.serving.decode_cases import check_packed, fp8_case, paged
from tests.ops.serving.rescored_cases import with_queries


def test_pages(seed):
    """Decoded without packing, rescored packed, at once and in chunks, on both sides of a border of splits,
    1024. Without the option bits differ."""
    rescored = with_queries(paged((1034, 40), 16, seed), (20, 3), (0, 9, 10, 19), seed)
    fixed = {"decode_equals_prefill": True}
    with emulator.run(arch="sm_80", sms=1):
        together = rescored.together(**fixed)
        alone = rescored.one_by_one(packed=False, **fixed)
        chunks = rescored.in_chunks(8, **fixed)
        assert not rescored.of_steps(rescored.together()).same(rescored.one_by_one())
    check_packed(rescored.case, rescored.starts, together, Masking(right=0))
    found = rescored.of_steps(together)
    assert found.same(alone) and found.same(chunks)


def test_dense_caches_and_a_window(seed):
    """More splits than the merge adds at a time, of which the last query does not see the first: splits
    keep their places in the sum."""
    case = paged((3100, 40), 3100, seed, heads=(6, 1), dim=96, dtype=torch.float16)
    order = case.block_table[:, 0].long()
    dense = case._replace(k_cache=case.k_cache[order], v_cache=case.v_cache[order], block_table=None)
    rescored = with_queries(dense, (3, 1), (0, 2), seed)
    # Equal weights, and splits that cancel each other, so that any other order of the sum has other bits.
    far = torch.tensor([0, -200, 200, -200, 200, 0, 0]).half().repeat_interleave(FIXED_SPLIT)[:3100]
    cancelling = dense._replace(
        k_cache=torch.zeros_like(dense.k_cache), v_cache=dense.v_cache + far[:, None, None]
    )
    options = {"window": (2586, 0), "decode_equals_prefill": True}
    with emulator.run(arch="sm_90a"):
        together = rescored.together(**options)
        rescored = rescored._replace(case=cancelling._replace(q=rescored.case.q))
        found, alone = rescored.of_steps(rescored.together(**options)), rescored.one_by_one(**options)
    check_packed(rescored.case, rescored.starts, together, Masking(left=2586, right=0))
    assert found.same(alone)


def test_fp8_window_and_sinks(seed):
    """Caches of e4m3, and windows that leave out whole splits of some queries (vLLM #54035: with fp8 caches
    decoding and prefill differ)."""
    case, scales = fp8_case((600, 40), 16, seed, dtype=torch.float16)
    rescored = with_queries(case, (10, 3), (0, 4, 9), seed)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    options = {"window": (82, 0), "sinks": sinks, "decode_equals_prefill": True, **scales._asdict()}
    with emulator.run(arch="sm_89"):
        together, alone = rescored.together(**options), rescored.one_by_one(**options)
    check_packed(rescored.case, rescored.starts, together, Masking(left=82, right=0, sinks=sinks))
    assert rescored.of_steps(together).same(alone)


def test_errors(seed):
    case = paged((40,), 16, seed)
    wrong = [
        ({"causal": False}, "decode_equals_prefill is True, must be False with causal False"),
        ({"causal": False, "window": (3, 1)}, "right width of 1"),
        ({"decode_equals_prefill": 1}, "decode_equals_prefill is 1"),
        ({"block_table": case.block_table.expand(1, -1).repeat(1, 1 << 16)}, "must have for at most 1048576"),
    ]
    with emulator.run(arch="sm_90a"):
        for change, words in wrong:
            with pytest.raises((TypeError, ValueError), match=words):
                case.decode(**{"decode_equals_prefill": True, **change})
        lengths = {"seqused_k": case.seqused_k, "block_table": case.block_table}
        why = kernels_dsl.attention_decode_supports(
            *case[:3], **lengths, causal=False, decode_equals_prefill=True
        )  # fmt: skip
        assert "right width of None" in str(why)
