"""Sequences whose queries are decoded one by one, and again together, for tests that compare the bits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch

from tests.ops.serving.decode_cases import Paged


class Results(NamedTuple):
    """Outputs (rows, H, D) and log-sum-exps (rows, H) of some queries."""

    out: torch.Tensor
    lse: torch.Tensor

    def same(self, other: Results) -> bool:
        """True where all bits are."""
        return torch.equal(self.out, other.out) and torch.equal(self.lse, other.lse)


class Rescored(NamedTuple):
    """Sequences with packed queries. `steps`: queries of the first that are decoded one by one."""

    case: Paged
    queries: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def starts(self) -> torch.Tensor:
        """Queries before each sequence."""
        return self._ints([0, *accumulate(self.queries)])

    def _ints(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.case.q.device)

    @property
    def before(self) -> int:
        """Keys of the first sequence before its first query's."""
        return int(self.case.seqused_k[0]) - self.queries[0]

    def together(self, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """All queries in one call."""
        return self.case.decode(cu_seqlens_q=self.starts, max_seqlen_q=max(self.queries), **options)

    def of_steps(self, found: tuple[torch.Tensor, torch.Tensor]) -> Results:
        """The results of `steps`, of a call with the first sequence's queries."""
        rows = list(self.steps)
        return Results(found[0][rows], found[1][:, rows].T)

    def one_by_one(self, packed: bool = True, **options) -> Results:
        """A batch of the first sequence as it was when each of `steps` was its last query."""
        rows, count = list(self.steps), len(self.steps)
        table = self.case.block_table
        alone = self.case._replace(
            q=self.case.q[rows] if packed else self.case.q[rows][:, None],
            seqused_k=self._ints([self.before + 1 + n for n in self.steps]),
            block_table=None if table is None else table[:1].expand(count, -1).contiguous(),
        )
        if table is None:
            k, v = (x[:1].expand(count, *x.shape[1:]).contiguous() for x in alone[1:3])
            alone = alone._replace(k_cache=k, v_cache=v)
        if not packed:
            out, lse = alone.decode(**options)
            return Results(out[:, 0], lse[:, :, 0])
        out, lse = alone.decode(cu_seqlens_q=self._ints(range(count + 1)), **options)
        return Results(out, lse.T)

    def in_chunks(self, cut: int, **options) -> Results:
        """The first sequence's queries in two calls, `cut` of them in the first."""
        found = []
        for begin, end in ((0, cut), (cut, self.queries[0])):
            part = self.case._replace(
                q=self.case.q[begin:end],
                seqused_k=self._ints([self.before + end]),
                block_table=self.case.block_table[:1],
            )
            found.append(part.decode(cu_seqlens_q=self._ints([0, end - begin]), **options))
        out, lse = zip(*found)
        return self.of_steps((torch.cat(out), torch.cat(lse, dim=1)))


def with_queries(case: Paged, queries: tuple[int, ...], steps: tuple[int, ...], seed: int) -> Rescored:
    """The case with packed queries, as many as each sequence of `queries` has."""
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn((sum(queries), *case.q.shape[2:]), generator=generator).to(case.q)
    return Rescored(case._replace(q=q), queries, steps)
