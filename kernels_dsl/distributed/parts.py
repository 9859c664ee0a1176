"""The work of a rank: which of its queries attend to which keys of another rank, and under which mask.

A window, of which a causal mask is one, becomes a window between two spans that is aligned to their first
rows. Rows that see nothing of the other span are left out, so that windows skip ranks. Two chunks of packed
sequences have one sequence in common at most, so that only a rank's own rows need their starts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kernels_dsl.distributed.sequence import Span, spans_of
from lowering.records import frozen


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


class Origin(NamedTuple):
    """The places in the whole sequence of a part's first query and key."""

    q: int
    k: int


class Part(NamedTuple):
    """Queries and keys of which one launch gets all; the limits count from the first of each.

    starts: where several packed sequences begin among the rows, and the end of the last; the limits are those
    of each. Empty where there is one. origin: where lists of blocks or a mask function need it.
    """

    q: Rows
    k: Rows
    limits: Limits = Limits()
    starts: tuple[int, ...] = ()
    origin: Origin | None = None


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
        if last is None or any(x.limits != Limits() or x.starts for x in (last, part)):
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


@frozen
class Sharing:
    """All that the parts between any two ranks follow from: every rank computes those of all."""

    size: int
    order: str
    lengths: Lengths
    limits: Limits

    def parts(self, rank: int, owner: int) -> list[Part]:
        """Those between the queries of a rank and the keys of another."""
        q_spans = spans_of(rank, self.size, self.lengths.q, self.order)
        k_spans = spans_of(owner, self.size, self.lengths.k, self.order)
        return self._between(q_spans, k_spans)

    def parts_of_all(self, rank: int) -> list[Part]:
        """Those between the queries of a rank and the keys of all, in the order of the sequence."""
        q_spans = spans_of(rank, self.size, self.lengths.q, self.order)
        return self._between(q_spans, self._all_keys())

    def _all_keys(self) -> list[Span]:
        return [Span(0, self.size * self.lengths.k, 0)]

    def _between(self, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> list[Part]:
        return parts_between(q_spans, k_spans, self.limits)

    def keys(self, rank: int, owner: int) -> Rows | None:
        """The rows of the owner's keys that the queries of a rank need; None for none."""
        parts = self.parts(rank, owner)
        if not parts:
            return None
        return Rows(min(part.k.start for part in parts), max(part.k.end for part in parts))


@frozen
class PackedSharing(Sharing):
    """That of packed sequences: `starts` of each in the whole, from 0, and the end of the last."""

    starts: tuple[int, ...]

    def _all_keys(self) -> list[Span]:
        rows = [
            span
            for rank in range(self.size)
            for span in spans_of(rank, self.size, self.lengths.k, self.order)
        ]
        return [Span(span.start, span.length, span.start) for span in sorted(rows)]

    def _between(self, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> list[Part]:
        pairs = [(q, k) for q in q_spans for k in k_spans]
        own = _side_by_side([self._own_part(q, k) for q, k in pairs if q.start == k.start])
        others = [self._shared_part(q, k) for q, k in pairs if q.start != k.start]
        found = [part for part in others if part is not None]
        if found and own and list(q_spans) == list(k_spans) and self.limits == Limits(None, 0):
            # A sequence of both chunks: its rows rise in the rank's, which is all that a causal mask asks.
            border, found = q_spans[-1].local, []
            own = [part._replace(starts=tuple(x for x in part.starts if x != border)) for part in own]
        return [self._simple(part) for part in own] + _joined(_joined(found))

    def _own_part(self, q: Span, k: Span) -> Part | None:
        """All sequences of a chunk; rows after the last sequence see nothing."""
        q, k = (_within(x, 0, self.starts[-1]) for x in (q, k))
        if q.length <= 0:
            return None
        inner = self.starts[bisect_right(self.starts, q.start) : bisect_left(self.starts, q.start + q.length)]
        starts = (0, *(start - q.start for start in dict.fromkeys(inner)), q.length)
        return Part(_rows(q), _rows(k), self.limits, starts)

    def _shared_part(self, q: Span, k: Span) -> Part | None:
        """The sequence that two chunks have in common, if there is one."""
        first, second = sorted((q, k))
        place = bisect_right(self.starts, second.start)
        if place == len(self.starts) or self.starts[place - 1] >= first.start + first.length:
            return None
        start, end = self.starts[place - 1 : place + 1]
        return part_of(_within(q, start, end), _within(k, start, end), self.limits)

    def _simple(self, part: Part) -> Part:
        """The part as one of a single sequence, if it is."""
        if len(part.starts) > 2:
            return part
        length = part.q.end - part.q.start
        found = part_of(Span(0, length, part.q.start), Span(0, length, part.k.start), self.limits)
        assert found is not None
        return found


def _side_by_side(parts: Sequence[Part | None]) -> list[Part]:
    """Parts of packed sequences, those whose rows follow one another as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if part is None:
            continue
        if last is not None and last.q.end == part.q.start and last.k.end == part.k.start:
            rows = Rows(last.q.start, part.q.end), Rows(last.k.start, part.k.end)
            border = last.starts[-1]
            starts = (*last.starts, *(border + start for start in part.starts[1:]))
            found[-1] = Part(*rows, part.limits, starts)
        else:
            found.append(part)
    return found


def _within(span: Span, start: int, end: int) -> Span:
    """The rows of a span that lie in a part of the sequence."""
    first, last = max(span.start, start), min(span.start + span.length, end)
    return Span(first, last - first, span.local + first - span.start)


def _rows(span: Span) -> Rows:
    return Rows(span.local, span.local + span.length)
