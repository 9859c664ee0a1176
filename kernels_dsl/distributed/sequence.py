"""A sequence over the ranks of a group: the rows that each has, and their order.

"contiguous": rank r of n has the r-th of n chunks. "zigzag": it has chunks r and 2n-1-r of 2n, so that under
a causal mask all ranks have the same work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernels_dsl.checks import options
from kernels_dsl.distributed.agreement import agree
from kernels_dsl.distributed.groups import Ranks, ranks_of

ORDERS = ("contiguous", "zigzag")


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name since torch 2.13, and before."""


class Span(NamedTuple):
    """Rows of the whole sequence that lie together on a rank, and their place among the rank's own."""

    start: int
    length: int
    local: int


def chunks_of(rank: int, size: int, order: str) -> list[int]:
    """The chunks of the sequence that a rank has, in its order."""
    return [rank] if order == "contiguous" else [rank, 2 * size - 1 - rank]


def spans_of(rank: int, size: int, length: int, order: str) -> list[Span]:
    """The rows of a rank that has `length` of them."""
    chunks = chunks_of(rank, size, order)
    rows = length // len(chunks)
    return [Span(chunk * rows, rows, place * rows) for place, chunk in enumerate(chunks)]


def check_local_length(name: str, length: int, order: str) -> None:
    """ValueError where `length` rows cannot be a rank's."""
    if order == "zigzag" and length % 2:
        raise ValueError(f"{name} has {length} rows, must be even: a rank has two chunks in zig-zag order")


def shard_sequence(
    x: torch.Tensor, group: Any = None, *, dim: int = 1, order: str = "contiguous"
) -> torch.Tensor:
    """The rows along `dim` of a whole sequence that this rank of `group` has: no communication.

    order: "contiguous", or "zigzag", which gives the ranks the same work under a causal mask. Positions of
    tokens and labels are sharded the same way. Differentiable. ValueError where the rows cannot be shared
    evenly: pad them.
    """
    ranks, order = ranks_of(group), options.one_of("order", order, ORDERS)
    parts = ranks.size * len(chunks_of(0, 1, order))
    length = x.shape[dim]
    if length % parts:
        raise ValueError(
            f"x has {length} rows in mode {dim}, must be a multiple of {parts} for {ranks.size} ranks in "
            f"{order} order: pad it"
        )
    rows = length // parts
    chunks = [x.narrow(dim, c * rows, rows) for c in chunks_of(ranks.rank, ranks.size, order)]
    return chunks[0].contiguous() if len(chunks) == 1 else torch.cat(chunks, dim)


def unshard_sequence(
    x: torch.Tensor, group: Any = None, *, dim: int = 1, order: str = "contiguous"
) -> torch.Tensor:
    """The whole sequence, on every rank of `group`, from each one's rows: the inverse of `shard_sequence`.

    An all-gather without a gradient: ValueError where one is asked for. Ranks that disagree: as in
    `context_parallel_attention`.
    """
    ranks = ranks_of(group)
    try:
        options.one_of("order", order, ORDERS)
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("x requires grad, must not: unshard_sequence has no gradient, detach x")
        check_local_length("x", x.shape[dim], order)
    except (TypeError, ValueError) as error:
        agree(ranks, dict, error)
        raise
    form = {"x's shape": tuple(x.shape), "x's dtype": x.dtype, "dim": dim % x.dim(), "order": order}
    agree(ranks, lambda: {"the call": "unshard_sequence", **form})
    return in_sequence(gathered(x.movedim(dim, 0), ranks), order).movedim(0, dim)


def gathered(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """(ranks, …): x of each rank."""
    found = x.new_empty((ranks.size, *x.shape))
    _all_gather(found.view(-1, *x.shape[1:]), x.contiguous(), group=ranks.group)
    return found


def in_sequence(x: torch.Tensor, order: str) -> torch.Tensor:
    """(rows of all ranks, …) in the order of the sequence, from (ranks, rows of each, …)."""
    size, rows, *others = x.shape
    if order == "zigzag":
        first, last = x.view(size, 2, rows // 2, *others).unbind(1)
        x = torch.cat((first, last.flip(0)))
    return x.reshape(size * rows, *others)


def by_ranks(x: torch.Tensor, size: int, order: str) -> torch.Tensor:
    """(ranks, rows of each, …) from (rows of all ranks, …): the inverse of `in_sequence`."""
    rows, *others = x.shape
    if order == "zigzag":
        first, last = x.reshape(2, size, rows // (2 * size), *others).unbind(0)
        return torch.stack((first, last.flip(0)), 1).reshape(size, rows // size, *others)
    return x.reshape(size, rows // size, *others)
