"""Gradients of attention with masks and changed scores in the emulator, by both families.

Each family runs each kind of mask in some test; TEST_ALL_KERNELS=1 takes every test with both.
"""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.flash_attn import flash_attn_func
from lowering import emulator
from reference.attention import Masking, attention
from reference.tolerance import check
from tests.ops.attention.gradient_cases import check_gradients, leaves, reference_gradients
from tests.samples import ALL, one, pairs

ARCHS = ("sm_90a", "sm_89")


@pytest.fixture(autouse=True, params=ARCHS)
def _emulated(request):
    with emulator.run(arch=request.param):
        yield


def one_family(name):
    """Of a test whose siblings run the other family's code of this kind."""
    return pytest.mark.parametrize("_emulated", one(name, ARCHS), indirect=True)


def _every_third(b, h, i, j):
    return (i + j + h) % 3 != 0


def _same_document(b, h, i, j, documents):
    return documents[i] == documents[j]


def _alibi(score, b, h, i, j):
    return 0.5 * score - (i - j) * 0.01 * (h + 1)


def _by_distance(score, b, h, i, j, bias):
    return bias[h] * score + (score * score) * 0.1 + bias[j]


def _bent(score, b, h, i, j):
    return score * score * score


def _bent_gradient(gradient, score, b, h, i, j):
    return gradient * 3.0 * score * score


@one_family("test_softcap")
def test_softcap(seed):
    _small = {"softcap": 2.0, "causal": True}
    check_gradients(leaves((2, 1), (40, 140), (64, 64), seed), Masking(right=0, softcap=2.0), **_small)


def test_softcap_in_float16_through_the_log_sum_exp(seed):
    tensors = leaves((1, 1), (40, 90), (40, 72), seed, torch.float16)
    check_gradients(tensors, Masking(softcap=1.5), True, softcap=1.5)


@pytest.mark.parametrize(
    ("_emulated", "shape"),
    pairs("boolean", ARCHS, [(1, 2, 40, 140), (1, 1, 1, 140)]),
    indirect=["_emulated"],
)
def test_boolean(shape, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    check_gradients(leaves((2, 1), (40, 140), (64, 64), seed), Masking(allowed=mask), mask=mask)


@one_family("test_rows_that_a_mask_hides")
def test_rows_that_a_mask_hides(seed):
    mask = torch.ones(40, 90, dtype=torch.bool).tril(-5)  # the first five see nothing
    found = check_gradients(leaves((1, 1), (40, 90), (64, 64), seed), Masking(allowed=mask), mask=mask)
    assert not found[0][:, :5].any()


@pytest.mark.parametrize(
    ("_emulated", "dtype"),
    pairs("additive", ARCHS, [torch.float32, torch.bfloat16]),
    indirect=["_emulated"],
)
def test_additive(dtype, seed):
    """And the gradient of the mask, which is summed over the heads, of bent scores."""
    mask = torch.randn((2, 1, 40, 140), generator=torch.Generator().manual_seed(seed)).to(dtype)
    mask[0, 0, 3, :120] = mask[1, :, :, 100:] = -torch.inf
    tensors = (*leaves((2, 1), (40, 140), (64, 64), seed, batch=2), mask.requires_grad_())
    options = {"mask": mask, "window": (60, 20), "softcap": 3.0}
    check_gradients(tensors, Masking(60, 20, bias=mask, softcap=3.0), **options)


@pytest.mark.parametrize(
    ("_emulated", "shape"), pairs("mask alone", ARCHS, [(2, 2, 70, 66), (1, 66)]), indirect=["_emulated"]
)
def test_gradient_of_a_mask_alone(shape, seed):
    """Rows that see nothing have none. The same as beside other gradients, bit by bit."""
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.bfloat16)
    mask[..., 0, :] = -torch.inf if len(shape) > 2 else 0.0
    tensors = leaves((2, 1), (70, 66), (40, 96), seed, batch=2)
    masking = Masking(right=0, bias=mask.requires_grad_())
    found = check_gradients((*tensors, mask), masking, causal=True, mask=mask)
    out = kernels_dsl.attention(*(x.detach() for x in tensors), causal=True, mask=mask)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    (alone,) = torch.autograd.grad(out, mask, d_out)
    assert alone.dtype == mask.dtype and torch.equal(alone, found[3])


