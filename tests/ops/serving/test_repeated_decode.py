"""The short way of repeated calls of `attention_decode`, and under the names of others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.problem import H200
from kernels_dsl.flash_attn import flash_attn_with_kvcache
from kernels_dsl.flashinfer import BatchDecodeWithPagedKVCacheWrapper
from kernels_dsl.ops import launch, operation
from kernels_dsl.ops.serving import decode_operation, workspace
from kernels_dsl.ops.serving.decode_operation import ATTENTION_DECODE
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import LEAST
from tests.ops.serving.decode_cases import Paged, paged

WORKSPACE, COUNTERS = 5, 6
"""Places of their addresses among the arguments."""


@pytest.fixture
def launched(monkeypatch):
    """The arguments of each launch, on tensors that pass for those of an H200."""
    calls = []
    monkeypatch.setattr(launch, "launcher_of", lambda *_: (lambda *args: calls.append(args), None))
    monkeypatch.setattr(operation, "target_of", lambda *_: Target(H200, -1))
    monkeypatch.setattr(ATTENTION_DECODE, "calls", {})
    monkeypatch.setattr(ATTENTION_DECODE, "plans", {})
    return calls


@pytest.fixture
def case(seed) -> Paged:
    return paged((100, 30), 16, seed, heads=(8, 2), dim=128)


def decode(case: Paged, **options):
    """A call, the output alone where nothing else is asked for."""
    return kernels_dsl.attention_decode(
        case.q, case.k_cache, case.v_cache, seqused_k=case.seqused_k, block_table=case.block_table, **options
    )


@pytest.mark.parametrize("form", ["alone", "lse", "out", "sinks", "scales"])
def test_same_launch(form, case, launched):
    """The second call finds the first one's plan, the third goes past `run`; inputs are as given."""
    options = {
        "alone": {}, "lse": {"return_lse": True}, "out": {"out": torch.empty_like(case.q)},
        "sinks": {"sinks": torch.zeros(8), "window": (64, 0), "scale": 0.5},
        "scales": {"k_scale": torch.ones(()), "v_scale": torch.ones(2)},
    }[form]  # fmt: skip
    if form == "scales":
        caches = (x.to(torch.float8_e4m3fn) for x in case[1:3])
        case = case._replace(**dict(zip(("k_cache", "v_cache"), caches)))
    results = [decode(case, **options) for _ in range(3)]
    assert len(ATTENTION_DECODE.calls) == 1 and len(launched) == 3
    (plan,) = (found for _, _, found in next(iter(ATTENTION_DECODE.calls.values())))
    assert (plan.bare is not None) == (form == "alone")
    assert all(type(x) is type(results[0]) for x in results)
    for args in launched[1:]:
        assert len(args) == len(launched[0]) == 21
        for n, (x, y) in enumerate(zip(launched[0], args)):
            if n in (0, 1, 2):
                assert x is y
            elif isinstance(x, torch.Tensor):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            elif n not in (WORKSPACE, COUNTERS):
                assert x == y
        assert args[WORKSPACE].tensor.numel() >= launched[0][WORKSPACE].tensor.numel() > 0


def test_large_workspaces_are_not_kept(case, launched, monkeypatch):
    monkeypatch.setattr(decode_operation, "KEPT", 0)
    monkeypatch.setattr(decode_operation, "own_workspace", None)
    decode(case), decode(case)
    assert launched[0][WORKSPACE].tensor.numel() == launched[1][WORKSPACE].tensor.numel() > 0


def test_kvcache_goes_the_same_way(case, launched):
    """One that `attention_decode` served is found; what is wrong is still named."""
    given = (case.q, case.k_cache, case.v_cache)

    def call(**options):
        every = {"cache_seqlens": case.seqused_k, "block_table": case.block_table, "causal": True, **options}
        return flash_attn_with_kvcache(*given, **every)

    for _ in range(3):
        assert call().shape == case.q.shape
    assert len(ATTENTION_DECODE.calls) == 1 and len(launched) == 3
    assert call(block_table=None, page_table=case.block_table).shape == case.q.shape
    assert call(return_softmax_lse=True)[1].shape == (2, 8, 1)
    for options, words in (
        ({"page_table": case.block_table}, "beside"),
        ({"num_splits": 2}, "num_splits is 2"),
        ({"cache_seqlens": case.seqused_k.long()}, "cache_seqlens"),
        ({"rotary_cos": torch.ones(1)}, "rotary_cos"),
        ({"softmax_scale": True}, "scale"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call(**options)
    assert len(launched) == 5


@pytest.mark.parametrize("stacked", [False, True])
def test_flashinfer_goes_the_same_way(stacked, case, launched):
    """A call of `run` without options, and what differs from the plan is still named."""
    width = case.block_table.shape[1]
    starts = torch.arange(0, 3 * width, width, dtype=torch.int32)
    last, q = case.seqused_k - (width - 1) * 16, case.q[:, 0]
    caches = (case.k_cache, case.v_cache)
    given = torch.stack(caches, dim=1) if stacked else caches
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.plan(starts, case.block_table.flatten(), last, 8, 2, 128, 16, q_data_type=q.dtype)
    assert wrapper._repeated(q, given) is None
    assert all(wrapper.run(q, given).shape == q.shape for _ in range(2))
    assert wrapper._repeated(q, given).shape == q.shape and len(launched) == 3
    assert [x.data_ptr() for x in launched[0][:3]] == [x.data_ptr() for x in launched[2][:3]]
    narrow = caches[0][:, :8], caches[1]
    for wrong, words in (
        ((q.half(), given), "q is torch.float16"),
        ((q[:1], given), "q has shape"),
        ((q, narrow), "8, 2, 128"),
        ((q, 1), "is a int"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            wrapper.run(*wrong)


def test_workspaces_of_threads(monkeypatch):
    """A thread's own for each stream, and larger where more is asked for."""
    made = []
    monkeypatch.setattr(workspace, "serial_stream", lambda _: 0)
    monkeypatch.setattr(workspace, "_of_thread", threading.local())
    monkeypatch.setattr(workspace.torch, "empty", lambda n, device: made.append(n) or torch.ones(n))
    first = workspace.own_workspace(0, 10)
    assert workspace.own_workspace(0, LEAST) == first and made == [LEAST]
    assert workspace.own_workspace(0, LEAST + 1) != first
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(workspace.own_workspace, 0, 10).result()
    assert other != workspace.own_workspace(0, 10) and len(made) == 3
