"""The parts of a masked attention that ranks compute cover each pair of query and key once, and no other."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels_dsl.distributed import ring
from kernels_dsl.distributed.groups import Ranks
from kernels_dsl.distributed.launches import KeysValues, Options
from kernels_dsl.distributed.parts import Lengths, Limits, PackedSharing, Part, Sharing
from kernels_dsl.distributed.sequence import ORDERS, by_ranks, in_sequence, spans_of

WIDTHS = (None, 0, 1, 5, 8, 13, 40)
LIMITS = [Limits(left, right) for left, right in itertools.product(WIDTHS, WIDTHS)]


def _places(rank: int, sharing: Sharing) -> torch.Tensor:
    """The place in the sequence of each row of a rank."""
    spans = spans_of(rank, sharing.size, sharing.lengths.q, sharing.order)
    return torch.cat([torch.arange(span.start, span.start + span.length) for span in spans])


def _mask(q: torch.Tensor, k: torch.Tensor, limits: Limits, starts: tuple[int, ...] = ()) -> torch.Tensor:
    found = torch.ones(len(q), len(k), dtype=torch.bool)
    if starts:
        sequence_of = [torch.searchsorted(torch.tensor(starts), x, right=True) for x in (q, k)]
        found &= (sequence_of[0][:, None] == sequence_of[1]) & (q < starts[-1])[:, None]
    if limits.left is not None:
        found &= k >= q[:, None] - limits.left
    if limits.right is not None:
        found &= k <= q[:, None] + limits.right
    return found


def _of_parts(parts: list[Part], rows: int, keys: int) -> torch.Tensor:
    """The number of parts that each pair of rows is in, by what a kernel does with their limits."""
    found = torch.zeros(rows, keys, dtype=torch.int64)
    for part in parts:
        assert all(limit is None or limit >= 0 for limit in part.limits)
        q, k = part.q.end - part.q.start, part.k.end - part.k.start
        inner = _mask(torch.arange(q), torch.arange(k), part.limits, part.starts)
        assert not part.starts or (part.starts[-1] == q == k and len(part.starts) > 2)
        assert inner.any(0).all() and inner.any(1).all(), "rows that see nothing"
        found[part.q.slice, part.k.slice] += inner
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_cover_each_pair_once(size, order):
    for limits in LIMITS:
        sharing = Sharing(size, order, Lengths(8, 8), limits)
        for rank, owner in itertools.product(range(size), repeat=2):
            expected = _mask(_places(rank, sharing), _places(owner, sharing), limits)
            parts = sharing.parts(rank, owner)
            assert torch.equal(_of_parts(parts, 8, 8), expected.long()), (limits, rank, owner)
            rows = sharing.keys(rank, owner)
            seen = expected.any(0).nonzero().flatten().tolist()
            assert seen == [] if rows is None else (seen[0], seen[-1] + 1) == rows
        for rank in range(size):
            expected = _mask(_places(rank, sharing), torch.arange(8 * size), limits)
            found = _of_parts(sharing.parts_of_all(rank), 8, 8 * size)
            assert torch.equal(found, expected.long()), (limits, rank)


PACKED = [(0, 32), (0, 3, 3, 8, 11, 24, 30), (0, 5, 16, 32), (0, 9, 12, 13, 27, 27), (0, 0, 2)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("starts", PACKED)
def test_parts_of_packed_sequences_cover_each_pair_once(order, starts):
    for limits in LIMITS[::3]:
        sharing = PackedSharing(4, order, Lengths(8, 8), limits, starts)
        for rank, owner in itertools.product(range(4), repeat=2):
            expected = _mask(_places(rank, sharing), _places(owner, sharing), limits, starts)
            found = _of_parts(sharing.parts(rank, owner), 8, 8)
            assert torch.equal(found, expected.long()), (limits, rank, owner)
        for rank in range(4):
            expected = _mask(_places(rank, sharing), torch.arange(32), limits, starts)
            found = _of_parts(sharing.parts_of_all(rank), 8, 32)
            assert torch.equal(found, expected.long()), (limits, rank)


def test_packed_sequences_travel_where_ranks_share_one():
    starts = (0, 8, 13, 24, 32)  # the third lies on ranks 1 and 2
    sharing = PackedSharing(4, "contiguous", Lengths(8, 8), Limits(None, 0), starts)
    reads = [sharing.keys(rank, owner) for rank in range(4) for owner in range(4) if rank != owner]
    assert [rows for rows in reads if rows is not None] == [(5, 8)]
    assert all(len(sharing.parts(rank, rank)) == 1 for rank in range(4))


def test_a_step_of_a_causal_ring_is_one_launch():
    for size, order in itertools.product((2, 4), ORDERS):
        sharing = Sharing(size, order, Lengths(8, 8), Limits(None, 0))
        work = [0] * size
        for rank, owner in itertools.product(range(size), repeat=2):
            parts = sharing.parts(rank, owner)
            assert len(parts) == (1 if order == "zigzag" or owner <= rank else 0)
            work[rank] += int(_of_parts(parts, 8, 8).sum())
        assert order == "contiguous" or len(set(work)) == 1, "zig-zag order shares the work evenly"


def test_windows_skip_ranks():
    sharing = Sharing(4, "contiguous", Lengths(8, 8), Limits(3, 0))
    reads = [sharing.keys(rank, owner) is not None for rank in range(4) for owner in range(4)]
    assert reads == [owner in (rank, rank - 1) for rank in range(4) for owner in range(4)]
    assert sharing.keys(2, 1) == (5, 8)  # 3 of 8 rows travel


def _messages(call: ring.Call, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Ranks and rows of all that a rank sends and receives in its backward pass, in its order."""
    logged: dict[str, list[tuple[int, int]]] = {"sent": [], "received": []}

    class Exchange:
        def __init__(self, ranks, sent, received):
            for name, message in (("sent", sent), ("received", received)):
                if message is not None:
                    logged[name].append((message.peer, message.tensors.k.shape[1]))
            self.received = received

        def wait(self):
            return None if self.received is None else self.received.tensors

    monkeypatch.setattr(ring, "Exchange", Exchange)
    own = KeysValues(*(torch.zeros(1, 8, 1, 8) for _ in range(2)))
    returned = ring._Returned(call, own)
    for meeting in ring.meetings(call, own):
        if meeting.step.owner != call.ranks.rank:
            returned.exchange(meeting.step, meeting.found if meeting.parts else None)
    returned.finish()
    return logged


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("starts", PACKED)
def test_what_a_rank_receives_comes_in_the_order_in_which_it_is_sent(order, starts, monkeypatch):
    """Backends match messages of two ranks by their order alone, those of keys and those of gradients."""
    for limits in (Limits(None, 0), Limits(), Limits(3, 0), Limits(8, 1)):
        sharing = PackedSharing(4, order, Lengths(8, 8), limits, starts)
        logs = [
            _messages(ring.Call(Ranks(None, rank, 4), sharing, Options(None, 0.0, None)), monkeypatch)
            for rank in range(4)
        ]
        for sender, receiver in itertools.permutations(range(4), 2):
            sent = [rows for peer, rows in logs[sender]["sent"] if peer == receiver]
            assert sent == [rows for peer, rows in logs[receiver]["received"] if peer == sender]


@pytest.mark.parametrize("order", ORDERS)
def test_orders_are_inverses(order):
    rows = torch.cat([_places(rank, Sharing(4, order, Lengths(6, 6), Limits())) for rank in range(4)])
    assert torch.equal(in_sequence(rows.view(4, 6), order), torch.arange(24))
    assert torch.equal(by_ranks(torch.arange(24), 4, order).flatten(), rows)