def test_mask_function(seed):
    masking = Masking(right=0, mask_mod=_every_third)
    tensors = leaves((2, 1), (40, 140), (64, 64), seed)
    check_gradients(tensors, masking, causal=True, mask_mod=_every_third)


@one_family("test_mask_function_that_reads_a_tensor")
def test_mask_function_that_reads_a_tensor(seed):
    documents = torch.arange(70).div(30, rounding_mode="floor").int()
    options = {"mask_mod": _same_document, "aux": (documents,)}
    masking = Masking(mask_mod=lambda b, h, i, j: documents[i] == documents[j])
    check_gradients(leaves((1, 1), (70, 70), (64, 64), seed), masking, **options)


@one_family("test_scaled_dot_product_attention_with_a_mask")
def test_scaled_dot_product_attention_with_a_mask(seed):
    q, k, v = (x.transpose(1, 2) for x in leaves((2, 2), (40, 90), (64, 64), seed))
    mask = torch.randn((2, 1, 90), generator=torch.Generator().manual_seed(seed)).to(q.dtype).requires_grad_()
    expanded = mask.expand(1, 2, 40, 90)
    own, theirs = (
        torch.autograd.grad(f(q, k, v, attn_mask=expanded).float().square().sum(), (q, k, v, mask))
        for f in (kernels_dsl.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
    )
    for x, y in zip(own, theirs):
        assert float((x - y).float().norm()) < 0.01 * float(y.float().norm())


def test_sinks(seed):
    sinks = torch.randn(2, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    tensors = leaves((2, 1), (40, 140), (64, 64), seed, batch=2)
    check_gradients((*tensors, sinks), Masking(right=0, sinks=sinks), True, causal=True, sinks=sinks)


@pytest.mark.parametrize(("batch", "q_len", "heads"), [(0, 4, 2), (1, 0, 2), (2, 4, 0)])
def test_sinks_of_nothing(batch, q_len, heads):
    q, k, v = (torch.randn(batch, n, heads, 64).half().requires_grad_() for n in (q_len, 3, 3))
    sinks = torch.randn(heads).requires_grad_()
    out = kernels_dsl.attention(q, k, v, sinks=sinks)
    found = torch.autograd.grad(out, (q, k, v, sinks), torch.ones_like(out))
    assert [x.shape for x in found] == [x.shape for x in (q, k, v, sinks)]
    assert not any(x.any() for x in found)


def test_sinks_alone_and_of_rows_without_keys(seed):
    sinks = torch.randn(
        2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()
    q, k, v = (x.detach() for x in leaves((2, 2), (40, 20), (64, 64), seed))
    for keys in (20, 0):
        tensors = q, k[:, :keys], v[:, :keys]
        _, lse = kernels_dsl.attention(*tensors, sinks=sinks, causal=True, return_lse=True)
        (found,) = torch.autograd.grad(lse.sum(), sinks)
        exact = attention(*tensors, Masking(right=0, sinks=sinks))[1]
        (expected,) = torch.autograd.grad(exact.sum(), sinks)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("_emulated", "asked"), pairs("asked for", ARCHS, [(0,), (1,), (2,)]), indirect=["_emulated"]
)
def test_only_what_is_asked_for(asked, seed):
    """dQ alone, or dK and dV alone: the same bits as all of them together."""
    tensors = leaves((2, 1), (40, 140), (64, 64), seed)
    together = torch.autograd.grad(kernels_dsl.attention(*tensors, causal=True).float().sum(), tensors)
    chosen = [x.detach().requires_grad_(i in asked) for i, x in enumerate(tensors)]
    kernels_dsl.attention(*chosen, causal=True).float().sum().backward()
    for i, (x, all_of_them) in enumerate(zip(chosen, together)):
        assert torch.equal(x.grad, all_of_them) if i in asked else x.grad is None


@pytest.mark.parametrize("_emulated", ARCHS if ALL else ("sm_90a",), indirect=True)
def test_score_functions_whose_derivative_is_derived(seed):
    tensors = leaves((2, 1), (40, 140), (64, 64), seed)
    check_gradients(tensors, Masking(right=0, score_mod=_alibi), causal=True, score_mod=_alibi)
    bias = torch.randn(140, generator=torch.Generator().manual_seed(seed))
    masking = Masking(score_mod=lambda score, b, h, i, j: _by_distance(score, b, h, i, j, bias))
    check_gradients(tensors, masking, score_mod=_by_distance, aux=(bias,))


@pytest.mark.parametrize("_emulated", ARCHS if ALL else ("sm_89",), indirect=True)
def test_score_function_with_its_backward(seed):
    tensors = leaves((1, 1), (40, 90), (64, 64), seed, torch.float16)
    masking = Masking(softcap=2.0, score_mod=_bent)
    check_gradients(tensors, masking, softcap=2.0, score_mod=_bent, score_mod_bwd=_bent_gradient)


def test_packed_sequences_with_a_mask_and_sinks(seed):
    """An empty sequence, one without keys, keys that do not count; NaN after all that counts."""
    lengths_q, lengths_k, used = (40, 0, 20, 7), (150, 20, 30, 0), (140, 20, 25, 0)
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (x.detach()[0] for x in leaves((2, 1), (sum(lengths_q) + 5, 200), (32, 32), seed))
    d_out = torch.randn(q.shape, generator=generator).to(q.dtype)
    bias = torch.randn((4, 1, 40, 150), generator=generator).requires_grad_()
    sinks = torch.randn(2, generator=generator).requires_grad_()
    for x in (q, d_out):
        x[sum(lengths_q) :] = torch.nan
    for b, count in enumerate((*used, 0)):
        for x in (k, v):
            x[int(starts_k[b]) + count : int(starts_k[b + 1]) if b < 4 else None] = torch.nan
    asked = [*(x.requires_grad_() for x in (q, k, v)), sinks, bias]
    out = kernels_dsl.attention_varlen(
        q, k, v, starts_q, starts_k, 40, 150, seqused_k=torch.tensor(used, dtype=torch.int32), mask=bias,
        mask_mod=_every_third, softcap=3.0, sinks=sinks,
    )  # fmt: skip
    found = torch.autograd.grad(out, asked, d_out)
    total, counted = torch.zeros(2, dtype=torch.float64), torch.zeros(bias.shape, dtype=torch.bool)
    for b, count in enumerate(used):
        rows = slice(int(starts_q[b]), int(starts_q[b + 1]))
        keys = slice(int(starts_k[b]), int(starts_k[b]) + count)
        if not lengths_q[b] or not count:
            assert not any(bool(x[y].any()) for x, y in zip(found, (rows, keys, keys)))
            continue
        at_b = (slice(b, b + 1), slice(None), slice(lengths_q[b]), slice(count))
        part = bias.detach()[at_b].requires_grad_()
        masking = Masking(softcap=3.0, bias=part, mask_mod=_every_third, sinks=sinks)
        tensors = tuple(x[y][None] for x, y in ((q, rows), (k, keys), (v, keys)))
        exact, peer = (
            reference_gradients(tensors, masking, d_out[rows][None], None, dtype)
            for dtype in (torch.float64, torch.bfloat16)
        )
        for own, at, expected, theirs in zip(found, (rows, keys, keys), exact, peer):
            check(own[at][None].transpose(1, 2), expected, theirs, ulps=4.0)
        check(found[4][at_b], exact[3], peer[3], ulps=4.0)
        counted[at_b] = True
        total += exact[4]
    assert not found[4][~counted].any()
    assert float((found[3] - total).norm()) < 0.02 * (1 + float(total.norm()))


@one_family("test_alibi_by_the_names_of_flash_attention")
def test_alibi_by_the_names_of_flash_attention(seed):
    slopes = torch.tensor([0.5, 0.1])
    tensors = leaves((2, 1), (40, 90), (32, 32), seed)
    masking = Masking(score_mod=lambda score, b, h, i, j: score - slopes[h] * (i + 50 - j).abs())
    out = flash_attn_func(*tensors, alibi_slopes=slopes)
    d_out = torch.ones_like(out)
    exact, peer = (
        reference_gradients(tensors, masking, d_out, None, dtype) for dtype in (torch.float64, torch.bfloat16)
    )
    for own, expected, theirs in zip(torch.autograd.grad(out, tensors, d_out), exact, peer):
        check(own.transpose(1, 2), expected, theirs, ulps=4.0)
