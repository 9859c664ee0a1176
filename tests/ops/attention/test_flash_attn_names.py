"""FlashAttention's functions under its names: they are this library's, and refuse what these do not do."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import kernels_dsl
from kernels_dsl import flash_attn
from kernels_dsl.flash_attn import cute as flash_attn_4
from kernels_dsl.sparse.attention_blocks import window_blocks
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.attention_cases import check_close, inputs

STARTS = torch.tensor([0, 40, 40, 110], dtype=torch.int32)


@pytest.fixture(scope="module", autouse=True)
def emulated():
    with emulator.run(arch="sm_90a"):
        yield


@pytest.fixture
def dense(seed):
    return inputs((2, 70, 4, 64), (2, 90, 2, 64), 64, seed)


@pytest.fixture
def packed(seed):
    return inputs((110, 4, 64), (110, 2, 64), 64, seed)


def test_dense_calls(dense) -> None:
    out, lse, probs = flash_attn.flash_attn_func(*dense, 0.0, 0.2, True, (30, -1), return_attn_probs=True)
    check_close((out, lse), dense, Masking(left=30, right=0), 0.2)
    assert probs is None
    assert torch.equal(out, flash_attn.flash_attn_func(*dense, 0.0, 0.2, True, (30, -1), deterministic=True))
    same, found = flash_attn_4.flash_attn_func(
        *dense, softmax_scale=0.2, causal=True, window_size=(30, None), return_lse=True
    )
    assert torch.equal(out, same) and torch.equal(lse, found)


def test_packed_calls(packed) -> None:
    want, want_lse = kernels_dsl.attention_varlen(*packed, STARTS, STARTS, 70, causal=True, return_lse=True)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        *packed, STARTS, STARTS, 70, 70, causal=True, return_attn_probs=True
    )
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    out, none = flash_attn_4.flash_attn_varlen_func(*packed, None, STARTS, STARTS, causal=True)
    assert torch.equal(out, want) and none is None


def test_tensors_in_one(dense, packed) -> None:
    q, k, v = dense[0][:, :, :2], *(x[:, :70] for x in dense[1:])
    want = kernels_dsl.attention(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True), want)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True), want)
    q, k, v = packed[0][:, :2], *packed[1:]
    want = kernels_dsl.attention_varlen(q, k, v, STARTS, STARTS, 70)
    both = torch.stack((q, k, v), 1)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(both, STARTS, 70), want)
    both = torch.stack((k, v), 1)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q, both, STARTS, STARTS, 70, 70, 0.0), want)
    with pytest.raises(ValueError, match=r"qkv has shape \(110, 2, 2, 64\), must be \(T, 3, H, D\)"):
        flash_attn.flash_attn_varlen_qkvpacked_func(both, STARTS, 70)


def _by_hand(q, k, v, slopes, causal):
    """Output and log-sum-exp in float64 with ALiBi, aligned to the bottom right; slopes (B or 1, H)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    distance = i - torch.arange(k.shape[2])
    scores = q @ k.mT / q.shape[-1] ** 0.5 - slopes.double()[..., None, None] * distance.abs()
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi(dense, causal: bool, shape) -> None:
    slopes = torch.rand(shape)
    out, lse, _ = flash_attn.flash_attn_func(
        *dense, causal=causal, alibi_slopes=slopes, return_attn_probs=True
    )
    want, want_lse = _by_hand(*dense, slopes.expand(2, 4), causal)
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)


def test_alibi_of_packed_sequences_is_aligned_in_each(packed) -> None:
    starts_k, slopes = torch.tensor([0, 20, 50, 110], dtype=torch.int32), torch.rand(3, 4)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        *packed, STARTS, starts_k, 70, 60, alibi_slopes=slopes, return_attn_probs=True
    )
    for n, (first, last) in enumerate(zip(STARTS[:-1].tolist(), STARTS[1:].tolist())):
        q = packed[0][first:last][None]
        k, v = (x[starts_k[n] : starts_k[n + 1]][None] for x in packed[1:])
        want, want_lse = _by_hand(q, k, v, slopes[n : n + 1], False)
        torch.testing.assert_close(out[first:last].double(), want[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:, first:last].double(), want_lse[0], atol=1e-4, rtol=1e-4)


