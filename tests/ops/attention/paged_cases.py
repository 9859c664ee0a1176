"""Packed queries on keys in pages: what no sequence has holds NaN, or is no page."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

import kernels_dsl
from reference.attention import Masking
from reference.inputs import normal
from tests.ops.attention.attention_cases import check_close

NO_PAGE = -123456789


class Paged(NamedTuple):
    """A call's tensors; `whole` has each sequence's keys and values in one piece."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    used: torch.Tensor
    table: torch.Tensor
    whole: list[tuple[torch.Tensor, torch.Tensor]]

    def arguments(self, **options: Any) -> dict[str, Any]:
        """The keywords of `attention_varlen`."""
        longest = max(self.starts.diff().tolist(), default=0)
        return {
            "q": self.q, "k": self.k, "v": self.v, "cu_seqlens_q": self.starts, "max_seqlen_q": longest,
            "seqused_k": self.used, "block_table": self.table, **options,
        }  # fmt: skip

    def check(self, masking: Masking | list[Masking], **options: Any) -> torch.Tensor:
        """Runs the call, compares with float64, returns the output. `masking`: of all sequences, or each."""
        out, lse = kernels_dsl.attention_varlen(**self.arguments(return_lse=True, **options))
        self.compare(out, lse, masking)
        return out

    def compare(self, out: torch.Tensor, lse: torch.Tensor, masking: Masking | list[Masking]) -> None:
        """Compares a result with float64, sequence by sequence."""
        starts = self.starts.tolist()
        for n, (k, v) in enumerate(self.whole):
            rows = slice(starts[n], starts[n + 1])
            if rows.stop > rows.start:
                own = masking[n] if isinstance(masking, list) else masking
                tensors = (self.q[None, rows], k[None], v[None])
                check_close((out[None, rows], lse[None, :, rows]), tensors, own)


def paged(
    lengths: tuple[tuple[int, int], ...],
    page: int,
    seed: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    heads_first: bool = False,
    hidden: int = 0,
    device: str = "cpu",
) -> Paged:
    """Sequences of (queries, keys), in pages in any order. `heads_first`: pages hold heads before keys. Of
    the first `hidden` keys of each, whole pages are none."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-k // page) for _, k in lengths]
    count = sum(pages) + 2
    caches = []
    for dim in dims:
        sizes = (count, heads[1], page, dim) if heads_first else (count, page, heads[1], dim)
        cache = torch.full(sizes, math.nan, dtype=dtype)
        caches.append(cache.transpose(1, 2) if heads_first else cache)
    table = torch.full((len(lengths), max(pages, default=0) + 1), NO_PAGE, dtype=torch.int32)
    order, whole = torch.randperm(count, generator=generator).tolist(), []
    for b, (_, k_len) in enumerate(lengths):
        pair = [normal((k_len, heads[1], dim), dtype, seed=seed + 7 * b + n) for n, dim in enumerate(dims)]
        whole.append((pair[0].to(device), pair[1].to(device)))
        for p in range(pages[b]):
            place, first, last = order.pop(), p * page, min((p + 1) * page, k_len)
            if last <= hidden:
                continue
            table[b, p] = place
            for cache, x in zip(caches, pair):
                cache[place, : last - first] = x[first:last]
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
    q = normal((int(starts[-1]), heads[0], dims[0]), dtype, seed=seed + 3)
    used = torch.tensor([k for _, k in lengths], dtype=torch.int32)
    return Paged(*(x.to(device) for x in (q, *caches, starts, used, table)), whole)
