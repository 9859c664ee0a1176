"""The decoding kernel of Hopper, in the emulator: the bits of the kernel of cp.async, from every kind of
cache that TMA takes, and the other kernel for those that it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.decode import DecodeConfig, decode_config, tma_config, why_not_tma
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.serving import decode_operation
from lowering import emulator
from reference.attention import Masking
from tests.ops.serving.decode_cases import Paged, check, fp8_case, paged

HOPPER = DEVICES_BY_ARCH["sm_90a"]
CAUSAL = Masking(right=0)
Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def by_both(monkeypatch) -> Callable[[Call], tuple[torch.Tensor, torch.Tensor]]:
    """The result of a call by TMA, whose bits are those by cp.async."""

    def run(call: Call, **fields) -> tuple[torch.Tensor, torch.Tensor]:
        used: list[DecodeConfig] = []

        def noted(*arguments) -> DecodeConfig:
            used.append(replace(tma_config(*arguments), **fields))
            return used[-1]

        monkeypatch.setattr(decode_operation, "tma_config", noted)
        found = call()
        assert len(used) == 1 and used[0].box
        monkeypatch.setattr(decode_operation, "why_not_tma", lambda *_: "cp.async is asked for")
        other = call()
        assert len(used) == 1
        monkeypatch.setattr(decode_operation, "why_not_tma", why_not_tma)
        assert torch.equal(found[0], other[0]) and torch.equal(found[1], other[1])
        return found

    return run


def heads_first(case: Paged) -> Paged:
    """The same caches with heads before keys in memory."""
    turned = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in case[1:3])
    return case._replace(**dict(zip(("k_cache", "v_cache"), turned)))


@pytest.mark.parametrize(
    ("page", "lengths", "dim"),
    [(16, (300, 0, 1, 17, 64), 128), (64, (130, 65), 64), (128, (300, 5), 128), (48, (100, 77), 96)],
)
def test_pages(page, lengths, dim, seed, by_both):
    """Boxes of all sizes, more items than CTAs, lengths at the borders of pages and boxes; a short ring."""
    case = paged(lengths, page, seed, heads=(8, 2), dim=dim)
    with emulator.run(arch="sm_90a", sms=1, seeds=2):
        for stages, of_case in ((4, case), (6, heads_first(case))):
            check(case, by_both(of_case.decode, stages=stages), CAUSAL)


def test_items_past_the_sequences_among_which_the_first_is_guessed(seed, by_both):
    """33 sequences, and the first one that has keys is the last but one, or the last."""
    for lengths in ((0,) * 31 + (70, 300), (0,) * 32 + (130,)):
        case = paged(lengths, 16, seed, heads=(2, 1), dim=64)
        with emulator.run(arch="sm_90a", sms=1):
            check(case, by_both(case.decode), CAUSAL)


@pytest.mark.parametrize(("ahead", "page", "lengths"), [(3, 16, (300, 0, 1, 17)), (2, 128, (700, 5))])
def test_blocks_ahead(ahead, page, lengths, seed, by_both):
    """K may be loaded well ahead of its V."""
    case = paged(lengths, page, seed, heads=(8, 2), dim=128)
    with emulator.run(arch="sm_90a", sms=1, seeds=2):
        check(case, by_both(case.decode, k_ahead=ahead), CAUSAL)
        few = by_both(
            lambda: case._replace(q=case.q[:, :, :6]).decode(window=(40, 0)), k_ahead=ahead, stages=4
        )
    assert bool(few[0].isfinite().all())


def test_masks_and_many_rows(seed, by_both):
    """A window whose first keys are NaN, softcap, sinks, tiles of query rows, packed queries."""
    sinks = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    case = paged((200, 150), 16, seed, queries=3, heads=(16, 1), hidden=66, dtype=torch.float16)
    masking = Masking(left=80, right=0, softcap=3.0, sinks=sinks)
    with emulator.run(arch="sm_90a", sms=1):
        found = by_both(
            lambda: case._replace(q=case.q[:, -2:]).decode(window=(80, 0), softcap=3.0, sinks=sinks)
        )
        check(case._replace(q=case.q[:, -2:]), found, masking)
        packed = case._replace(q=case.q.flatten(0, 1)[:5])
        starts = torch.tensor([0, 3, 5], dtype=torch.int32)
        by_both(lambda: packed.decode(cu_seqlens_q=starts, window=(80, 0)), evict_first=True)


@pytest.mark.parametrize(
    ("page", "lengths", "dim", "dtype"),
    [(16, (300, 0, 1, 17), 128, torch.bfloat16), (64, (130, 200), 64, torch.float16)],
)
def test_fp8_caches(page, lengths, dim, dtype, seed, by_both):
    """e4m3 in pairs; queries become fp16 by the warps that compute alone."""
    case, scales = fp8_case(lengths, page, seed, heads=(8, 2), dim=dim, dtype=dtype)
    with emulator.run(arch="sm_90a", sms=1, seeds=2):
        check(case, by_both(lambda: case.decode(**scales._asdict()), stages=4), CAUSAL)
        by_both(lambda: case.decode(**scales._asdict(), window=(40, 0)))


def test_dense_caches(seed, by_both):
    """A sequence is a page, and its last box ends behind it."""
    case = paged((90, 90), 90, seed)
    k, v = (torch.stack(x) for x in zip(*case.whole))
    short = torch.tensor([90, 41], dtype=torch.int32)
    with emulator.run(arch="sm_90a"):
        by_both(lambda: kernels_dsl.attention_decode(case.q, k, v, seqused_k=short, return_lse=True))
        check(case, by_both(lambda: kernels_dsl.attention_decode(case.q, k, v, return_lse=True)), CAUSAL)


def test_which_kernel():
    """Reasons against TMA, and rings that fit."""
    strides = ((16384, 1024, 128, 1),) * 2
    few = decode_config(128, 4, 4, HOPPER)
    assert why_not_tma(few, HOPPER, 128, 16, strides) is None
    for other, words in (
        ((few, DEVICES_BY_ARCH["sm_89"], 128, 16, strides), "capability"),
        ((decode_config(128, 32, 4, HOPPER, 1), HOPPER, 128, 16, strides), "registers"),
        ((decode_config(80, 4, 4, HOPPER, 1), HOPPER, 80, 16, strides), "must be a multiple of 64"),
        ((decode_config(128, 4, 4, HOPPER, 1), HOPPER, 128, 16, ((16384, 1032, 128, 1),) * 2), "of 16"),
        ((decode_config(256, 4, 4, HOPPER), HOPPER, 256, 16, strides), "registers"),
        ((decode_config(72, 4, 4, HOPPER), HOPPER, 72, 16, strides), "head dimension is 72"),
        ((few, HOPPER, 128, 24, strides), "pages have 24 keys"),
        ((few, HOPPER, 128, 16, ((16384, 1020, 128, 1),) * 2), "strides"),
    ):
        assert words in str(why_not_tma(*other))
    assert why_not_tma(decode_config(128, 16, 4, HOPPER, 1), HOPPER, 128, 16, strides) is None
    for dim, kv_bytes in ((32, 2), (64, 2), (96, 2), (128, 2), (64, 1), (128, 1)):
        for rows in (4, 32) if kv_bytes == 2 else (4,):
            config = decode_config(dim, rows, 4, HOPPER, kv_bytes)
            for ctas in (1, 2):
                found = tma_config(replace(config, ctas_per_sm=ctas), HOPPER, 16)
                assert found.stages >= 4 and found.box == 16
                assert ctas * (found.smem_bytes + 1024) <= HOPPER.smem_bytes + 1024
