"""Parts of the tests of attention's gradients: leaves, float64 autograd of the reference, the tolerance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import kernels_dsl
from reference.attention import Masking, attention
from reference.gradient_rounding import mask_error
from reference.tolerance import check
from tests.ops.attention.attention_cases import inputs
from tests.samples import ALL


def leaves(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dims: tuple[int, int],
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
) -> tuple[torch.Tensor, ...]:
    """q, k and v, (batch, S, H, D), that require gradients."""
    h, hk = heads
    shapes = (batch, lengths[0], h, dims[0]), (batch, lengths[1], hk, dims[0])
    return tuple(x.requires_grad_() for x in inputs(*shapes, dims[1], seed, dtype))


def reference_gradients(
    tensors: tuple[torch.Tensor, ...],
    masking: Masking,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Gradients (B, H, S, D) by autograd of the reference in `dtype`; of the output alone without `d_lse`.

    Those of the masking's bias and sinks follow, where they require gradients.
    """
    copies = [x.detach().to(dtype).requires_grad_() for x in tensors]
    beside: dict[str, Any] = {"bias": masking.bias, "sinks": masking.sinks}
    asked = {name: x for name, x in beside.items() if x is not None and x.requires_grad}
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    asked = {name: x.detach().to(inner).requires_grad_() for name, x in asked.items()}
    out, lse = attention(*copies, replace(masking, **asked), dtype=dtype)
    given = [d_out.to(out.dtype)] + ([] if d_lse is None else [d_lse.to(lse.dtype)])
    found = torch.autograd.grad([out, lse][: len(given)], [*copies, *asked.values()], given)
    return [x.double().transpose(1, 2) for x in found[:3]] + [x.double() for x in found[3:]]


def check_gradients(
    tensors: tuple[torch.Tensor, ...], masking: Masking, through_lse: bool = False, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of a call with `options`, which mean `masking`, against the reference.

    Through the log-sum-exp twice, with the same bits; with TEST_ALL_KERNELS=1 always.
    """
    out, lse = kernels_dsl.attention(*tensors[:3], return_lse=True, **options)
    generator = torch.Generator().manual_seed(3)
    d_out = torch.randn(out.shape, generator=generator).to(out)
    d_lse = torch.randn(lse.shape, generator=generator).to(lse) if through_lse else None
    given = [d_out] + ([] if d_lse is None else [d_lse])
    found = torch.autograd.grad([out, lse][: len(given)], tensors, given, retain_graph=True)
    expected = reference_gradients(tensors[:3], masking, d_out, d_lse, torch.float64)
    peer = reference_gradients(tensors[:3], masking, d_out, d_lse, tensors[0].dtype)
    for name, own, exact, theirs in zip("qkv", found, expected, peer):
        check(own.transpose(1, 2), exact, theirs, ulps=4.0, case=f"gradient of {name}")
    if masking.bias is not None and masking.bias.requires_grad:
        rounded = mask_error(expected[3], tensors[:3], masking, d_out)
        peer[3] = expected[3] + (peer[3] - expected[3]).abs() + rounded
        check(found[3], expected[3], peer[3], ulps=4.0, case="gradient of the mask")
    if masking.sinks is not None:
        check_sinks(found[3], expected[3], tensors, masking, d_out)
    if ALL or through_lse:
        again = torch.autograd.grad([out, lse][: len(given)], tensors, given)
        assert all(torch.equal(a, b) for a, b in zip(found, again))
    return found


def check_sinks(
    found: torch.Tensor,
    expected: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    masking: Masking,
    d_out: torch.Tensor,
) -> None:
    """A sink's gradient is a sum over products of dO and the output, which is rounded to 16 bits."""
    assert masking.sinks is not None
    out, lse = (x.detach() for x in attention(*tensors[:3], masking))
    probs = torch.exp(masking.sinks.detach().double()[:, None] - lse)
    products = (out * d_out.double()).abs().sum(-1).transpose(1, 2)
    allowed = torch.finfo(d_out.dtype).eps / 2 * (probs * products).sum((0, 2)) + 1e-3 * (1 + expected.abs())
    assert bool(((found.double() - expected).abs() <= allowed).all())


def check_packed(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    used: tuple[int, ...],
    dims: tuple[int, int],
    seed: int,
    deterministic: bool = True,
) -> None:
    """Causal gradients of packed sequences, of which `used` keys count; NaN in all rows after those."""
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    sizes = ((sum(lengths_q) + 5, 2, dims[0]), (sum(lengths_k) + 5, 1, dims[0]))
    q, k, v = inputs(*sizes, dims[1], seed)
    d_out = torch.randn((*q.shape[:2], dims[1]), generator=torch.Generator().manual_seed(4)).to(q.dtype)
    for x, end in ((q, starts_q[-1]), (k, starts_k[-1]), (v, starts_k[-1]), (d_out, starts_q[-1])):
        x[end:] = torch.nan
    for b, count in enumerate(used):
        k[starts_k[b] + count : starts_k[b + 1]] = torch.nan
        v[starts_k[b] + count : starts_k[b + 1]] = torch.nan
    asked = [x.requires_grad_() for x in (q, k, v)]
    seqused = torch.tensor(used, dtype=torch.int32)
    out = kernels_dsl.attention_varlen(
        *asked, starts_q, starts_k, max(lengths_q), max(lengths_k), causal=True, seqused_k=seqused,
        deterministic=deterministic,
    )  # fmt: skip
    found = torch.autograd.grad(out, asked, d_out)
    for b, count in enumerate(used):
        rows, keys = (
            slice(int(starts_q[b]), int(starts_q[b + 1])),
            slice(int(starts_k[b]), int(starts_k[b]) + count),
        )
        tensors = [q[rows][None], k[keys][None], v[keys][None]]
        if not lengths_q[b] or not count:
            assert not any(bool(x[y].any()) for x, y in zip(found, (rows, keys, keys)))
            continue
        exact = reference_gradients(tensors, Masking(right=0), d_out[rows][None], None, torch.float64)
        peer = reference_gradients(tensors, Masking(right=0), d_out[rows][None], None, torch.bfloat16)
        for own, at, expected, theirs in zip(found, (rows, keys, keys), exact, peer):
            check(own[at][None].transpose(1, 2), expected, theirs, ulps=4.0)
    assert all(bool(x[int(end) :].eq(0).all()) for x, end in zip(found, (starts_q[-1], *[starts_k[-1]] * 2)))
