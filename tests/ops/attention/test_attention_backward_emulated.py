"""Gradients of attention in the emulator, against float64 autograd, with PyTorch's errors as yardstick."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from lowering import emulator
from reference.attention import Masking, attention
from reference.tolerance import check
from tests.ops.attention.attention_cases import inputs


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_90a"):
        yield


def _tensors(heads, lengths, dims, seed, dtype=torch.bfloat16):
    h, hk = heads
    q, k, v = inputs((1, lengths[0], h, dims[0]), (1, lengths[1], hk, dims[0]), dims[1], seed, dtype)
    return tuple(x.requires_grad_() for x in (q, k, v))


def _reference(tensors, masking, d_out, d_lse, dtype):
    """Gradients (B, H, S, D) by autograd of the reference in `dtype`; of the output alone without `d_lse`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out, lse = attention(*leaves, masking, dtype=dtype)
    given = [d_out.to(out.dtype)] + ([] if d_lse is None else [d_lse.to(lse.dtype)])
    found = torch.autograd.grad([out, lse][: len(given)], leaves, given)
    return [x.double().transpose(1, 2) for x in found]


def _check(tensors, masking, through_lse=False, **options):
    out, lse = kernels_dsl.attention(*tensors, return_lse=True, **options)
    generator = torch.Generator().manual_seed(3)
    d_out = torch.randn(out.shape, generator=generator).to(out.dtype)
    d_lse = torch.randn(lse.shape, generator=generator) if through_lse else None
    given = [d_out] + ([d_lse] if through_lse else [])
    found = torch.autograd.grad([out, lse][: len(given)], tensors, given, retain_graph=True)
    expected = _reference(tensors, masking, d_out, d_lse, torch.float64)
    peer = _reference(tensors, masking, d_out, d_lse, tensors[0].dtype)
    for own, exact, theirs in zip(found, expected, peer):
        check(own.transpose(1, 2), exact, theirs, ulps=4.0)
    again = torch.autograd.grad([out, lse][: len(given)], tensors, given)
    assert all(torch.equal(a, b) for a, b in zip(found, again))
    return found


@pytest.mark.parametrize(
    ("heads", "lengths", "dims"),
    [((2, 1), (70, 150), (64, 64)), ((1, 1), (1, 3), (64, 64)), ((1, 1), (70, 130), (40, 72)),
     ((2, 2), (130, 140), (128, 128)), ((1, 1), (65, 90), (96, 64))],
)  # fmt: skip
def test_shapes(heads, lengths, dims, seed):
    _check(_tensors(heads, lengths, dims, seed), Masking())


def test_a_gpu_before_hopper(seed):
    with emulator.run(arch="sm_89"):
        _check(_tensors((2, 1), (70, 90), (40, 64), seed), Masking(right=0), causal=True)


def test_float16(seed):
    _check(_tensors((1, 1), (70, 150), (64, 64), seed, torch.float16), Masking())


@pytest.mark.parametrize("lengths", [(150, 260), (260, 50)])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_causal(lengths, alignment, seed):
    masking = Masking(right=0, top_left=alignment == "top_left")
    _check(_tensors((1, 1), lengths, (64, 64), seed), masking, causal=True, alignment=alignment)


@pytest.mark.parametrize("window", [(20, 3), (None, 5), (150, 0), (1, 0)])
def test_window(window, seed):
    masking = Masking(left=window[0], right=window[1])
    _check(_tensors((2, 1), (250, 280), (64, 64), seed), masking, window=window)


def test_through_the_log_sum_exp(seed):
    _check(_tensors((2, 1), (70, 150), (64, 64), seed), Masking(right=0), through_lse=True, causal=True)


def test_the_log_sum_exp_alone(seed):
    q, k, v = _tensors((1, 1), (20, 30), (64, 64), seed)
    _, lse = kernels_dsl.attention(q, k, v, return_lse=True)
    found = torch.autograd.grad(lse.sum(), (q, k, v))
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*leaves)[1].sum(), leaves[:2])
    for own, exact in zip(found, expected):
        assert float((own.double() - exact).norm()) < 0.01 * float(exact.norm())
    assert not found[2].any()


def test_what_is_not_asked_for_is_none(seed):
    q, k, v = (x.detach() for x in _tensors((1, 1), (20, 30), (64, 64), seed))
    kernels_dsl.attention(q, k.requires_grad_(), v).sum().backward()
    assert q.grad is None and v.grad is None and k.grad.shape == k.shape


def test_stride_0_and_transposed_inputs(seed):
    q, k, v = _tensors((2, 1), (70, 90), (64, 64), seed)
    plain = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    one = plain[1].expand(1, 2, 90, 64)  # shared by both heads
    out = kernels_dsl.scaled_dot_product_attention(plain[0], one, plain[2].expand(1, 2, 90, 64))
    found = torch.autograd.grad(out.float().square().sum(), plain)
    grouped = kernels_dsl.scaled_dot_product_attention(*plain, enable_gqa=True)
    expected = torch.autograd.grad(grouped.float().square().sum(), plain)
    for own, other in zip(found, expected):
        assert float((own - other).float().norm()) < 0.01 * float(other.float().norm())


def test_no_rows_and_no_keys():
    for lengths in ((0, 5), (5, 0)):
        q, k, v = _tensors((1, 1), lengths, (64, 64), 0)
        kernels_dsl.attention(q, k, v).sum().backward()
        assert not any(bool(x.grad.any()) for x in (q, k, v))


def test_a_second_derivative_is_refused(seed):
    q, k, v = _tensors((1, 1), (20, 30), (64, 64), seed)
    (d_q,) = torch.autograd.grad(kernels_dsl.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward has no second derivative"):
        d_q.sum().backward()


def test_packed_sequences_and_what_lies_after_their_ends(seed):
    lengths_q, lengths_k, used = (70, 0, 33, 130), (90, 20, 0, 200), (80, 20, 0, 150)
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    q, k, v = inputs((sum(lengths_q) + 5, 2, 64), (sum(lengths_k) + 5, 1, 64), 64, seed)
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(4)).to(q.dtype)
    for x, end in ((q, starts_q[-1]), (k, starts_k[-1]), (v, starts_k[-1]), (d_out, starts_q[-1])):
        x[end:] = torch.nan
    for b, count in enumerate(used):
        k[starts_k[b] + count : starts_k[b + 1]] = torch.nan
        v[starts_k[b] + count : starts_k[b + 1]] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seqused = torch.tensor(used, dtype=torch.int32)
    out = kernels_dsl.attention_varlen(
        *leaves, starts_q, starts_k, max(lengths_q), max(lengths_k), causal=True, seqused_k=seqused
    )
    found = torch.autograd.grad(out, leaves, d_out)
    for b, count in enumerate(used):
        rows, keys = (
            slice(int(starts_q[b]), int(starts_q[b + 1])),
            slice(int(starts_k[b]), int(starts_k[b]) + count),
        )
        tensors = [q[rows][None], k[keys][None], v[keys][None]]
        if not lengths_q[b] or not count:
            assert not any(bool(x[y].any()) for x, y in zip(found, (rows, keys, keys)))
            continue
        exact = _reference(tensors, Masking(right=0), d_out[rows][None], None, torch.float64)
        peer = _reference(tensors, Masking(right=0), d_out[rows][None], None, torch.bfloat16)
        for own, at, expected, theirs in zip(found, (rows, keys, keys), exact, peer):
            check(own[at][None].transpose(1, 2), expected, theirs, ulps=4.0)
    assert all(bool(x[int(end) :].eq(0).all()) for x, end in zip(found, (starts_q[-1], *[starts_k[-1]] * 2)))
