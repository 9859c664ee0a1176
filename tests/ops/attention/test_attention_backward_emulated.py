"""Gradients of attention in the emulator, against float64 autograd, with PyTorch's errors as yardstick.

TEST_ALL_KERNELS=1 takes more head dimensions, windows and alignments.
"""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from lowering import emulator
from reference.attention import Masking, attention
from tests.ops.attention.gradient_cases import check_gradients, check_packed, leaves
from tests.samples import ALL, pairs


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_90a"):
        yield


@pytest.mark.parametrize(
    ("heads", "lengths", "dims"),
    [((2, 1), (70, 150), (64, 64)), ((1, 1), (1, 3), (64, 64)), ((1, 1), (70, 130), (40, 72)),
     ((1, 1), (130, 140), (128, 128))]
    + [((2, 2), (130, 140), (128, 128)), ((1, 1), (65, 90), (96, 64))] * ALL,
)  # fmt: skip
def test_shapes(heads, lengths, dims, seed):
    check_gradients(leaves(heads, lengths, dims, seed), Masking())


def test_a_gpu_before_hopper(seed):
    with emulator.run(arch="sm_89"):
        check_gradients(leaves((2, 1), (70, 90), (40, 64), seed), Masking(right=0), causal=True)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 140, 140), (2, 0, 140), (2, 140, 0), (0, 0, 0)])
def test_without_batches_queries_or_keys(arch, batch, q_len, k_len):
    """Of views into wider rows, whose strides are then of modes without elements."""
    q, k, v = (torch.randn(batch, n, 2, 80).bfloat16()[..., :64] for n in (q_len, k_len, k_len))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with emulator.run(arch=arch):
        out = kernels_dsl.attention(q, k, v)
        found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not out.any()
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
    assert not any(x.any() for x in found)


def test_float16(seed):
    check_gradients(leaves((1, 1), (70, 150), (64, 64), seed, torch.float16), Masking())


@pytest.mark.parametrize(
    ("alignment", "lengths"),
    pairs("causal gradients", ("bottom_right", "top_left"), [(150, 260), (260, 50)]),
)
def test_causal(lengths, alignment, seed):
    masking = Masking(right=0, top_left=alignment == "top_left")
    check_gradients(leaves((1, 1), lengths, (64, 64), seed), masking, causal=True, alignment=alignment)


@pytest.mark.parametrize("window", [(20, 3), (None, 5)] + [(150, 0), (1, 0)] * ALL)
def test_window(window, seed):
    masking = Masking(left=window[0], right=window[1])
    check_gradients(leaves((2, 1), (250, 280), (64, 64), seed), masking, window=window)


def test_through_the_log_sum_exp(seed):
    check_gradients(
        leaves((2, 1), (70, 150), (64, 64), seed), Masking(right=0), through_lse=True, causal=True
    )


def test_the_log_sum_exp_alone(seed):
    q, k, v = leaves((1, 1), (20, 30), (64, 64), seed)
    _, lse = kernels_dsl.attention(q, k, v, return_lse=True)
    found = torch.autograd.grad(lse.sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*exact)[1].sum(), exact[:2])
    for own, exact in zip(found, expected):
        assert float((own.double() - exact).norm()) < 0.01 * float(exact.norm())
    assert not found[2].any()


def test_what_is_not_asked_for_is_none(seed):
    q, k, v = (x.detach() for x in leaves((1, 1), (20, 30), (64, 64), seed))
    kernels_dsl.attention(q, k.requires_grad_(), v).sum().backward()
    assert q.grad is None and v.grad is None and k.grad.shape == k.shape


def test_stride_0_and_transposed_inputs(seed):
    q, k, v = leaves((2, 1), (70, 90), (64, 64), seed)
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
        q, k, v = leaves((1, 1), lengths, (64, 64), 0)
        kernels_dsl.attention(q, k, v).sum().backward()
        assert not any(bool(x.grad.any()) for x in (q, k, v))


def test_a_second_derivative_is_refused(seed):
    q, k, v = leaves((1, 1), (20, 30), (64, 64), seed)
    (d_q,) = torch.autograd.grad(kernels_dsl.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward has no second derivative"):
        d_q.sum().backward()


def test_packed_sequences_and_what_lies_after_their_ends(seed):
    check_packed((70, 0, 33, 130), (90, 20, 0, 200), (80, 20, 0, 150), (64, 64), seed)
