"""Caches in pages for the tests of `attention_decode`: what no query may see holds NaN, or is no page."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

import kernels_dsl
from reference.attention import Masking, attention

NO_PAGE = -123456789


class Paged(NamedTuple):
    """Sequences in a cache of pages; `whole` has each sequence's keys and values in one piece."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    whole: list[tuple[torch.Tensor, torch.Tensor]]

    def cuda(self) -> Paged:
        """The same on the GPU."""
        *tensors, whole = self
        return Paged(*(x.cuda() for x in tensors), [(k.cuda(), v.cuda()) for k, v in whole])

    def decode(self, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of `attention_decode`."""
        given = {"seqused_k": self.seqused_k, "block_table": self.block_table, **options}
        return kernels_dsl.attention_decode(self.q, self.k_cache, self.v_cache, return_lse=True, **given)


def paged(
    lengths: tuple[int, ...],
    page: int,
    seed: int,
    *,
    queries: int = 1,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    hidden: int = 0,
    spare: int = 1,
) -> Paged:
    """Random sequences, in pages in any order. The first `hidden` keys of each are NaN, whole pages of them
    none. `spare`: entries of the table past the longest."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-n // page) for n in lengths]
    shape = (sum(pages) + 2, page, heads[1], dim)
    caches = [torch.full(shape, math.nan, dtype=dtype) for _ in range(2)]
    table = torch.full((len(lengths), max(pages) + spare), NO_PAGE, dtype=torch.int32)
    order = iter(torch.randperm(shape[0], generator=generator).tolist())
    whole = []
    for b, n in enumerate(lengths):
        pair = [torch.randn((n, *shape[2:]), generator=generator).to(dtype) for _ in range(2)]
        whole.append((pair[0], pair[1]))
        for p in range(pages[b]):
            place, first, last = next(order), max(p * page, hidden), min((p + 1) * page, n)
            if last <= first:
                continue
            table[b, p] = place
            for cache, x in zip(caches, pair):
                cache[place, first - p * page : last - p * page] = x[first:last]
    q = torch.randn((len(lengths), queries, heads[0], dim), generator=generator).to(dtype)
    return Paged(q, *caches, torch.tensor(lengths, dtype=torch.int32), table, whole)


def check(case: Paged, found: tuple[torch.Tensor, torch.Tensor], masking: Masking) -> None:
    """Compares with float64, sequence by sequence: at most twice the error of rounding P and the output."""
    out, lse = found
    for b, (k, v) in enumerate(case.whole):
        wanted, wanted_lse = attention(case.q[b : b + 1], k[None], v[None], masking)
        ulp = torch.finfo(out.dtype).eps
        torch.testing.assert_close(out[b : b + 1].double(), wanted, rtol=2 * ulp, atol=2 * ulp)
        torch.testing.assert_close(lse[b : b + 1].double(), wanted_lse, rtol=1e-5, atol=1e-5)


def check_packed(
    case: Paged, starts: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor], masking: Masking
) -> None:
    """Compares with float64, sequence by sequence, as `check`."""
    out, lse = found
    ulp = torch.finfo(out.dtype).eps
    for b, (k, v) in enumerate(case.whole):
        own = slice(int(starts[b]), int(starts[b + 1]))
        wanted, wanted_lse = attention(case.q[None, own], k[None], v[None], masking)
        torch.testing.assert_close(out[None, own].double(), wanted, rtol=2 * ulp, atol=2 * ulp)
        torch.testing.assert_close(lse[None, :, own].double(), wanted_lse, rtol=1e-5, atol=1e-5)


class Scales(NamedTuple):
    """Scales of fp8 caches."""

    k_scale: torch.Tensor
    v_scale: torch.Tensor


def in_fp8(case: Paged, scales: Scales) -> Paged:
    """The same sequences in caches of e4m3, as what those hold times the scales; NaN stays NaN."""
    caches, wholes = [], []
    for n, scale in enumerate(scales):
        each = scale.expand(case.k_cache.shape[2])[:, None]
        caches.append(_rounded(case[1 + n].float() / each))
        wholes.append([_rounded(pair[n].float() / each).double() * each.double() for pair in case.whole])
    return case._replace(k_cache=caches[0], v_cache=caches[1], whole=list(zip(*wholes)))


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3, of values in its range; PyTorch casts larger ones to NaN."""
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def fp8_case(lengths: tuple[int, ...], page: int, seed: int, **options) -> tuple[Paged, Scales]:
    """Sequences in caches of e4m3, a scale for K and one a head for V. Rows of bf16 queries lie outside of
    what fp16 can represent."""
    case = paged(lengths, page, seed, **options)
    scales = Scales(torch.tensor(0.02), torch.linspace(0.01, 0.03, case.k_cache.shape[2]))
    if case.q.dtype == torch.bfloat16:
        case.q[:, :, ::2] *= 2.0**20
        scales = scales._replace(k_scale=scales.k_scale * 2.0**-20)
        case.k_cache.mul_(2.0**-20)
        case = case._replace(whole=[(k * 2.0**-20, v) for k, v in case.whole])
    return in_fp8(case, scales), scales