def test_pages_of_packed_sequences(packed) -> None:
    """Both names of the table, lengths by prefix sums or by themselves."""
    q, k, v = packed
    want = flash_attn.flash_attn_varlen_func(q, k, v, STARTS, STARTS, 70, 70, causal=True)
    lengths = STARTS.diff()
    table = torch.tensor([[10 * n + i for i in range(7)] for n in range(len(lengths))], dtype=torch.int32)
    caches = [x.new_full((10 * len(lengths), 10, *x.shape[1:]), torch.nan) for x in (k, v)]
    for cache, x in zip(caches, (k, v)):
        for n, (first, last) in enumerate(zip(STARTS[:-1].tolist(), STARTS[1:].tolist())):
            cache[10 * n : 10 * n + 10].flatten(0, 1)[: last - first] = x[first:last]
    got = flash_attn.flash_attn_varlen_func(
        q, *caches, STARTS, STARTS, 70, 70, causal=True, block_table=table
    )
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    pages = {"cu_seqlens_q": STARTS, "max_seqlen_q": 70, "page_table": table, "causal": True}
    for given in ({"seqused_k": lengths}, {"cu_seqlens_k": STARTS}):
        assert torch.equal(flash_attn_4.flash_attn_varlen_func(q, *caches, **pages, **given)[0], got)


@pytest.mark.parametrize(("window", "side"), [((None, -1), "right"), ((3, -2), "right"), ((-1, 5), "left")])
def test_flash_attn_4s_window_with_one_negative_side_is_refused(dense, packed, window, side) -> None:
    """To flash-attn-4 it lies beside the diagonal; to `attention` -1 is no limit."""
    starts = torch.tensor([0, 20, 50, 110], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"window_size is \({window[0]}, .*, its {side} must be None"):
        flash_attn_4.flash_attn_func(*dense, window_size=window)
    with pytest.raises(ValueError, match="beside the diagonal"):
        flash_attn_4.flash_attn_varlen_func(*packed, None, STARTS, starts, 70, 60, window_size=window)


def test_flash_attn_4s_windows_without_a_limit(dense) -> None:
    want, _ = flash_attn_4.flash_attn_func(*dense)
    assert torch.equal(flash_attn_4.flash_attn_func(*dense, window_size=(-3, -1))[0], want)
    want, _ = flash_attn_4.flash_attn_func(*dense, window_size=(9, 0))
    assert torch.equal(flash_attn_4.flash_attn_func(*dense, causal=True, window_size=(9, -1))[0], want)


class Lists(NamedTuple):
    """The record of FlashAttention-4, as far as it is read."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None


def test_lists_sinks_and_functions(dense) -> None:
    lists, sinks = window_blocks(70, 90, left=20, block=(64, 64), device="cpu"), torch.rand(4)
    options = {"score_mod": lambda score, b, h, i, j, x, y: score * x[h] + y}
    aux = torch.rand(4)
    want = kernels_dsl.attention(*dense, sinks=sinks, blocks=lists, aux=(aux, 2.0), **options)
    given = Lists(*lists.tensors, block_size=lists.block)
    got, _ = flash_attn_4.flash_attn_func(
        *dense, learnable_sink=sinks, block_sparse_tensors=given, aux_tensors=[aux], aux_scalars=(2.0,),
        **options,
    )  # fmt: skip
    assert torch.equal(got, want)


def test_gradients(dense) -> None:
    leaves = [x.requires_grad_() for x in dense]
    seed = torch.ones_like(dense[0])
    want = torch.autograd.grad(kernels_dsl.attention(*dense, causal=True), leaves, seed)
    for found in (
        flash_attn.flash_attn_func(*dense, causal=True),
        flash_attn_4.flash_attn_func(*dense, causal=True)[0],
    ):
        assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(found, leaves, seed), want))


REFUSED = {
    "dropout_p": (flash_attn.flash_attn_func, {"dropout_p": 0.1}, "dropout_p is 0.1, must be 0"),
    "slopes": (flash_attn.flash_attn_func, {"alibi_slopes": torch.rand(3, 4)}, r"must be \(H,\) or \(2, H\)"),
    "dtype": (flash_attn.flash_attn_func, {"alibi_slopes": torch.ones(4).half()}, "must be torch.float32"),
    "deterministic": (flash_attn.flash_attn_func, {"deterministic": 1}, "deterministic is 1"),
    "qv": (flash_attn_4.flash_attn_func, {"qv": torch.ones(1)}, "qv is given"),
    "backward function": (flash_attn_4.flash_attn_func, {"score_mod_bwd": len}, "None without score_mod"),
    "padded": (flash_attn_4.flash_attn_varlen_func, {}, "cu_seqlens_q is None, must be given"),
    "lists": (flash_attn_4.flash_attn_func, {"block_sparse_tensors": 3}, "must have a field mask_block_cnt"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused(dense, case: str) -> None:
    function, options, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        function(*dense, **options)
