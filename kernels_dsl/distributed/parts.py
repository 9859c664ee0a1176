"""The work of a rank: which of its queries attend to which keys of another rank, and under which mask.

A window, of which a causal mask is one, becomes a window between two spans that is aligned to their first
rows. Rows that see nothing of the other span are left out, so that windows skip ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernels_dsl.distributed.sequence import Span, spans_of


class Limits(NamedTuple):
    """Query i attends to keys i - left to i + right; None is without limit."""

    left: int | None = None
    right: int | None = None


class Rows(NamedTuple):
    """Rows of a rank's tensors."""

    start: int
    end: int

    @property
    def slice(self) -> slice:
        """For indexing."""
        return slice(self.start, self.end)


class Part(NamedTuple):
    """Queries and keys of which one launch gets all; the limits count from the first of each."""

    q: Rows
    k: Rows
    limits: Limits = Limits()


def part_of(q: Span, k: Span, limits: Limits) -> Part | None:
    """The part between two spans; None where no query sees a key."""
    left, right = limits
    q_start, q_end, k_start, k_end = q.start, q.start + q.length, k.start, k.start + k.length
    if left is not None:
        k_start = max(k_start, q_start - left)
    if right is not None:
        k_end = min(k_end, q_end + right)
        q_start = max(q_start, k_start - right)
    if left is not None:
        q_end = min(q_end, k_end + left)
    if q_start >= q_end or k_start >= k_end:
        return None
    shift = q_start - k_start
    new_left = None if left is None or q_end - 1 - left <= k_start else left - shift
    new_right = None if right is None or q_start + right >= k_end - 1 else right + shift
    to_q, to_k = q.local - q.start, k.local - k.start
    return Part(
        Rows(q_start + to_q, q_end + to_q), Rows(k_start + to_k, k_end + to_k), Limits(new_left, new_right)
    )


def parts_between(q_spans: Sequence[Span], k_spans: Sequence[Span], limits: Limits) -> list[Part]:
    """All parts between the spans of two ranks, as few as there can be."""
    if list(q_spans) == list(k_spans) and limits == Limits(None, 0):
        length = q_spans[-1].local + q_spans[-1].length  # spans rise, so that rows of the rank do
        return [Part(Rows(0, length), Rows(0, length), limits)] if length else []
    found = [part_of(q, k, limits) for q in q_spans for k in k_spans]
    parts = [part for part in found if part is not None]
    return _joined(_joined(parts))


def _joined(parts: list[Part]) -> list[Part]:
    """Parts without limits that lie side by side as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is None or last.limits != Limits() or part.limits != Limits():
            found.append(part)
        elif last.q == part.q and last.k.end == part.k.start:
            found[-1] = Part(part.q, Rows(last.k.start, part.k.end))
        elif last.k == part.k and last.q.end == part.q.start:
            found[-1] = Part(Rows(last.q.start, part.q.end), part.k)
        else:
            found.append(part)
    return found


def states_of(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts by states of attention: those of one have no query in common."""
    states: list[list[Part]] = []
    for part in parts:
        for state in states:
            if all(x.q.end <= part.q.start or part.q.end <= x.q.start for x in state):
                state.append(part)
                break
        else:
            states.append([part])
    return states


class Lengths(NamedTuple):
    """Rows of q and of k that each rank has."""

    q: int
    k: int


class Sharing(NamedTuple):
    """All that the parts between any two ranks follow from: every rank computes those of all."""

    size: int
    order: str
    lengths: Lengths
    limits: Limits

    def parts(self, rank: int, owner: int) -> list[Part]:
        """Those between the queries of a rank and the keys of another."""
        q_spans = spans_of(rank, self.size, self.lengths.q, self.order)
        k_spans = spans_of(owner, self.size, self.lengths.k, self.order)
        return parts_between(q_spans, k_spans, self.limits)

    def parts_of_all(self, rank: int) -> list[Part]:
        """Those between the queries of a rank and the keys of all, in the order of the sequence."""
        q_spans = spans_of(rank, self.size, self.lengths.q, self.order)
        return parts_between(q_spans, [Span(0, self.size * self.lengths.k, 0)], self.limits)

    def keys(self, rank: int, owner: int) -> Rows | None:
        """The rows of the owner's keys that the queries of a rank need; None for none."""
        parts = self.parts(rank, owner)
        if not parts:
            return None
        return Rows(min(part.k.start for part in parts), max(part.k.end for part in parts))
